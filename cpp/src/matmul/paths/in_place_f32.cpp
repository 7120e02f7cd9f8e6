// SPDX-License-Identifier: Apache-2.0
//
// A few activations by rows of codes in place, in float32: for processors without dot products of bfloat16.
#include <algorithm>

#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

// Activations in the kernels' order. False where one is so large or so small that a product may leave float32's range
// though the sum does not.
bool arrange(const Product& product, const ScaledMatrix& w, std::int64_t stride, float* out) {
    const auto kernel = kernel_of(product.table.matmul.codes_f32, &CodeKernelsF32::arrange, w.element);
    return all_activations(product, product.k, [&](std::int64_t i, std::span<float> row) {
        if (!all_within(row, -100, 100)) return false;
        kernel({.x = row.data(), .k = product.k, .out = out + i * stride});
        return true;
    });
}

std::optional<Kinds> suits_in_place_f32(const Product& product, const ScaledMatrix& w) {
    const CodeKernelsF32* kernels = product.table.matmul.codes_f32;
    return kernels != nullptr && supports(*kernels, w) ? suits_anything(product) : std::nullopt;
}

Refusal by_in_place_f32(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    const KernelTable& table = product.table;
    const CodeKernelsF32* kernels = table.matmul.codes_f32;
    const std::int64_t activations = product.total_rows(), stride = (product.k + 63) / 64 * 64;
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    const auto x = WorkBuffer<float>::zeros(activations * stride);
    if (!arrange(product, w, stride, x.data())) return Refusal::range;

    for_rows(product, w, [&](std::int64_t begin, std::int64_t end) {
        constexpr std::int64_t at_once = 8, most = CodeKernelsF32::most_vectors;
        RowNumbers numbers(w, at_once, GlobalScale::left_out);
        float sums[at_once * most], line[at_once];
        for (std::int64_t first = begin; first < end; first += at_once) {
            const std::int64_t n = std::min(at_once, end - first);
            numbers.read(table, first, n);
            for (std::int64_t i = 0; i < activations; i += most) {
                const std::int64_t vectors = std::min(most, activations - i);
                kernels->product[static_cast<std::size_t>(w.element)]({.codes = w.data + first * w.row_stride,
                                                                       .row_stride = w.row_stride,
                                                                       .rows = n,
                                                                       .k = product.k,
                                                                       .block = w.grid.block_cols,
                                                                       .scales = numbers.scales(),
                                                                       .scale_stride = numbers.stride(),
                                                                       .zero_points = numbers.zero_points(),
                                                                       .x = x.data() + i * stride,
                                                                       .x_stride = stride,
                                                                       .vectors = vectors,
                                                                       .out = sums});
                for (std::int64_t v = 0; v < vectors; ++v) {
                    for (std::int64_t j = 0; j < n; ++j) line[j] = w.with_global(sums[j * vectors + v]);
                    product.write(i + v, first, n, line);
                }
            }
        }
    });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::in_place_f32 =
    path_of_codes<suits_in_place_f32, by_in_place_f32>("in_place_f32", {Refusal::zero_points, Refusal::range});

}  // namespace breccia::inline v0_4
