// SPDX-License-Identifier: Apache-2.0
//
// The scale of a block that no single kernel call quantizes: by the recipe's rule, the best of a search, or one under
// which nothing is lost.
#pragma once

#include <algorithm>
#include <array>

#include "quantize/exact_scale.hpp"
#include "quantize/stored_blocks.hpp"

namespace breccia::inline v0_4 {

inline void merge(BlockStats& total, const BlockStats& part) {
    total.amax_bits = std::max(total.amax_bits, part.amax_bits);
    total.has_nan |= part.has_nan;
    total.has_infinity |= part.has_infinity;
    total.min = std::min(total.min, part.min);
    total.max = std::max(total.max, part.max);
}

/// Statistics of the blocks of a run: by one call where all are finite and their largest magnitudes are all that is
/// asked for.
class PieceStats {
public:
    /// `range`: whether the least and the largest value are asked for, too.
    PieceStats(const QuantizeKernels& kernels, const float* x, std::int64_t blocks, std::int64_t size, bool range,
               bool amax_decides)
        : kernels_(kernels), x_(x), size_(size), range_(range) {
        finite_ = amax_decides && size % amax_lanes == 0 &&
                  static_cast<std::uint32_t>(kernels.block_amax(x, blocks, size, amax_.data())) < f32_infinity_bits;
    }

    [[nodiscard]] BlockStats of(std::int64_t block) const {
        if (!finite_) return kernels_.stats(x_ + block * size_, size_, range_);
        return {.amax_bits = static_cast<std::uint32_t>(amax_[static_cast<std::size_t>(block)])};
    }
    /// The bits of the amaxes of a block and those after it; null where a value is not finite, or scales need more.
    [[nodiscard]] const std::int32_t* amax_bits(std::int64_t block) const {
        return finite_ ? amax_.data() + block : nullptr;
    }

private:
    const QuantizeKernels& kernels_;
    const float* x_;
    std::int64_t size_;
    bool range_, finite_ = false;
    std::array<std::int32_t, piece_cols / amax_lanes> amax_;
};

/// The first candidate of a search of the smallest error(scale); of a block of zeros or of what is not finite, the
/// rule's scale.
template <class Error>
BlockScale best_candidate(const FormatKernels& format, const ScaleParams& params, const BlockStats& stats,
                          Error error) {
    BlockScale best = format.choose_scale(stats, params, 0);
    if (!stats.searchable()) return best;
    auto best_error = error(best);
    for (int candidate = 1; candidate < format.candidates(params); ++candidate) {
        const BlockScale other = format.choose_scale(stats, params, candidate);
        const auto other_error = error(other);
        if (other_error < best_error) best_error = other_error, best = other;
    }
    return best;
}

class ScaleChoice {
public:
    /// Of two-level recipes `params` may get the global scale later, before a scale is chosen.
    ScaleChoice(const RowSource& source, const Recipe& recipe, const ScaleParams& params)
        : source_(source),
          kernels_(source.kernels()),
          format_(kernels_[recipe.element]),
          recipe_(recipe),
          params_(params) {}

    /// Whether a finite block's largest magnitude is all that its scale depends on, exact scales apart.
    [[nodiscard]] bool amax_decides() const { return params_.search == ScaleSearch::amax && !needs_range(); }

