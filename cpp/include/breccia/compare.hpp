// SPDX-License-Identifier: Apache-2.0
//
// How far a tensor is from its reference. No float copy of either is made; sums are in float64 and do not depend on
// the number of threads or on the backend.
#pragma once

#include "breccia/ops.hpp"

namespace breccia::inline v0_4 {

/// Where both tensors hold a NaN, both count as zero; one NaN alone makes the sums it enters NaN.
struct BRECCIA_API Comparison {
    std::int64_t count = 0;           ///< elements
    double signal = 0;                ///< sum of x^2, x of the reference
    double other = 0;                 ///< sum of y^2, y of the tensor
    double dot = 0;                   ///< sum of x y
    double noise = 0;                 ///< sum of (x - y)^2
    double max_error = 0;             ///< largest |x - y|
    std::int64_t max_error_at = -1;   ///< place in C order of an element that is so far off; -1 where none is off
    std::int64_t reference_nans = 0;  ///< elements of the reference that are NaN
    std::int64_t nans = 0;            ///< elements of the tensor that are NaN
    bool equal = true;                ///< every y is its x

    /// Signal to quantization noise in decibels: infinite where equal, -infinite where the noise is not finite, NaN
    /// where the reference is zero.
    [[nodiscard]] double sqnr_db() const;
    /// Of the two tensors as vectors; where one is zero, 1 if they are equal and 0 if not.
    [[nodiscard]] double cosine() const;

    /// Field by field.
    friend bool operator==(const Comparison&, const Comparison&) = default;
};

/// Throws Error unless both have one shape. Values are those of dequantize() in float32, and those of float64 arrays
/// as they are.
BRECCIA_API Comparison compare(const Operand& reference, const Operand& tensor);

/// How many numbers have a magnitude of each half octave.
struct Magnitudes {
    static constexpr int first = -298;  ///< half octave of the least float32, 2^-149
    static constexpr int size = 554;    ///< half octaves up to the largest
    /// counts[i]: of those from 2^((first + i) / 2) up to, but without, 2^((first + i + 1) / 2).
    std::array<std::int64_t, size> counts{};
    std::int64_t zeros = 0;       ///< numbers that are zero
    std::int64_t not_finite = 0;  ///< numbers that are infinite or NaN
    float largest = 0;            ///< of those that are finite

    /// Field by field.
    friend bool operator==(const Magnitudes&, const Magnitudes&) = default;
};

/// Of the numbers of `x`, as float32.
BRECCIA_API Magnitudes magnitudes(const Operand& x);
/// Of errors in multiples of `unit`, (y - x) / unit in float32. Throws Error unless `unit` is positive and finite.
BRECCIA_API Magnitudes error_magnitudes(const Operand& reference, const Operand& tensor, float unit);

/// How often each code of the element format occurs: 2^bits counts.
BRECCIA_API std::vector<std::int64_t> count_codes(const ScaledTensor& scaled);

}  // namespace breccia::inline v0_4
