// SPDX-License-Identifier: Apache-2.0
#include "quantize/stored_blocks.hpp"

#include <utility>

namespace breccia::inline v0_4 {

StoredBlocks::StoredBlocks(const Call& call, const ScaledTensor& scaled, const Recipe& recipe)
    : RowSource(call, this),
      axis_(scaled.layout().axis),
      one_scale_(scaled.scale().size() == 1 && (!scaled.global_scale() || scaled.global_scale()->size() == 1)) {
    const Shape batch = batch_shape(scaled.shape());
    if (element_count(scaled.shape()) == 0) return;  // of any number of matrices, none of which will be read
    for (std::int64_t i = 0; i < element_count(batch); ++i) matrices_.push_back(scaled_matrix(scaled, batch, i));
    const auto& global = scaled.global_scale();
    const bool same_form = recipe.two_level && scaled.recipe().global_divides == recipe.global_divides;
    if (global && global->size() == 1 && same_form) global_ = matrices_.front().global_scale;
}

const float* StoredBlocks::read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                                Scratch& scratch) const {
    scratch.values.resize(static_cast<std::size_t>(n));
    float* out = scratch.values.data();
    if (n == 0) return out;  // of an empty tensor, which has no matrix here
    const ScaledMatrix& stored = matrices_[static_cast<std::size_t>(matrix)];
    if (axis_ == -1)
        stored.read(kernels(), row, begin, n, scratch, out);
    else
        for (std::int64_t i = 0; i < n; ++i) stored.read(kernels(), begin + i, row, 1, scratch, out + i);
    return out;
}

std::optional<float> StoredBlocks::scale(const BlockRange& block) const {
    if (block.begin_row == block.end_row || block.begin_col == block.end_col) return {};  // no scale to keep
    if (block.matrices == 0 || (block.matrices > 1 && !one_scale_)) return {};
    const ScaledMatrix& stored = matrices_[static_cast<std::size_t>(block.matrix)];
    BlockRange b = block;
    if (axis_ == -2) {
        std::swap(b.begin_row, b.begin_col);
        std::swap(b.end_row, b.end_col);
    }
    const BlockGrid& grid = stored.grid;
    const std::int64_t row = grid.block_rows == 1 ? b.begin_row : b.begin_row / grid.block_rows;
    const std::int64_t col = b.begin_col / grid.block_cols;
    const bool inside =
        b.end_row - row * grid.block_rows <= grid.block_rows && b.end_col - col * grid.block_cols <= grid.block_cols;
    return inside ? std::optional(stored.scale_at(row, col)) : std::nullopt;
}

void StoredBlocks::scales(const BlockRange& first, std::int64_t count, float* out) const {
    const std::int64_t columns = first.end_col - first.begin_col;
    const ScaledMatrix& stored = matrices_[static_cast<std::size_t>(first.matrix)];
    const bool whole = axis_ == -1 && stored.grid.block_cols % columns == 0 && stored.grid.block_rows == 1;
    std::int64_t known = -1;
    BlockRange b = first;
    for (std::int64_t i = 0; i < count; ++i, b.begin_col += columns, b.end_col += columns) {
        const std::int64_t block = whole ? b.begin_col / stored.grid.block_cols : -1;
        if (!whole)
            out[i] = scale(b).value_or(0.0F);
        else
            out[i] = block == known ? out[i - 1] : stored.scale_at(first.begin_row, block);
        known = block;
    }
}

const std::uint8_t* StoredBlocks::codes(Format format, std::int64_t matrix, std::int64_t row) const {
    const ScaledMatrix& stored = matrices_[static_cast<std::size_t>(matrix)];
    const bool alike = axis_ == -1 && stored.element == format && stored.packed && stored.col_stride == 1;
    return alike && stored.zero_point.data == nullptr ? stored.data + row * stored.row_stride : nullptr;
}

}  // namespace breccia::inline v0_4