    BlockStats stats_of(const BlockRange& b, Scratch& scratch) const {
        BlockStats stats;
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t, std::int64_t n) {
            merge(stats, kernels_.quantize.stats(x, n, needs_range()));
        });
        return stats;
    }

    /// The squared error of a block that is quantized under a scale.
    float squared_error(const BlockRange& b, const BlockScale& s, Scratch& scratch) const {
        float total = 0;
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t, std::int64_t n) {
            total += format_.squared_error(x, n, s);
        });
        return total;
    }

    /// The rule's scale or, where the recipe searches, the first candidate of the smallest error(scale).
    template <class Error>
    BlockScale best(const BlockStats& stats, Error error) const {
        if (params_.search != ScaleSearch::mse) return format_.choose_scale(stats, params_, 0);
        return best_candidate(format_, params_, stats, error);
    }

    BlockScale choose(const BlockRange& b, Scratch& scratch) const {
        const BlockStats stats = stats_of(b, scratch);
        if (const auto kept = exact_scale(b, stats, scratch)) return *kept;
        return best(stats, [&](const BlockScale& s) { return squared_error(b, s, scratch); });
    }

    /// The same for a finite block where amax_decides().
    BlockScale choose(const BlockRange& b, std::uint32_t amax_bits, Scratch& scratch) const {
        const BlockStats stats{.amax_bits = amax_bits};
        return exact_scale(b, stats, scratch).value_or(format_.choose_scale(stats, params_, 0));
    }

    /// A scale under which nothing is lost, if the source may have one.
    std::optional<BlockScale> exact_scale(const BlockRange& b, const BlockStats& stats, Scratch& scratch) const {
        // With two levels a block's scale alone says nothing: write_exact_two_levels looks at all of them.
        if (source_.stored() == nullptr || recipe_.two_level) return std::nullopt;
        return exact_scale(b, stats, [&](auto body) {
            return source_.all_pieces(
                b, scratch, [&](const float* x, std::int64_t, std::int64_t, std::int64_t n) { return body(x, n); });
        });
    }

    /// The same of a block that was read.
    [[nodiscard]] std::optional<BlockScale> kept(const BlockRange& b, const float* x, std::int64_t n) const {
        if (source_.stored() == nullptr) return std::nullopt;
        return exact_scale(b, kernels_.quantize.stats(x, n, needs_range()), [&](auto body) { return body(x, n); });
    }

    /// The same of values that all_runs(body) hands to body(values, count), which returns whether it wants more.
    template <class AllRuns>
    std::optional<BlockScale> exact_scale(const BlockRange& b, const BlockStats& stats, AllRuns all_runs) const {
        if (stats.has_nan || stats.has_infinity) return std::nullopt;
        const bool floats = info(recipe_.element).family == CodecFamily::minifloat;
        const float amax = float_from_bits(stats.amax_bits);
        const bool few_bits = floats && has_few_bits(amax, recipe_.element);
        if (recipe_.scale == ScaleType::e8m0 && floats && !few_bits)
            return std::nullopt;  // amax is no power times a code
        const auto kept_or = [&](float scale, auto lost) -> std::optional<BlockScale> {
            std::optional<BlockScale> s = stored_exactly(scale, recipe_.scale, stats.amax_bits);
            if (!s || (needs_range() && !set_zero_point(*s, stats, recipe_.element))) return std::nullopt;
            const bool all = all_runs([&](const float* x, std::int64_t n) {
                if (format_.keeps(x, n, *s)) return true;
                lost(x, n);
                return false;
            });
            return all ? s : std::nullopt;
        };
        const auto kept = [&](float scale) { return kept_or(scale, [](const float*, std::int64_t) {}); };
        if (const auto own = source_.stored()->scale(b))
            if (const auto s = kept(floats ? abs(*own) : *own)) return s;
        if (amax == 0) return std::nullopt;
        std::optional<float> power;
        if (few_bits) power = power_of_two_for(amax, recipe_.element);
        const bool only_powers = recipe_.scale == ScaleType::e8m0;
        bool has_too_small = false;  // a value that the power of two keeps no code for
        if (power)
            if (const auto s = kept_or(*power, [&](const float* x, std::int64_t n) {
                    has_too_small = !only_powers && any_too_small(x, n, *power, recipe_.element);
                }))
                return s;
        if (only_powers) return std::nullopt;
        CommonScale common(amax, recipe_, has_too_small);
        do {
            if (!all_runs([&](const float* x, std::int64_t n) { return common.see(x, n); })) return std::nullopt;
        } while (common.end_pass());
        const std::optional<float> scale = common.scale();
        if (!scale) return std::nullopt;
        if (const auto s = kept(*scale)) return s;
        if (recipe_.scale != ScaleType::float32) return std::nullopt;
        if (const auto s = kept(float_from_bits(bits_of(*scale) - 1))) return s;
        return kept(float_from_bits(bits_of(*scale) + 1));
    }

    [[nodiscard]] bool needs_range() const { return params_.needs_range(); }

private:
    const RowSource& source_;
    const KernelTable& kernels_;
    const FormatKernels& format_;
    const Recipe& recipe_;
    const ScaleParams& params_;
};

}  // namespace breccia::inline v0_4
