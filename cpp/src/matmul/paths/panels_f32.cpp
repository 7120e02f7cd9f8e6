// SPDX-License-Identifier: Apache-2.0
#include "matmul/paths/panels.hpp"

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

void Product::read(const KernelTable& table, std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count,
                   Scratch& scratch, float* out, std::int64_t stride) const {
    while (rows > 0) {
        const std::int64_t here = std::min(rows, m - row % m);
        a[static_cast<std::size_t>(row / m)].read(table, row % m, here, at, count, scratch, out, stride);
        out += here * stride;
        row += here;
        rows -= here;
    }
}

void* Product::in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                        std::int64_t& stride) const {
    const OutputMatrix& to = c[static_cast<std::size_t>(row / m)];
    const auto item = static_cast<std::int64_t>(size_of(dtype));
    stride = to.row_stride / item;
    const bool fits = to.dtype == dtype && row % m + rows <= m && to.row_stride % item == 0;
    return fits ? to.in_place(row % m, begin, count) : nullptr;
}

void Product::write(const KernelTable& table, std::int64_t row, std::int64_t begin, std::int64_t count,
                    const float* x) const {
    c[static_cast<std::size_t>(row / m)].write(table, row % m, begin, count, x);
}

void gemm_f32(const Product& product, const Rows& w) {
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

void gemv_f32(const Product& product, const Rows& w) {
    const KernelTable& table = product.table;
    const std::int64_t rows = product.total_rows();
    std::vector<float> x(static_cast<std::size_t>(rows * product.k));
    Scratch reading;
    product.read(table, 0, rows, 0, product.k, reading, x.data(), product.k);
    constexpr std::int64_t at_once = 16;
    const std::int64_t grain =
        std::max<std::int64_t>(1, (std::int64_t{1} << 16) / std::max<std::int64_t>(product.k, 1));
    parallel_for(product.n, round_up(grain, at_once), [&](std::int64_t begin, std::int64_t end) {
        Scratch scratch;
        std::vector<float> weights(static_cast<std::size_t>(at_once * product.k));
        std::vector<float> results(static_cast<std::size_t>(at_once * rows));
        for (std::int64_t j = begin; j < end; j += at_once) {
            const std::int64_t n = std::min(at_once, end - j);
            w.read(table, j, n, 0, product.k, scratch, weights.data(), product.k);
            for (std::int64_t i = 0; i < rows; ++i) {
                for (std::int64_t r = 0; r < n; ++r)
                    results[static_cast<std::size_t>(r)] =
                        table.matmul.dot(x.data() + i * product.k, weights.data() + r * product.k, product.k);
                product.write(table, i, j, n, results.data());
            }
        }
    });
}

}  // namespace breccia
