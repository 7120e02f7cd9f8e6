// SPDX-License-Identifier: Apache-2.0
//
// Products of integers: a code is a small integer times the unit of its format, an activation is a sum of signed bytes
// ("digits", base 256) times a power of two. All sums within a step are exact.
//
// A step is 64 bytes of codes, 16 words of 32 bits. A lane is the place of such a word:
//     bytes:  element k of a step is in lane k / 4
//     packed: element k of a step is in lane k / 8
#pragma once

#include <array>

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
    /// Digits to multiply by: 2 where thirds and further are 0, else 3 + further; 1 of DigitsOfCodes.
    std::uint8_t count;
    /// Makes the size an odd number of cache lines, so that the same part of successive steps uses all cache sets.
    std::uint8_t unused[64];
};
static_assert(sizeof(DigitStep) / 64 % 2 == 1);

/// An activation as integers.
struct Digits {
    DigitStep* steps = nullptr;
    float bias = 1;          ///< a power of two that lets a kernel read E4M3 scales without adding their exponent bias
    bool one_unit = false;   ///< all units of all steps are the same; said of DigitsOfCodes alone
    bool symmetric = false;  ///< no digit is -128; said of DigitsOfCodes alone
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

/// Makes the one digit of activations that are INT8 codes themselves: x(k) = codes[k] * scales[k / block]. False where
/// a scale is neither zero nor within [2^-100, 2^100]. `count` is 1: digits[0], offsets[0], what a backend makes of
/// them, which lies in digits[0], digits[1] and offsets[1], and `units`, which is then unit(lane) * unit of the codes *
/// Digits::bias, are all that a kernel reads.
struct DigitsOfCodes {
    const std::int8_t* codes = nullptr;  ///< of whole steps, those past the end zero
    std::int64_t steps = 0;
    const float* scales = nullptr;       ///< global scale included
    std::int64_t blocks = 0, block = 0;  ///< scales, and elements to one: a multiple of a lane's, or all there are
    bool zero_points = false;
    ScaleType scale_type = ScaleType::float32;  ///< of the weight
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

/// Makes 16 weight rows ready for many activations: integers side by side, a step of 64 bytes at a time, that is
/// IntegerPanelKernel::elements of each row.
///     element e of step s of row r: out[s * 64 + (r * elements + e)], an unsigned byte or, of two elements, a word
/// Of packed codes, a row's elements are those of even k of eight, then those of odd k. Codes past the end are
/// anything.
struct PackIntegers {
    CodeRows w;  ///< at most 16 rows; for those that are missing stands the last one
    std::uint8_t* out = nullptr;
};

/// Products of groups of 16 weight rows by some activations, IntegerPanels::heights of them. A unit is `run` steps, the
/// last one perhaps fewer, whose sum is exact in 32 bits. Of group g and its row r
///     out[a * out_stride + 16 g + r] = sum over units u of scale(u, g, r) * x_scales[u * height + a] *
///                                      (starts[u * height + a] + sum over the unit of integer(g, r, k) x(a, k))
///     scale(u, g, r) = scales[g * group_scales + u / units_per_scale * 16 + r]
/// and a group's codes are those of `steps` steps, one group after the other. Every kernel adds up its units in order,
/// each with one rounding, so that all of them return the same bits.
/// Where the kernel has PanelIntegers::starts_are_words, a start is two words that are added up: of the elements 0
/// and 1 of each step in the lower half, of 2 and 3 in the upper one.
struct IntegerPanel {
    const std::uint8_t* codes = nullptr;
    std::int64_t groups = 1, group_scales = 0;
    std::int64_t steps = 0, run = 0, units_per_scale = 1;  ///< steps and run are multiples of IntegerPanels::multiple
    /// [step / abreast][activation][step % abreast][element], of the type of the weight's, but signed
    const std::int8_t* x = nullptr;
    const float* scales = nullptr;
    const std::int32_t* starts = nullptr;
    const float* x_scales = nullptr;  ///< null: all one
    int height = 0;
    float* out = nullptr;
    std::int64_t out_stride = 0;
};

/// A value, or a code less its zero point, is integer - offset.
struct PanelIntegers {
    int offset = 0;
    bool starts_are_words = false;
    std::int64_t most_run = 0;  ///< steps to a unit, at most
};
/// The kernels of a format, whose codes are such values times `unit`.
struct IntegerPanelKernel {
    void (*pack)(const PackIntegers&) = nullptr;
    void (*multiply)(const IntegerPanel&) = nullptr;
    int elements = 4;  ///< of a row in a step: 4 bytes or 2 words
    float unit = 1;
    PanelIntegers plain, with_zero_points;  ///< these where value - zero point is -15 … 15
};
/// Activations that a kernel multiplies at a time, the most first; zeros are none.
using PanelHeights = std::array<std::uint8_t, 3>;

/// Products of many activations that are INT8 codes. The entry of a format whose codes are no small integers is null.
struct IntegerPanels {
    std::array<IntegerPanelKernel, Codecs::size> kernels{};
    PanelHeights heights{};
    std::int64_t groups = 1;        ///< that a kernel takes at a time
    std::int64_t multiple = 4;      ///< of steps
    std::int64_t abreast = 1;       ///< steps of an activation side by side
    std::int64_t bytes = 1 << 18;   ///< of weights to a panel: a part of the second-level cache
    bool (*supported)() = nullptr;  ///< whether the processor has the instructions; null: every one
};

}  // namespace breccia::inline v0_4
