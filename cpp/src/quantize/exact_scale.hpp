// SPDX-License-Identifier: Apache-2.0
//
// Scales under which the values of a tensor that is quantized already can be kept as they are.
//
// If a block's values are products of a scale and codes of a format, then they are so with the scale amax / p for some
// magnitude p of the format. The ratios of the values to amax rule out most p. Of the rest the one with the fewest
// significant bits is tried: it reaches the smallest values. Products that float32 rounded may have another scale
// that is not found.
#pragma once

#include <optional>

#include "contract/kernel_table.hpp"
#include "quantize/block_writer.hpp"

namespace breccia::inline v0_4 {

/// The scale that a type stores as exactly `scale`, if it can; `amax_bits` is of the block it is for.
std::optional<BlockScale> stored_exactly(float scale, ScaleType type, std::uint32_t amax_bits);

/// The smallest power of two by which a format reaches `amax`, if that is a normal number.
std::optional<float> power_of_two_for(float amax, Format format);

/// Whether a number has no more significant bits than a format's codes: else no power of two makes it one.
bool has_few_bits(float x, Format format);

/// Whether one of the values has few enough significant bits for a format, but is no multiple of its smallest code
/// under this power of two.
bool any_too_small(const float* x, std::int64_t n, float power, Format format);

/// Sets the zero point that lets codes reach the block's least and greatest value. Returns whether there is one.
bool set_zero_point(BlockScale& s, const BlockStats& stats, Format format);

/// Finds the scale amax / p of a block from its values, which come in any number of runs and passes.
class CommonScale {
public:
    /// `has_too_small`: of some values `any_too_small` under the scale of `power_of_two_for`.
    CommonScale(float amax, const Recipe& recipe, bool has_too_small);

    /// Takes a run of the block's values in another pass. Returns whether there may still be such a scale.
    bool see(const float* x, std::int64_t n);
    /// Ends a pass. Returns whether it takes another.
    bool end_pass();
    /// After the last pass: the scale nearest to amax / p that the recipe stores, if there is one. Where scales are
    /// float32, whose products are rounded, a neighbour of it may be the one.
    [[nodiscard]] std::optional<float> scale() const;

private:
    bool see_magnitudes(const float* x, std::int64_t n);
    bool see_fractions(const float* x, std::int64_t n);
    void leave_out_power();
    [[nodiscard]] bool is_no_fraction(float ratio) const;
    [[nodiscard]] std::int32_t next_denominator() const;
    [[nodiscard]] std::optional<float> float_scale() const;
    [[nodiscard]] std::optional<float> integer_scale() const;
    [[nodiscard]] std::optional<float> stored(float p) const;

    float amax_;
    const FormatInfo& format_;
    ScaleType type_;
    bool integers_, asymmetric_;
    std::uint32_t significands_ = 0;             // of the p that are left, a bit each: bit m of p = m * 2^e
    std::int32_t denominator_ = 1, limit_ = 0;   // of the values as fractions of amax
    std::int32_t fraction_bits_ = 0;             // of the largest distance to a multiple of 1 / denominator_
    bool has_plus_ = false, has_minus_ = false;  // amax and -amax
};

/// NVFP4's two levels under which a tensor that is stored already keeps every value. A block's scale must be one of a
/// few numbers: the source's own, or the block's amax over one of E2M1's magnitudes; all of them products of one global
/// scale and E4M3 numbers. Writes the tensor that is walked; blocks that keep the source's scales and codes are copied.
/// False, with nothing written, where no such scales are found: a block with an infinity has none.
bool write_exact_two_levels(const BlockWalk& walk, const Recipe& recipe, const BlockWriter& to);

}  // namespace breccia::inline v0_4
