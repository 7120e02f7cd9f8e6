// SPDX-License-Identifier: Apache-2.0
//
// A layout is plain data: how a scale array maps onto a data array. Every layout is a grid of blocks over the last two
// axes; the kinds differ in the block's shape and in the shapes a scale array may have.
#pragma once

#include <optional>

#include "breccia/array.hpp"

namespace breccia::inline v0_4 {

/// What shares a scale: all elements; runs of block_n along the last axis; a row; tiles of block_m by block_n.
enum class LayoutKind : std::uint8_t { per_tensor, per_block_k, per_channel, per_block_mn };

/// "PerTensor", "PerBlockK", "PerChannel" or "PerBlockMN".
constexpr std::string_view name_of(LayoutKind kind) {
    constexpr std::string_view names[] = {"PerTensor", "PerBlockK", "PerChannel", "PerBlockMN"};
    return names[static_cast<int>(kind)];
}

/// Block grid of one (rows, columns) matrix in storage order: columns are the axis along which codes are packed.
struct BlockGrid {
    std::int64_t rows = 0;             ///< of the matrix
    std::int64_t cols = 0;             ///< of the matrix
    std::int64_t block_rows = 1;       ///< of a block; at least 1 even where the matrix is empty
    std::int64_t block_cols = 1;       ///< likewise
    std::int64_t empty_grid_cols = 0;  ///< blocks of a row without elements: 1 where a row has one scale
    /// Blocks from top to bottom, a short last one included.
    [[nodiscard]] std::int64_t grid_rows() const { return rows / block_rows + (rows % block_rows != 0 ? 1 : 0); }
    /// Blocks of a row.
    [[nodiscard]] std::int64_t grid_cols() const {
        return cols == 0 ? empty_grid_cols : cols / block_cols + (cols % block_cols != 0 ? 1 : 0);
    }
};

/// Which elements share a scale, and the arithmetic of sizes that follows.
struct BRECCIA_API Layout {
    LayoutKind kind = LayoutKind::per_tensor;  ///< which of the fields below count
    std::int64_t block_m = 1;                  ///< along axis -2 (PerBlockMN)
    std::int64_t block_n = 1;                  ///< along axis -1 (PerBlockMN); the block size of PerBlockK
    int axis = -1;  ///< the axis blocks and packed codes run along: -1, or -2 in a transposed view

    /// A layout of that kind. Throws Error unless blocks are positive and `axis` is -1 or -2.
    /// @{
    static Layout per_tensor() { return {}; }
    static Layout per_block_k(std::int64_t block_size, int axis = -1);
    static Layout per_channel(int axis = -1);
    static Layout per_block_mn(std::int64_t block_m, std::int64_t block_n, int axis = -1);
    /// @}

    /// Of the tensor whose last two axes are swapped.
    [[nodiscard]] Layout transposed() const;
    /// Blocks of a logical shape, in storage order (axes swapped back when axis is -2).
    [[nodiscard]] BlockGrid grid(const Shape& logical_shape) const;
    /// The scale shape `cast` produces for a logical shape.
    [[nodiscard]] Shape scale_shape(const Shape& logical_shape) const;
    /// Whether the blocks of PerBlockK divide a logical shape's rows, as they must: a short one has no agreed meaning.
    /// True of PerBlockMN, whose blocks may be short at the edges. Throws Error only for what is no layout.
    [[nodiscard]] bool divides(const Shape& logical_shape) const;
    /// Whether a scale of `scale_shape` fits data of `logical_shape`. Throws Error only for what is no layout or shape.
    [[nodiscard]] bool fits(const Shape& logical_shape, const Shape& scale_shape) const;
    /// Throws Error, saying which shape the scale must have, unless it fits.
    void validate(const Shape& logical_shape, const Shape& scale_shape) const;

    /// Of one kind, with the same fields.
    friend bool operator==(const Layout&, const Layout&) = default;
};

/// Throws Error unless the functions above could have made it: a kind there is, an axis of -1 or -2, and block sizes
/// of at least 1 where the kind has them.
BRECCIA_API void validate(const Layout& layout);

}  // namespace breccia::inline v0_4
