// SPDX-License-Identifier: Apache-2.0
//
// The scale of a block whose columns have weights, as ScaleChoice is of one whose have none.
#pragma once

#include <array>

#include "quantize/block_writer.hpp"
#include "quantize/importance.hpp"

namespace breccia::inline v0_4 {

class WeightedChoice {
public:
    /// `params` may get the global scale later, before start().
    WeightedChoice(const RowSource& source, const Array& importance, const Shape& shape, const Recipe& recipe,
                   const ScaleParams& params)
        : source_(source),
          range_(takes_range(recipe.rule)),
          weights_(importance, shape),
          search_(source.kernels(), recipe, params) {}

    /// See WeightedSearch.
    /// @{
    void start() { search_.start(); }
    [[nodiscard]] bool coded() const { return search_.coded(); }
    template <class Error>
    BlockScale best(const BlockStats& stats, Error error) const {
        return search_.best(stats, error);
    }
    /// @}

    float error(const BlockRange& b, const BlockScale& s, Scratch& scratch) const {
        float total = 0;
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t col, std::int64_t n) {
            total += search_.error(x, weights_.of(b.matrix, col), n, s);
        });
        return total;
    }

    /// The scale of a block of any shape, which is put in one piece.
    [[nodiscard]] BlockScale choose(const BlockRange& b, Scratch& scratch) const {
        std::vector<float>& x = scratch.gathered;
        std::vector<float>& weights = scratch.gathered_weights;
        x.clear(), weights.clear();
        source_.for_each_piece(b, scratch, [&](const float* values, std::int64_t, std::int64_t col, std::int64_t n) {
            x.insert(x.end(), values, values + n);
            const float* h = weights_.of(b.matrix, col);
            weights.insert(weights.end(), h, h + n);
        });
        return search_.choose(x, weights.data(), stats_of(x.data(), static_cast<std::int64_t>(x.size())));
    }

    /// Replaces scales and codes of blocks of `size` elements of a row by those that the search finds. Where scales are
    /// codes, those of the amax rule are in their places, where the search begins.
    void improve(const BlockRange& row, std::int64_t first, std::int64_t count, std::int64_t size, const float* x,
                 const BlockWriter& to) const {
        const std::int64_t index = to.block_at(row.matrix, row.begin_row, first);
        const float* weights = weights_.of(row.matrix, first * size);
        std::array<std::uint8_t, piece_cols> better;
        auto* scales = reinterpret_cast<std::uint8_t*>(to.scale(index));
        if (coded()) {
            std::copy_n(scales, count, better.begin());
            search_.search_codes({x, weights, count, size}, better.data());
        }
        for (std::int64_t j = 0; j < count; ++j) {
            const float* values = x + j * size;
            BlockScale s;
            if (coded()) {
                const std::uint8_t code = better[static_cast<std::size_t>(j)];
                if (code == scales[j]) continue;
                s = search_.of_code(code);
            } else {
                s = search_.choose({values, static_cast<std::size_t>(size)}, weights + j * size,
                                   stats_of(values, size));
            }
            to.write_scale(index + j, s);
            to.encode(values, size, s, row.matrix, row.begin_row, (first + j) * size);
        }
    }

private:
    [[nodiscard]] BlockStats stats_of(const float* x, std::int64_t n) const {
        return source_.kernels().quantize.stats(x, n, range_);
    }

    const RowSource& source_;
    bool range_;  // whether scales depend on more than the largest magnitude
    ColumnWeights weights_;
    WeightedSearch search_;
};

}  // namespace breccia::inline v0_4
