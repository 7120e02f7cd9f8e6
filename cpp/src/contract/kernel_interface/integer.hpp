// SPDX-License-Identifier: Apache-2.0
//
// Products of integers: a code is a small integer times the unit of its format, an activation is a sum of signed bytes
// ("digits", base 256) times a power of two. All sums within a step are exact.
//
// A step is 64 bytes of codes, 16 words of 32 bits. A lane is the place of such a word:
//     bytes:  element k of a step is in lane k / 4
//     packed: element k of a step is in lane k / 8
#pragma once

#include "contract/kernel_interface/in_place.hpp"

namespace breccia::inline v0_4 {

/// A step of an activation:
///     x(k) = unit(lane of k) * (d0 256^2 + d1 256 + d2 + smaller * (d3 256^(further - 1) + … ))
/// where d0, d1 … are the digits of element k, each from -128 to 127. `further` is 0 in most steps.
///     digit d of element k = digits[d][k], or, packed, digits[d][k % 2 * 64 + k / 2]
/// A kernel multiplies digits by unsigned bytes, each `offset` larger than the integer of its code, and starts its sums
/// with what that adds too much, negated. Where codes have zero points, the kernel multiplies by these, and `offset`
/// below is 1.
struct DigitStep {
    static constexpr int first = 3, most = 6;
    alignas(64) std::int8_t digits[most][128];
    /// offsets[0][lane] = -offset * (sum over the lane's elements of d0 256^2 + d1 256 + d2); offsets[1]: of d3 and on.
    std::int32_t offsets[2][16];
    /// units[lane] = unit(lane) * unit of the codes * Digits::bias. All are equal where PackDigits::run is not 0: the
    /// lanes of a prepared weight are rows, and all of them meet the same elements.
    float units[16];
    /// For prepared weights: runs[d][r] = -offset * (sum of digit d over the elements of run r of the step).
    std::int32_t runs[most][16];
    float smaller;         ///< unit of the further digits over unit of the first three
    std::uint16_t thirds;  ///< bit l: some third digit of lane l is not zero
    std::uint8_t further;  ///< how many digits there are beyond the first three
    std::uint8_t count;    ///< digits to multiply by: 2 where thirds and further are 0, else 3 + further
    /// Makes the size an odd number of cache lines, so that the same part of successive steps uses all cache sets.
    std::uint8_t unused[64];
};
static_assert(sizeof(DigitStep) / 64 % 2 == 1);

/// An activation as integers.
struct Digits {
    DigitStep* steps = nullptr;
    float bias = 1;  ///< a power of two that lets a kernel read E4M3 scales without adding their exponent bias
};

/// Makes the digits of `steps` steps of x. False where that many digits do not hold every element exactly.
struct PackDigits {
    const float* x = nullptr;
    std::int64_t steps = 0;
    bool zero_points = false;
    ScaleType scale_type = ScaleType::float32;  ///< of the codes
    std::int64_t run = 0;                       ///< 32-bit words in a run: 2, 4, 8 or 16; 0 unless weights are prepared
    Digits* out = nullptr;
};

/// out[n] = sum over k of w(n, k) x(k), rows in place.
struct IntegerGemv {
    CodeRows w;
    const Digits* x = nullptr;
    float* out = nullptr;
};

/// out[16 g + lane] = sum over k of w(16 g + lane, k) x(k), of a prepared weight without zero points. Codes and scales
/// lie as in LaneProduct with interleaved codes. A run is the words of a row that a kernel sums before it scales.
struct IntegerLanes {
    const std::uint8_t* codes = nullptr;
    std::int64_t groups = 0, quads = 0;
    std::int64_t run = 16, runs_per_block = 1, scale_step = 1;  ///< a run is 2, 4, 8 or 16 words of 32 bits
    const std::byte* scales = nullptr;
    ScaleType scale_type = ScaleType::float32;
    std::int64_t group_scale_stride = 0;
    const Digits* x = nullptr;
    float* out = nullptr;
};

}  // namespace breccia::inline v0_4
