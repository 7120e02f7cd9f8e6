// SPDX-License-Identifier: Apache-2.0
//
// What comparing two tensors asks of a backend. Written once in kernels/compare_kernels.inl.hpp; every backend's sums
// are equal bit by bit.
#pragma once

#include <cstdint>

namespace breccia::inline v0_4 {

/// Sums of elements i, i + 8, i + 16, … of what was added, and the worst of those.
struct ErrorLanes {
    static constexpr int lanes = 8;
    alignas(64) double signal[lanes] = {};
    alignas(64) double other[lanes] = {};
    alignas(64) double dot[lanes] = {};
    alignas(64) double noise[lanes] = {};
    /// The largest (x - y)^2 of floats, where no square overflows or vanishes; the largest |x - y| of doubles. NaNs do
    /// not count here; the noise tells of them.
    alignas(64) double worst[lanes] = {};
};

/// Bins that magnitudes are counted in: bin 0 holds zeros, bin 20 those from 2^-149, then one a half octave; the last
/// holds what is not finite.
inline constexpr int magnitude_bins = 575, first_magnitude_bin = 20;

struct CompareKernels {
    void (*add)(const float* x, const float* y, std::int64_t n, ErrorLanes& sums);
    void (*add_doubles)(const double* x, const double* y, std::int64_t n, ErrorLanes& sums);
    /// The bin of each |y[i] - x[i]| / unit, or of each |x[i]| / unit where y is null. Returns the bits of the largest
    /// quotient of a finite difference; one that overflows counts as the largest number.
    std::uint32_t (*bins)(const float* x, const float* y, float unit, std::int64_t n, std::uint16_t* bins);
};

}  // namespace breccia::inline v0_4
