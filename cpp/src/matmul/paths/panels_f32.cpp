// SPDX-License-Identifier: Apache-2.0
//
// Any operands: panels of the weight are dequantized to float32.
#include <optional>

#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

// The kernels that decode a weight's codes, where there are some and they can.
const CodeKernelsF32* decoders(const Product& product) {
    const CodeKernelsF32* kernels = product.table.matmul.codes_f32;
    const ScaledMatrix* codes = product.w.scaled_along_k();
    return kernels != nullptr && codes != nullptr && supports(*kernels, *codes) && zero_points_are_small(*codes)
               ? kernels
               : nullptr;
}

// The part of a weight panel's work that a thread keeps its buffers for.
class F32Panels {
public:
    F32Panels(const Product& product, const PanelGrid& grid, const float* x, std::int64_t at_once)
        : product_(product), grid_(grid), x_(x), kernels_(decoders(product)), panel_(at_once * panel_stride_f32) {
        if (kernels_ != nullptr) numbers_.emplace(*product.w.scaled_along_k(), at_once, GlobalScale::applied);
    }

    void run(std::int64_t j, std::int64_t rows, std::int64_t padded_rows, float* c) {
        if (numbers_) numbers_->read(product_.table, j, rows);
        // Rows that few activations meet are decoded just before.
        const bool few = kernels_ != nullptr && grid_.count() == 1;
        const std::int64_t step = few ? kernels_->tile_rows : padded_rows;
        for (std::int64_t k = 0; k < product_.k; k += panel_k)
            for (std::int64_t i = 0; i < rows; i += step) {
                const std::int64_t depth = std::min(panel_k, product_.k - k);
                decode(j, i, std::min(step, rows - i), k, depth);
                for (std::int64_t p = 0; p < grid_.count(); ++p)
                    product_.table.matmul.gemm({.w = panel_.data(),
                                                .x = x_ + k * grid_.padded + p * panel_width * depth,
                                                .c = c + p * panel_width * padded_rows + i * grid_.width(p),
                                                .rows = step,
                                                .width = grid_.width(p),
                                                .k = depth});
            }
    }

private:
    // Rows j + i ... of the panel, elements [k, k + depth).
    void decode(std::int64_t j, std::int64_t i, std::int64_t rows, std::int64_t k, std::int64_t depth) {
        if (kernels_ == nullptr || !numbers_.has_value())
            return product_.w.read(product_.table, j + i, rows, k, depth, scratch_, panel_.data(), panel_stride_f32);
        const ScaledMatrix& w = *product_.w.scaled_along_k();
        const std::int64_t block = k / w.grid.block_cols, of_row = i * numbers_->stride();
        kernels_->decode[static_cast<std::size_t>(w.element)](
            {.codes = w.data + (j + i) * w.row_stride + (w.packed ? k / 2 : k),
             .row_stride = w.row_stride,
             .rows = rows,
             .k = depth,
             .block = w.grid.block_cols,
             .skip = k % w.grid.block_cols,
             .scales = numbers_->scales(of_row + block),
             .scale_stride = numbers_->stride(),
             .zero_points = numbers_->zero_points(of_row + block),
             .out = panel_.data(),
             .out_stride = panel_stride_f32});
    }

    const Product& product_;
    const PanelGrid& grid_;
    const float* x_;
    const CodeKernelsF32* kernels_;
    WorkBuffer<float> panel_;
    std::optional<RowNumbers> numbers_;
    Scratch scratch_;
};

Refusal by_panels_f32(const Product& product, int /*most_terms*/) {
    constexpr std::int64_t rows_at_once = 512;
    const KernelTable& table = product.table;
    for (std::int64_t first = 0; first < product.total_rows(); first += rows_at_once) {
        const PanelGrid grid(std::min(rows_at_once, product.total_rows() - first));
        const WorkBuffer<float> x(grid.padded * product.k);
        parallel_for(product.call, grid.padded / 16, 1, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            std::vector<float> group(static_cast<std::size_t>(16 * panel_stride_f32));
            for (std::int64_t g = begin; g < end; ++g)
                for (std::int64_t k = 0; k < product.k; k += panel_k) {
                    const std::int64_t depth = std::min(panel_k, product.k - k);
                    product.read(first + g * 16, std::min<std::int64_t>(16, grid.rows - g * 16), k, depth, scratch,
                                 group.data(), panel_stride_f32);
                    table.matmul.pack({.x = group.data(),
                                       .x_stride = panel_stride_f32,
                                       .k = depth,
                                       .out = x.data() + k * grid.padded + packed_offset(g, depth),
                                       .width = grid.width(g / 2)});
                }
        });
        const std::int64_t at_once = panel_rows(product.n, grid, 2 * row_multiple);
        for_weight_panels(table, product, first, grid, at_once,
                          [&] { return F32Panels(product, grid, x.data(), at_once); });
    }
    return Refusal::none;
}

}  // namespace

constinit const Path paths::panels_f32{
    .name = "panels_f32", .suits = suits_anything, .multiply = by_panels_f32, .refusals = {}};

}  // namespace breccia::inline v0_4
