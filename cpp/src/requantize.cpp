// SPDX-License-Identifier: Apache-2.0
#include "breccia/error.hpp"
#include "breccia/ops.hpp"
#include "quantize.hpp"

namespace breccia {
namespace {

class ScaledSource final : public RowSource {
public:
    ScaledSource(const ScaledTensor& scaled, const Recipe& recipe)
        : scaled_(scaled), recipe_(recipe), batch_(batch_shape(scaled.shape())), kernels_(kernels()) {
        const FormatInfo &from = info(scaled.recipe().element), &to = info(recipe.element);
        const bool integers = from.family == CodecFamily::integer && to.family == CodecFamily::integer;
        const bool floats = from.family == CodecFamily::minifloat && to.family == CodecFamily::minifloat;
        // A target grid with fewer mantissa bits, or coarser integers, holds a block only by luck.
        may_be_exact_ = recipe.rule != ScaleRule::asymmetric && recipe.scale != ScaleType::e4m3 &&
                        ((integers && to.bits >= from.bits) || (floats && to.mantissa_bits >= from.mantissa_bits));
    }

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override {
        scratch.values.resize(static_cast<std::size_t>(n));
        if (scaled_.layout().axis == -1) {
            scaled_matrix(scaled_, batch_, matrix).read(kernels_, row, begin, n, scratch, scratch.values.data());
        } else {
            const ScaledMatrix stored = scaled_matrix(scaled_, batch_, matrix);
            for (std::int64_t i = 0; i < n; ++i) stored.read(kernels_, begin + i, row, 1, scratch, &scratch.values[i]);
        }
        return scratch.values.data();
    }

    [[nodiscard]] bool may_be_exact() const override { return may_be_exact_; }

    void exact_scales(const BlockRange& block, float amax, std::vector<float>& scales) const override {
        if (block.begin_row == block.end_row || block.begin_col == block.end_col) return;  // no scale to keep
        const ScaledMatrix stored = scaled_matrix(scaled_, batch_, block.matrix);
        BlockRange b = block;
        if (scaled_.layout().axis == -2) {
            std::swap(b.begin_row, b.begin_col);
            std::swap(b.end_row, b.end_col);
        }
        const BlockGrid& grid = stored.grid;
        const std::int64_t row = b.begin_row / grid.block_rows, col = b.begin_col / grid.block_cols;
        if ((b.end_row - 1) / grid.block_rows == row && (b.end_col - 1) / grid.block_cols == col)
            scales.push_back(stored.scale_at(row, col));
        // A power of two moves every value's exponent and nothing else.
        if (amax != 0 && info(recipe_.element).family == CodecFamily::minifloat) {
            const std::uint32_t quotient = bits_of(amax / info(recipe_.element).max);
            const std::uint32_t rounded_up = (quotient + 0x007F'FFFFU) & 0x7F80'0000U;
            if (rounded_up != 0 && rounded_up < f32_infinity_bits) scales.push_back(float_from_bits(rounded_up));
        }
    }

private:
    const ScaledTensor& scaled_;
    const Recipe& recipe_;
    Shape batch_;
    const KernelTable& kernels_;
    bool may_be_exact_ = false;
};

}  // namespace

void requantize_into(const ScaledTensor& scaled, const Recipe& recipe, const CastOutput& out) {
    quantize(ScaledSource(scaled, recipe), scaled.shape(), recipe, out);
}

ScaledTensor requantize(const ScaledTensor& scaled, const Recipe& recipe) {
    if (recipe == scaled.recipe() && recipe.layout == scaled.layout()) return scaled;
    CastOutput out = allocate(plan_cast(scaled.shape(), recipe));
    requantize_into(scaled, recipe, out);
    return assemble(std::move(out), recipe, scaled.shape(), scaled.original_dtype());
}

}  // namespace breccia
