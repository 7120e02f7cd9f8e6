// SPDX-License-Identifier: Apache-2.0
#include "breccia/layout.hpp"

#include <algorithm>

#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

void check_axis(int axis) {
    if (axis != -1 && axis != -2) throw_value("axis must be -1 or -2, got ", axis);
}

// The logical shape with the last two axes in storage order: (..., rows, columns).
Shape storage_shape(const Shape& logical, int axis) {
    Shape shape = logical;
    if (axis == -2 && shape.size() >= 2) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
    return shape;
}

// The axes a scale array of that kind needs to be laid out along.
void check_rank(const Layout& layout, const Shape& logical_shape) {
    const std::size_t least = layout.kind == LayoutKind::per_block_k && layout.axis == -1 ? 1 : 2;
    if (logical_shape.size() < least)
        throw_value(name_of(layout.kind), ": data must be at least ", least, "-D, got ", logical_shape.size(), "-D");
}

}  // namespace

void validate(const Layout& layout) {
    if (layout.kind > LayoutKind::per_block_mn)
        throw_value("layout.kind must be one of LayoutKind's, got ", static_cast<int>(layout.kind));
    check_axis(layout.axis);
    const auto check_block = [](const char* name, std::int64_t size) {
        if (size < 1) throw_value("layout.", name, " must be > 0, got ", size);
    };
    const bool tiles = layout.kind == LayoutKind::per_block_mn;
    if (tiles) check_block("block_m", layout.block_m);
    if (tiles || layout.kind == LayoutKind::per_block_k) check_block("block_n", layout.block_n);
}

Layout Layout::per_block_k(std::int64_t block_size, int axis) {
    if (block_size <= 0) throw_value("block_size must be > 0, got ", block_size);
    const Layout layout{LayoutKind::per_block_k, 1, block_size, axis};
    breccia::validate(layout);
    return layout;
}

Layout Layout::per_channel(int axis) {
    check_axis(axis);
    return {LayoutKind::per_channel, 1, 0, axis};
}

Layout Layout::per_block_mn(std::int64_t block_m, std::int64_t block_n, int axis) {
    if (block_m <= 0 || block_n <= 0)
        throw_value("block_m and block_n must be > 0, got (", block_m, ", ", block_n, ")");
    const Layout layout{LayoutKind::per_block_mn, block_m, block_n, axis};
    breccia::validate(layout);
    return layout;
}

Layout Layout::transposed() const {
    Layout result = *this;
    result.axis = axis == -1 ? -2 : -1;
    if (kind == LayoutKind::per_block_mn) std::swap(result.block_m, result.block_n);
    return result;
}

BlockGrid Layout::grid(const Shape& logical_shape) const {
    breccia::validate(*this);
    BlockGrid grid;
    grid.cols = logical_shape.empty() ? 1 : logical_shape.back();
    grid.rows = logical_shape.size() < 2 ? 1 : logical_shape[logical_shape.size() - 2];
    if (axis == -2 && logical_shape.size() >= 2) std::swap(grid.rows, grid.cols);
    switch (kind) {
        case LayoutKind::per_tensor:
            grid.block_rows = std::max<std::int64_t>(grid.rows, 1);
            grid.block_cols = std::max<std::int64_t>(grid.cols, 1);
            break;
        case LayoutKind::per_block_k: grid.block_cols = block_n; break;
        case LayoutKind::per_channel:
            grid.block_cols = std::max<std::int64_t>(grid.cols, 1);
            grid.empty_grid_cols = 1;
            break;
        case LayoutKind::per_block_mn:
            grid.block_rows = axis == -1 ? block_m : block_n;
            grid.block_cols = axis == -1 ? block_n : block_m;
            break;
    }
    return grid;
}

Shape Layout::scale_shape(const Shape& logical_shape) const {
    breccia::validate(*this);
    element_count(logical_shape);
    if (kind == LayoutKind::per_tensor) return {};
    check_rank(*this, logical_shape);
    const BlockGrid blocks = grid(logical_shape);
    Shape shape = storage_shape(logical_shape, axis);
    shape.back() = blocks.grid_cols();
    if (shape.size() >= 2) shape[shape.size() - 2] = blocks.grid_rows();
    return storage_shape(shape, axis);
}

bool Layout::divides(const Shape& logical_shape) const {
    const BlockGrid blocks = grid(logical_shape);
    return kind != LayoutKind::per_block_k || blocks.cols % blocks.block_cols == 0;
}

bool Layout::fits(const Shape& logical_shape, const Shape& scale_shape) const {
    breccia::validate(*this);
    if (kind == LayoutKind::per_tensor) return scale_shape.empty();
    if (logical_shape.size() < 2) return false;
    if (!divides(logical_shape)) return false;
    Shape expected = this->scale_shape(logical_shape);
    if (scale_shape == expected) return true;
    if (kind != LayoutKind::per_channel) return false;
    expected.erase(expected.end() + axis);  // one scale per row may drop the axis it is constant along
    return scale_shape == expected;
}

void Layout::validate(const Shape& logical_shape, const Shape& scale_shape) const {
    if (fits(logical_shape, scale_shape)) return;
    const std::string_view who = name_of(kind);
    if (kind == LayoutKind::per_tensor)
        throw_value("PerTensor requires a scalar scale (ndim=0), got ndim=", scale_shape.size(),
                    " with shape=", scale_shape, element_count(scale_shape) == 1 ? ": pass scale.reshape(())" : "");
    if (logical_shape.size() < 2)
        throw_value(who, ": data must be at least 2-D (M, K), got ndim=", logical_shape.size(),
                    " with shape=", logical_shape);
    if (!divides(logical_shape)) {
        const BlockGrid blocks = grid(logical_shape);
        throw_value(who, ": data.shape[", axis, "]=", blocks.cols,
                    " must be divisible by block_size=", blocks.block_cols);
    }
    const Shape expected = this->scale_shape(logical_shape);
    if (kind == LayoutKind::per_channel) {
        Shape dropped = expected;
        dropped.erase(dropped.end() + axis);
        throw_value("PerChannel: scale.shape must be one of [", dropped, ", ", expected, "], got ", scale_shape);
    }
    const std::string blocks = kind == LayoutKind::per_block_mn
                                   ? "block_m=" + std::to_string(block_m) + ", block_n=" + std::to_string(block_n)
                                   : "block_size=" + std::to_string(block_n);
    throw_value(who, ": scale.shape must be ", expected, ", got ", scale_shape, ", for data of shape ", logical_shape,
                " and ", blocks);
}

}  // namespace breccia::inline v0_4
