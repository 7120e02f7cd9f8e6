// SPDX-License-Identifier: Apache-2.0
//
// The loops around the panel kernels, common to float32 and bfloat16: activations are packed once, each panel of
// weights is decoded once and meets all of them, sums are turned on the way out.
#pragma once

#include <algorithm>

#include "breccia/cpu.hpp"
#include "matmul/product.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {

struct Chunk {
    std::int64_t k = 0, count = 0;
};

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

/// Where things lie for `rows` activations: panels of 32 abreast, the last one maybe of 16.
struct PanelGrid {
    std::int64_t rows, padded;
    explicit PanelGrid(std::int64_t n) : rows(n), padded(round_up(n, 16)) {}
    [[nodiscard]] std::int64_t count() const { return (padded + panel_width - 1) / panel_width; }
    [[nodiscard]] std::int64_t width(std::int64_t panel) const {
        return std::min(panel_width, padded - panel * panel_width);
    }
};

/// Element offset of activation group `group` (16 rows) of a chunk with `units` steps.
constexpr std::int64_t packed_offset(std::int64_t group, std::int64_t units) {
    return group / 2 * panel_width * units + group % 2 * 16;
}

/// Weight rows of a panel: large panels read the activations less often, small ones leave some for every thread.
inline std::int64_t panel_rows(std::int64_t n, const PanelGrid& grid, std::int64_t most) {
    if (grid.padded <= panel_width) return row_multiple;
    const int threads = num_threads();
    return std::clamp(round_up((n + threads - 1) / threads, row_multiple), row_multiple, most);
}

/// Turns 16 activations' sums by the weights [j, j + rows), `width` apart, straight to where they belong. False, with
/// nothing written, where they do not lie there side by side.
inline bool turn_in_place(const KernelTable& table, const Product& product, std::int64_t first, std::int64_t j,
                          std::int64_t rows, const float* sums, std::int64_t width) {
    const BF16Kernels* bf16 = table.matmul.bf16;
    std::int64_t stride = 0;
    if (rows % 16 == 0)
        if (void* out = product.in_place(DType::float32, first, 16, j, rows, stride)) {
            for (std::int64_t i = 0; i < rows; i += 16)
                table.matmul.transpose(sums + i * width, width, static_cast<float*>(out) + i, stride);
            return true;
        }
    if (rows % 32 == 0 && bf16 != nullptr && bf16->transpose != nullptr)
        if (void* out = product.in_place(DType::bfloat16, first, 16, j, rows, stride)) {
            for (std::int64_t i = 0; i < rows; i += 32)
                bf16->transpose(sums + i * width, width, static_cast<std::uint16_t*>(out) + i, stride);
            return true;
        }
    return false;
}

/// Calls product(begin_n, rows, c) for panels of weights; it must leave c[panel][row][activation], zeroed here, full.
template <class PanelProduct>
void for_weight_panels(const KernelTable& table, const Product& product, std::int64_t first, const PanelGrid& grid,
                       std::int64_t at_once, PanelProduct panel_product) {
    const std::int64_t panels = (product.n + at_once - 1) / at_once;
    parallel_for(product.call, panels, 1, [&](std::int64_t begin, std::int64_t end) {
        const WorkBuffer<float> sums(at_once * grid.padded), turning(16 * at_once);
        float *c = sums.data(), *turned = turning.data();
        auto state = panel_product();
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t j = unit * at_once, rows = std::min(at_once, product.n - j);
            const std::int64_t padded_rows = round_up(rows, row_multiple);
            std::fill(c, c + padded_rows * grid.padded, 0.0F);
            state.run(j, rows, padded_rows, c);
            for (std::int64_t m = 0; m < grid.rows; m += 16) {
                const float* from = c + m / panel_width * panel_width * padded_rows + m % panel_width;
                const std::int64_t width = grid.width(m / panel_width);
                if (m + 16 <= grid.rows && turn_in_place(table, product, first + m, j, rows, from, width)) continue;
                for (std::int64_t i = 0; i < rows; i += 16)
                    table.matmul.transpose(from + i * width, width, turned + i, at_once);
                for (std::int64_t r = 0; r < std::min<std::int64_t>(16, grid.rows - m); ++r)
                    product.write(first + m + r, j, rows, turned + r * at_once);
            }
        }
    });
}

}  // namespace breccia::inline v0_4
