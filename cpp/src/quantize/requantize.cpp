// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "breccia/error.hpp"
#include "breccia/ops.hpp"
#include "quantize/quantizer.hpp"
#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {
namespace {

class ScaledSource final : public RowSource {
public:
    ScaledSource(const ScaledTensor& scaled, const Recipe& recipe)
        : RowSource(breccia::kernels()),
          axis_(scaled.layout().axis),
          one_scale_(scaled.scale().size() == 1 && (!scaled.global_scale() || scaled.global_scale()->size() == 1)) {
        const Shape batch = batch_shape(scaled.shape());
        if (element_count(scaled.shape()) == 0) return;  // of any number of matrices, none of which will be read
        for (std::int64_t i = 0; i < element_count(batch); ++i) stored_.push_back(scaled_matrix(scaled, batch, i));
        const auto& global = scaled.global_scale();
        const bool same_form = recipe.two_level && scaled.recipe().global_divides == recipe.global_divides;
        if (global && global->size() == 1 && same_form) global_ = stored_.front().global_scale;
    }

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override {
        scratch.values.resize(static_cast<std::size_t>(n));
        if (n == 0) return scratch.values.data();  // of an empty tensor, which has no matrix here
        const ScaledMatrix& stored = stored_[static_cast<std::size_t>(matrix)];
        if (axis_ == -1)
            stored.read(kernels(), row, begin, n, scratch, scratch.values.data());
        else
            for (std::int64_t i = 0; i < n; ++i) stored.read(kernels(), begin + i, row, 1, scratch, &scratch.values[i]);
        return scratch.values.data();
    }

    [[nodiscard]] bool may_be_exact() const override { return true; }

    [[nodiscard]] std::optional<float> own_scale(const BlockRange& block) const override {
        if (block.begin_row == block.end_row || block.begin_col == block.end_col) return {};  // no scale to keep
        if (block.matrices == 0 || (block.matrices > 1 && !one_scale_)) return {};
        const ScaledMatrix& stored = stored_[static_cast<std::size_t>(block.matrix)];
        BlockRange b = block;
        if (axis_ == -2) {
            std::swap(b.begin_row, b.begin_col);
            std::swap(b.end_row, b.end_col);
        }
        const BlockGrid& grid = stored.grid;
        const std::int64_t row = grid.block_rows == 1 ? b.begin_row : b.begin_row / grid.block_rows;
        const std::int64_t col = b.begin_col / grid.block_cols;
        const bool inside = b.end_row - row * grid.block_rows <= grid.block_rows &&
                            b.end_col - col * grid.block_cols <= grid.block_cols;
        return inside ? std::optional(stored.scale_at(row, col)) : std::nullopt;
    }

    void own_scales(const BlockRange& first, std::int64_t count, float* scales) const override {
        const std::int64_t columns = first.end_col - first.begin_col;
        const ScaledMatrix& stored = stored_[static_cast<std::size_t>(first.matrix)];
        const bool whole = axis_ == -1 && stored.grid.block_cols % columns == 0 && stored.grid.block_rows == 1;
        if (!whole) return RowSource::own_scales(first, count, scales);
        std::int64_t known = -1;
        float scale = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t block = (first.begin_col + i * columns) / stored.grid.block_cols;
            if (block != known) scale = stored.scale_at(first.begin_row, block);
            known = block;
            scales[i] = scale;
        }
    }

    [[nodiscard]] const std::uint8_t* own_codes(Format format, std::int64_t matrix, std::int64_t row) const override {
        const ScaledMatrix& stored = stored_[static_cast<std::size_t>(matrix)];
        const bool alike = axis_ == -1 && stored.element == format && stored.packed && stored.col_stride == 1;
        return alike && stored.zero_point == nullptr ? stored.data + row * stored.row_stride : nullptr;
    }

    [[nodiscard]] std::optional<float> own_global_scale() const override { return global_; }

private:
    std::vector<ScaledMatrix> stored_;
    int axis_;
    bool one_scale_;
    std::optional<float> global_;
};

// Elements [at, …) of axis `axis` and those after it, in order, to bytes that follow one another.
std::byte* copy_elements(const Array& from, std::size_t axis, const std::byte* at, std::byte* to) {
    const std::size_t size = from.type.size();
    if (axis == from.rank()) return std::copy_n(at, size, to);
    if (axis + 1 == from.rank() && from.strides[axis] == static_cast<std::int64_t>(size))
        return std::copy_n(at, static_cast<std::size_t>(from.shape[axis]) * size, to);
    for (std::int64_t i = 0; i < from.shape[axis]; ++i)
        to = copy_elements(from, axis + 1, at + i * from.strides[axis], to);
    return to;
}

bool changes_nothing(const ScaledTensor& scaled, const Recipe& recipe) {
    return recipe == scaled.recipe() && recipe.name == scaled.recipe().name && recipe.layout == scaled.layout();
}

// Whether the parts are what the plan asks for: then they are copied.
bool copied(const ScaledTensor& scaled, const CastOutput& out) {
    std::vector<std::pair<const Array*, const Array*>> parts{{&scaled.data(), &out.data},
                                                             {&scaled.scale(), &out.scale}};
    if (out.zero_point && scaled.zero_point()) parts.emplace_back(&*scaled.zero_point(), &*out.zero_point);
    if (out.global_scale && scaled.global_scale()) parts.emplace_back(&*scaled.global_scale(), &*out.global_scale);
    const auto alike = [](const auto& part) {
        return part.first->type == part.second->type && part.first->shape == part.second->shape;
    };
    if (!std::all_of(parts.begin(), parts.end(), alike)) return false;
    for (const auto& [from, to] : parts)
        if (from->size() > 0) copy_elements(*from, 0, static_cast<const std::byte*>(from->data), to->as<std::byte>());
    return true;
}

}  // namespace

void requantize_into(const ScaledTensor& scaled, const Recipe& recipe, const CastOutput& out) {
    check_memory(scaled, "scaled");
    check_output(out, plan_cast(scaled.shape(), recipe), recipe);
    check_no_overlap(out, scaled);
    if (changes_nothing(scaled, recipe) && copied(scaled, out)) return;
    quantize(ScaledSource(scaled, recipe), scaled.shape(), recipe, out);
}

ScaledTensor requantize(const ScaledTensor& scaled, const Recipe& recipe) {
    if (changes_nothing(scaled, recipe)) return scaled;
    CastOutput out = allocate(plan_cast(scaled.shape(), recipe));
    requantize_into(scaled, recipe, out);
    return assemble(std::move(out), recipe, scaled.shape(), scaled.original_dtype());
}

}  // namespace breccia::inline v0_4
