// SPDX-License-Identifier: Apache-2.0
//
// One activation, or two, by a weight whose codes are small integers: the activation becomes integers too, exactly, or
// another way is taken.
#include <algorithm>

#include "matmul/code_rows.hpp"
#include "matmul/paths/paths.hpp"
#include "runtime/threads.hpp"
#include "runtime/workspace.hpp"

namespace breccia::inline v0_4 {
namespace {

// An activation's digits, and the memory they are in.
struct IntegerActivation {
    explicit IntegerActivation(std::int64_t steps) : memory(steps), digits{.steps = memory.data()} {}

    WorkBuffer<DigitStep> memory;
    Digits digits;
};

// What `fast` multiplies.
void round_to_bfloat16(const KernelTable& table, std::vector<float>& x) {
    std::vector<BFloat16> rounded(x.size());
    table.dequantize.store[static_cast<std::size_t>(DType::bfloat16)](x.data(), static_cast<std::int64_t>(x.size()),
                                                                      rounded.data());
    std::transform(rounded.begin(), rounded.end(), x.begin(), [](BFloat16 value) { return to_float(value); });
}

// Doublewords of a row that a prepared weight's kernel sums up at a time: a short block, or a step.
std::int64_t doublewords_to_a_run(const LaneBlocks& blocks, bool packed) {
    return blocks.block_quads > 0 ? 16 : (std::int64_t{16} << blocks.block_shift) / (packed ? 8 : 4);
}

// Rows across lanes, as a prepared weight has them.
void multiply_prepared(const Product& product, const ScaledMatrix& w, const LaneBlocks& blocks, std::int64_t run,
                       const Digits& x) {
    constexpr std::int64_t lanes = 16, at_once = 8;
    const std::int64_t quads = quads_of(product.k, w.packed), group_bytes = quads * 256;
    parallel_for((product.n + lanes - 1) / lanes, std::max<std::int64_t>(1, bytes_per_task / group_bytes),
                 [&](std::int64_t begin, std::int64_t end) {
                     alignas(64) float line[at_once * lanes];
                     for (std::int64_t group = begin; group < end; group += at_once) {
                         const std::int64_t groups = std::min(at_once, end - group), row = group * lanes;
                         const std::int64_t stride = blocks.group_bytes(w.lane_scale_type);
                         product.table.matmul.integers->lanes[static_cast<std::size_t>(w.element)](
                             {.codes = w.lane_codes + group * group_bytes,
                              .groups = groups,
                              .quads = quads,
                              .run = run,
                              .runs_per_block = std::max<std::int64_t>(1, blocks.block_quads * 4 / run),
                              .scale_step = blocks.scale_step,
                              .scales = w.lane_scales + group * stride,
                              .scale_type = w.lane_scale_type,
                              .group_scale_stride = stride,
                              .x = &x,
                              .out = line});
                         const std::int64_t n = std::min(groups * lanes, product.n - row);
                         for (std::int64_t j = 0; j < n; ++j) line[j] = w.with_global(line[j]);
                         product.write(product.table, 0, row, n, line);
                     }
                 });
}

std::optional<Entry> suits_in_place_integer(const Product& product, const ScaledMatrix& w) {
    const IntegerKernels* kernels = product.table.matmul.integers;
    const bool has_kernel = kernels != nullptr && kernels->gemv[static_cast<std::size_t>(w.element)] != nullptr;
    if (!has_kernel || !readable_in_place(w)) return {};
    return Entry{.terms = product.a.front().bfloat16_terms()};
}

Refusal by_in_place_integer(const Product& product, const ScaledMatrix& w, const Limits& /*limits*/) {
    const KernelTable& table = product.table;
    const IntegerKernels* kernels = table.matmul.integers;
    const std::int64_t rows = product.total_rows(), k = product.k, step = row_step(w.packed);
    const auto element = static_cast<std::size_t>(w.element);
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    const bool prepared =
        rows == 1 && w.lane_codes != nullptr && w.zero_point == nullptr && kernels->lanes[element] != nullptr;
    const std::optional<LaneBlocks> blocks = prepared ? lane_blocks(w) : std::nullopt;
    const std::int64_t run = blocks ? doublewords_to_a_run(*blocks, w.packed) : 0;
    const std::int64_t steps = (k + step - 1) / step;
    std::vector<IntegerActivation> x;
    std::vector<float> row(static_cast<std::size_t>(steps * step));
    Scratch scratch;
    for (std::int64_t i = 0; i < rows; ++i) {
        product.read(table, i, 1, 0, k, scratch, row.data(), k);
        if (product.precision == Precision::fast) round_to_bfloat16(table, row);
        x.emplace_back(steps);
        if (!kernels->pack_digits[element]({.x = row.data(),
                                            .steps = steps,
                                            .zero_points = w.zero_point != nullptr,
                                            .scale_type = w.scale_type,
                                            .run = run,
                                            .out = &x.back().digits}))
            return Refusal::digits;
    }
    if (blocks) {
        multiply_prepared(product, w, *blocks, run, x.front().digits);
        return Refusal::none;
    }
    for_rows(w, product.n, [&](std::int64_t begin, std::int64_t end) {
        // So few rows that their codes are in the first-level cache for the next activation.
        constexpr std::int64_t longest = 128;
        const std::int64_t at_once = rows == 1 ? longest : 16;
        std::vector<float> scales(static_cast<std::size_t>(4 * w.grid.grid_cols() + 8));  // eight are read at a time
        float line[longest];
        for (std::int64_t first = begin; first < end; first += at_once) {
            const std::int64_t n = std::min(at_once, end - first);
            for (std::int64_t i = 0; i < rows; ++i) {
                kernels->gemv[element]({.w = code_rows(kernels->first_level_cache, w, first, n, scales.data()),
                                        .x = &x[static_cast<std::size_t>(i)].digits,
                                        .out = line});
                for (std::int64_t j = 0; j < n; ++j) line[j] = w.with_global(line[j]);
                product.write(table, i, first, n, line);
            }
        }
    });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::in_place_integer = path_of_codes<suits_in_place_integer, by_in_place_integer>(
    "in_place_integer", {Refusal::zero_points, Refusal::digits});

}  // namespace breccia::inline v0_4
