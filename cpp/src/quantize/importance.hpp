// SPDX-License-Identifier: Apache-2.0
//
// Scales of least weighted squared error: an error of a column of importance h counts h times.
#pragma once

#include <span>
#include <vector>

#include "quantize/block_writer.hpp"
#include "quantize/scale_choice.hpp"

namespace breccia::inline v0_4 {

/// Weights of the columns of a tensor, all finite and above zero, for every matrix of the batch or for each.
class ColumnWeights {
public:
    /// What is zero or not finite in `importance`, whose shape is (K,) or that of the batch and K, takes the mean of
    /// its column over the batch, else the mean of all, else 1. Throws Error where the shape is another or a number is
    /// negative.
    ColumnWeights(const KernelTable& kernels, const Array& importance, const Shape& shape);

    /// Of the columns from `col` on.
    [[nodiscard]] const float* of(std::int64_t matrix, std::int64_t col) const {
        return weights_.data() + (of_each_ ? matrix * columns_ : 0) + col;
    }

private:
    std::int64_t columns_;
    bool of_each_ = false;
    std::vector<float> weights_;
};

/// A block that lies in one piece: finite values, not all zero, and weights above zero.
struct WeightedBlock {
    std::span<const float> x;
    const float* weights;
    BlockStats stats;
};

/// The scale, and the zero point, of least weighted squared error among all that a type has, for integers of 4 bits;
/// `own` is the scale of the amax rule, to which ties go.
BlockScale best_integer_scale(const ImportanceKernels& kernels, const WeightedBlock& block, const CodeGrid& grid,
                              const ScaleParams& params, const BlockScale& own);

/// The scale of a block whose columns have weights, as ScaleChoice is of one whose have none.
class WeightedChoice {
public:
    /// `params` may get the global scale later, before start().
    WeightedChoice(const RowSource& source, const Array& importance, const Shape& shape, const Recipe& recipe,
                   const ScaleParams& params);

    /// Once, when `params` is complete.
    void start();

    /// Whether a block's scale is a code: those of a row's blocks are chosen at once.
    [[nodiscard]] bool coded() const { return is_coded(params_.type); }

    /// The best candidate of the unweighted search by error(scale), for blocks that do not lie in one piece.
    template <class Error>
    BlockScale best(const BlockStats& stats, Error error) const {
        return best_candidate(format_, params_, stats, error);
    }

    float error(const BlockRange& b, const BlockScale& s, Scratch& scratch) const;

    /// The scale of a block of any shape, which is put in one piece.
    [[nodiscard]] BlockScale choose(const BlockRange& b, Scratch& scratch) const;

    /// Replaces scales and codes of blocks of `size` elements of a row by those that the search finds. Where scales are
    /// codes, those of the amax rule are in their places, where the search begins.
    void improve(const BlockRange& row, std::int64_t first, std::int64_t count, std::int64_t size, const float* x,
                 const BlockWriter& to) const;

private:
    /// The scale of a block that lies in one piece: of zeros and of what is not finite by the rule.
    [[nodiscard]] BlockScale choose(std::span<const float> x, const float* weights) const;
    void search_codes(const WeightedBlocks& blocks, std::uint8_t* codes) const {
        kernels_.importance.search_codes(blocks, grid_, scales_, params_, codes);
    }
    /// How a finite block is encoded under a scale that is a code.
    [[nodiscard]] BlockScale of_code(std::uint8_t code) const;

    const RowSource& source_;
    const KernelTable& kernels_;
    const FormatKernels& format_;
    Format element_;
    ColumnWeights weights_;
    CodeGrid grid_;
    const ScaleParams& given_;
    ScaleParams params_;  // the same, searching
    CodedScales scales_{};
};

}  // namespace breccia::inline v0_4
