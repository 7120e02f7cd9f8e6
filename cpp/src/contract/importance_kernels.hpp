// SPDX-License-Identifier: Apache-2.0
//
// What a search by weighted squared error asks of a backend. Written once in kernels/importance_kernels.inl.hpp over
// the vocabulary; every backend's sums are equal bit by bit.
#pragma once

#include <array>
#include <cstdint>

namespace breccia::inline v0_4 {

struct BlockScale;
struct ScaleParams;

/// What the codes of a format stand for, as numbers: one kernel serves all formats.
struct CodeGrid {
    bool integer = false;
    float lowest = 0, largest = 0;
    float smallest_normal = 0;  ///< of minifloats
    float magic = 0;            ///< of minifloats: 2^(23 - mantissa bits), see Minifloat::encode
};

/// What the scales of a tensor are whose codes are a byte.
struct CodedScales {
    std::array<float, 256> factor;       ///< codes are made of x times it
    std::array<float, 256> decoded;      ///< the global scale included
    std::array<std::uint8_t, 256> last;  ///< the last code whose scale is below twice that of this one
    int lowest = 0, highest = 0;         ///< the codes a search may choose
    bool from_zero = false;              ///< whether one begins at the lowest where amax's code, 0, scales all to zero
};

/// Consecutive blocks of one row, each with weights of its own.
struct WeightedBlocks {
    const float* x = nullptr;
    const float* weights = nullptr;  ///< above zero
    std::int64_t blocks = 0, block = 0;
};

/// Sums over a block, in units of the scale's error_unit, under integer codes q = x / scale, rounded and cut off.
struct IntegerSums {
    float error = 0;   ///< h (x - q s)^2
    float cross = 0;   ///< h x q
    float square = 0;  ///< h q^2
    float cut = 0;     ///< of the error: that of elements whose quotient lies beyond the codes
    float dead = 0;    ///< of the error: that of elements of code zero
};

struct ImportanceKernels {
    void (*coded_scales)(const ScaleParams&, CodedScales&);
    /// Puts the best code in the place of each: `codes` holds those of the amax rule. Blocks of zeros and blocks that
    /// are not finite keep theirs.
    void (*search_codes)(const WeightedBlocks&, const CodeGrid&, const CodedScales&, const ScaleParams&,
                         std::uint8_t* codes);
    /// Sum of h (x - value)^2 over finite values under one scale.
    float (*error)(const float* x, const float* weights, std::int64_t n, const CodeGrid&, const BlockScale&);
    /// Of codes lowest … largest, less the zero point; the second with `cut` and `dead`.
    IntegerSums (*integer_sums)(const float* x, const float* weights, std::int64_t n, float lowest, float largest,
                                const BlockScale&);
    IntegerSums (*integer_sums_and_ends)(const float* x, const float* weights, std::int64_t n, float lowest,
                                         float largest, const BlockScale&);
};

}  // namespace breccia::inline v0_4
