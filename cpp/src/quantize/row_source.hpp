// SPDX-License-Identifier: Apache-2.0
//
// Rows of float32 from any source, and the walk over them from threads.
#pragma once

#include <algorithm>

#include "runtime/threads.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

/// Rows [begin_row, end_row) by columns [begin_col, end_col) of one matrix, or of several.
struct BlockRange {
    std::int64_t matrix = 0, begin_row = 0, end_row = 0, begin_col = 0, end_col = 0, matrices = 1;
};

/// Long runs go through the kernels in pieces that stay in the first-level cache.
inline constexpr std::int64_t piece_cols = 4096;

/// An index as containers take it.
constexpr std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

class StoredBlocks;

class RowSource {
public:
    RowSource(const RowSource&) = delete;
    RowSource& operator=(const RowSource&) = delete;
    virtual ~RowSource() = default;
    /// The verb's.
    [[nodiscard]] const Call& call() const { return call_; }
    [[nodiscard]] const KernelTable& kernels() const { return call_.kernels; }
    /// Elements [begin, begin + n) of a row, valid until the next call with the same scratch.
    virtual const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                              Scratch& scratch) const = 0;
    /// Calls body(values, row, first column, count) for every piece of a block.
    template <class F>
    void for_each_piece(const BlockRange& b, Scratch& scratch, F body) const {
        all_pieces(b, scratch, [&](const float* x, std::int64_t row, std::int64_t col, std::int64_t n) {
            body(x, row, col, n);
            return true;
        });
    }
    /// The same until body returns false. Returns whether it never did.
    template <class F>
    bool all_pieces(const BlockRange& b, Scratch& scratch, F body) const {
        for (std::int64_t matrix = b.matrix; matrix < b.matrix + b.matrices; ++matrix)
            for (std::int64_t row = b.begin_row; row < b.end_row; ++row)
                for (std::int64_t col = b.begin_col; col < b.end_col; col += piece_cols) {
                    const std::int64_t n = std::min(piece_cols, b.end_col - col);
                    if (!body(read(matrix, row, col, n, scratch), row, col, n)) return false;
                }
        return true;
    }
    /// Where the values are quantized already: what they are stored as, so that scales which lose nothing are tried
    /// before the recipe's rule. Else null.
    [[nodiscard]] const StoredBlocks* stored() const { return stored_; }

protected:
    explicit RowSource(const Call& call, const StoredBlocks* stored = nullptr) : call_(call), stored_(stored) {}

private:
    const Call& call_;
    const StoredBlocks* stored_;
};

/// Elements worth giving to a thread of their own.
inline constexpr std::int64_t parallel_grain = 1 << 16;

/// The rows of a source's matrices, in blocks of a grid.
struct BlockWalk {
    const RowSource& source;
    BlockGrid grid;
    std::int64_t matrices;

    /// Calls body(row, scratch) for every row.
    template <class F>
    void for_each_row(F body) const {
        if (grid.cols == 0) return;  // of any number of rows
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / grid.cols);
        parallel_for(source.call(), matrices * grid.rows, grain, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            for (std::int64_t i = begin; i < end; ++i)
                body(BlockRange{i / grid.rows, i % grid.rows, i % grid.rows + 1, 0, grid.cols, 1}, scratch);
        });
    }
    /// Calls body(row, first block, blocks, scratch) for runs of blocks that go through the kernels together.
    template <class F>
    void for_each_run(F body) const {
        const std::int64_t blocks = grid.grid_cols(), step = std::max<std::int64_t>(1, piece_cols / grid.block_cols);
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            for (std::int64_t first = 0; first < blocks; first += step)
                body(row, first, std::min(step, blocks - first), scratch);
        });
    }
    /// The values of such a run.
    const float* read(const BlockRange& row, std::int64_t first, std::int64_t blocks, Scratch& scratch) const {
        return source.read(row.matrix, row.begin_row, first * grid.block_cols, blocks * grid.block_cols, scratch);
    }
};

}  // namespace breccia::inline v0_4
