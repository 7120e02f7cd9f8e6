// SPDX-License-Identifier: Apache-2.0
//
// Scales of least weighted squared error: an error of a column of importance h counts h times.
#pragma once

#include <span>
#include <vector>

#include "breccia/ops.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {

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

/// Weights of the columns of a tensor, all finite and above zero, for every matrix of the batch or for each.
class ColumnWeights {
public:
    /// What is zero or not finite in `importance`, whose shape is (K,) or that of the batch and K, takes the mean of
    /// its column over the batch, else the mean of all, else 1. Throws Error where the shape is another or a number is
    /// negative.
    ColumnWeights(const Array& importance, const Shape& shape);

    /// Of the columns from `col` on.
    [[nodiscard]] const float* of(std::int64_t matrix, std::int64_t col) const {
        return weights_.data() + (of_each_ ? matrix * columns_ : 0) + col;
    }

private:
    std::int64_t columns_;
    bool of_each_ = false;
    std::vector<float> weights_;
};

/// The search of one recipe. `params` may get the global scale later, before start().
class WeightedSearch {
public:
    WeightedSearch(const KernelTable& kernels, const Recipe& recipe, const ScaleParams& params);

    /// Once, when `params` is complete.
    void start();

    /// Whether a block's scale is a code, which search_codes() chooses for blocks of a row at once.
    [[nodiscard]] bool coded() const { return is_coded(params_.type); }
    void search_codes(const WeightedBlocks& blocks, std::uint8_t* codes) const {
        kernels_.importance.search_codes(blocks, grid_, scales_, params_, codes);
    }
    /// How a finite block is encoded under such a code.
    [[nodiscard]] BlockScale of_code(std::uint8_t code) const;

    /// The scale of a block, which lies in one piece: of zeros and of what is not finite by the rule.
    [[nodiscard]] BlockScale choose(std::span<const float> x, const float* weights, const BlockStats& stats) const;

    /// The best candidate of the unweighted search by error(scale), for blocks that do not lie in one piece.
    template <class Error>
    BlockScale best(const BlockStats& stats, Error error) const {
        return best_candidate(format_, params_, stats, error);
    }

    [[nodiscard]] float error(const float* x, const float* weights, std::int64_t n, const BlockScale& s) const {
        return kernels_.importance.error(x, weights, n, grid_, s);
    }

private:
    const KernelTable& kernels_;
    const FormatKernels& format_;
    Format element_;
    CodeGrid grid_;
    const ScaleParams& given_;
    ScaleParams params_;  // the same, searching
    CodedScales scales_{};
};

}  // namespace breccia::inline v0_4
