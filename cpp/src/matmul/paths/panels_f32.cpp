// SPDX-License-Identifier: Apache-2.0
//
// Any operands: panels of the weight are dequantized to float32.
#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia {
namespace {

// The part of a weight panel's work that a thread keeps its buffers for.
struct F32Panels {
    const KernelTable& table;
    const Product& product;
    const Rows& w;
    const PanelGrid& grid;
    const float* x;
    WorkBuffer<float> panel;
    Scratch scratch = {};

    void run(std::int64_t j, std::int64_t rows, std::int64_t padded_rows, float* c) {
        for (std::int64_t k = 0; k < product.k; k += panel_k) {
            const std::int64_t depth = std::min(panel_k, product.k - k);
            w.read(table, j, rows, k, depth, scratch, panel.data(), panel_stride_f32);
            for (std::int64_t p = 0; p < grid.count(); ++p)
                table.matmul.gemm({.w = panel.data(),
                                   .x = x + k * grid.padded + p * panel_width * depth,
                                   .c = c + p * panel_width * padded_rows,
                                   .rows = padded_rows,
                                   .width = grid.width(p),
                                   .k = depth});
        }
    }
};

}  // namespace

void paths::panels_f32(const Product& product, const Rows& w) {
    constexpr std::int64_t rows_at_once = 512;
    const KernelTable& table = product.table;
    for (std::int64_t first = 0; first < product.total_rows(); first += rows_at_once) {
        const PanelGrid grid(std::min(rows_at_once, product.total_rows() - first));
        const WorkBuffer<float> x(grid.padded * product.k);
        parallel_for(grid.padded / 16, 1, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            std::vector<float> group(static_cast<std::size_t>(16 * panel_stride_f32));
            for (std::int64_t g = begin; g < end; ++g)
                for (std::int64_t k = 0; k < product.k; k += panel_k) {
                    const std::int64_t depth = std::min(panel_k, product.k - k);
                    product.read(table, first + g * 16, std::min<std::int64_t>(16, grid.rows - g * 16), k, depth,
                                 scratch, group.data(), panel_stride_f32);
                    table.matmul.pack({.x = group.data(),
                                       .x_stride = panel_stride_f32,
                                       .k = depth,
                                       .out = x.data() + k * grid.padded + packed_offset(g, depth),
                                       .width = grid.width(g / 2)});
                }
        });
        const std::int64_t at_once = panel_rows(product.n, grid, 2 * row_multiple);
        for_weight_panels(table, product, first, grid, at_once, [&] {
            return F32Panels{table, product, w, grid, x.data(), WorkBuffer<float>(at_once * panel_stride_f32)};
        });
    }
}

}  // namespace breccia
