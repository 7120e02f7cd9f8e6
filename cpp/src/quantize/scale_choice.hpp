// SPDX-License-Identifier: Apache-2.0
//
// The scale of a block that no single kernel call quantizes: by the recipe's rule, the best of a search, or one under
// which nothing is lost.
#pragma once

#include <algorithm>

#include "quantize/exact_scale.hpp"
#include "quantize/quantizer.hpp"

namespace breccia {

inline void merge(BlockStats& total, const BlockStats& part) {
    total.amax_bits = std::max(total.amax_bits, part.amax_bits);
    total.has_nan |= part.has_nan;
    total.has_infinity |= part.has_infinity;
    total.min = std::min(total.min, part.min);
    total.max = std::max(total.max, part.max);
}

class ScaleChoice {
public:
    /// Of two-level recipes `params` may get the global scale later, before a scale is chosen.
    ScaleChoice(const RowSource& source, const KernelTable& kernels, const Recipe& recipe, const ScaleParams& params)
        : source_(source), kernels_(kernels), format_(kernels[recipe.element]), recipe_(recipe), params_(params) {}

    /// Whether a finite block's largest magnitude is all that its scale depends on, exact scales apart.
    [[nodiscard]] bool amax_decides() const { return params_.search == ScaleSearch::amax && !needs_range(); }

    BlockStats stats_of(const BlockRange& b, Scratch& scratch) const {
        BlockStats stats;
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t, std::int64_t n) {
            merge(stats, kernels_.quantize.stats(x, n, needs_range()));
        });
        return stats;
    }

    /// Of quantizing a block so.
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
        BlockScale best = format_.choose_scale(stats, params_, 0);
        const bool ordinary = !stats.has_nan && !stats.has_infinity && stats.amax_bits != 0;
        if (params_.search != ScaleSearch::mse || !ordinary) return best;
        auto best_error = error(best);
        for (int candidate = 1; candidate < format_.candidates(params_); ++candidate) {
            const BlockScale other = format_.choose_scale(stats, params_, candidate);
            const auto other_error = error(other);
            if (other_error < best_error) {
                best_error = other_error;
                best = other;
            }
        }
        return best;
    }

    BlockScale choose(const BlockRange& b, Scratch& scratch) const {
        const BlockStats stats = stats_of(b, scratch);
        if (!stats.has_nan && !stats.has_infinity)
            if (const auto kept = kept_scale(b, stats.amax_bits, scratch)) return *kept;
        return best(stats, [&](const BlockScale& s) { return squared_error(b, s, scratch); });
    }

    /// The same for a finite block where amax_decides().
    BlockScale choose(const BlockRange& b, std::uint32_t amax_bits, Scratch& scratch) const {
        return kept_scale(b, amax_bits, scratch).value_or(format_.choose_scale({.amax_bits = amax_bits}, params_, 0));
    }

    /// A scale under which `keeps` finds no loss. The first of the values may rule a power of two out; amax_bits() is
    /// none where they are not all finite.
    template <class AmaxBits, class Keeps>
    std::optional<BlockScale> exact_scale(const BlockRange& b, float first, AmaxBits amax_bits, Keeps keeps) const {
        const ExactScales scales = source_.exact_scales(b);
        const bool own = scales.own && stored_exactly(*scales.own, recipe_.scale, 0);
        const bool power_of_two = scales.power_of_two && has_few_bits(first, recipe_.element);
        if (!own && !power_of_two) return std::nullopt;
        const std::optional<std::uint32_t> bits = amax_bits();
        if (!bits) return std::nullopt;
        const auto kept = [&](float scale) {
            const std::optional<BlockScale> s = stored_exactly(scale, recipe_.scale, *bits);
            return s && keeps(*s) ? s : std::nullopt;
        };
        if (own)
            if (const auto s = kept(*scales.own)) return s;
        if (!power_of_two) return std::nullopt;
        const std::optional<float> power = power_of_two_for(float_from_bits(*bits), recipe_.element);
        return power ? kept(*power) : std::nullopt;
    }

private:
    [[nodiscard]] bool needs_range() const { return params_.rule == ScaleRule::asymmetric; }

    std::optional<BlockScale> kept_scale(const BlockRange& b, std::uint32_t amax_bits, Scratch& scratch) const {
        if (!source_.may_be_exact()) return std::nullopt;
        const auto keeps = [&](const BlockScale& s) {
            for (std::int64_t row = b.begin_row; row < b.end_row; ++row)
                for (std::int64_t col = b.begin_col; col < b.end_col; col += piece_cols) {
                    const std::int64_t n = std::min(piece_cols, b.end_col - col);
                    if (!format_.keeps(source_.read(b.matrix, row, col, n, scratch), n, s)) return false;
                }
            return true;
        };
        return exact_scale(b, 0.0F, [&] { return std::optional(amax_bits); }, keeps);
    }

    const RowSource& source_;
    const KernelTable& kernels_;
    const FormatKernels& format_;
    const Recipe& recipe_;
    const ScaleParams& params_;
};

}  // namespace breccia
