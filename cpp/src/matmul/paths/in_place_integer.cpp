// SPDX-License-Identifier: Apache-2.0
//
// One activation, or a few, by a weight whose codes are small integers: the activation becomes integers too, exactly,
// or another way is taken. INT8 codes are integers as they are.
#include <algorithm>

#include "matmul/paths/paths.hpp"
#include "matmul/prepared.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {
namespace {

// Digits of activations, and the memory they are in.
class IntegerActivations {
public:
    IntegerActivations(std::int64_t rows, std::int64_t steps) : memory_(rows * steps), digits_(rows) {
        for (std::int64_t i = 0; i < rows; ++i) digits_.data()[i] = Digits{.steps = memory_.data() + i * steps};
    }
    [[nodiscard]] Digits& operator[](std::int64_t row) const { return digits_.data()[row]; }

private:
    WorkBuffer<DigitStep> memory_;
    WorkBuffer<Digits> digits_;
};

// What `fast` multiplies.
void round_to_bfloat16(const KernelTable& table, float* x, std::int64_t n) {
    constexpr auto bfloat16 = static_cast<std::size_t>(DType::bfloat16);
    const WorkBuffer<BFloat16> rounded(n);
    table.dequantize.store[bfloat16](x, n, rounded.data());
    table.dequantize.load[bfloat16](rounded.data(), n, x);
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
    parallel_for(product.call, (product.n + lanes - 1) / lanes, std::max<std::int64_t>(1, bytes_per_task / group_bytes),
                 [&](std::int64_t begin, std::int64_t end) {
                     const PreparedRows& prepared = product.prepared;
                     const std::int64_t stride = blocks.group_bytes(prepared.scale_type);
                     alignas(64) float line[at_once * lanes];
                     for (std::int64_t group = begin; group < end; group += at_once) {
                         const std::int64_t groups = std::min(at_once, end - group), row = group * lanes;
                         product.table.matmul.integers->lanes[static_cast<std::size_t>(w.element)](
                             {.codes = prepared.codes + group * group_bytes,
                              .groups = groups,
                              .quads = quads,
                              .run = run,
                              .runs_per_block = std::max<std::int64_t>(1, blocks.block_quads * 4 / run),
                              .scale_step = blocks.scale_step,
                              .scales = prepared.scales + group * stride,
                              .scale_type = prepared.scale_type,
                              .group_scale_stride = stride,
                              .x = &x,
                              .out = line});
                         const std::int64_t n = std::min(groups * lanes, product.n - row);
                         for (std::int64_t j = 0; j < n; ++j) line[j] = w.with_global(line[j]);
                         product.write(0, row, n, line);
                     }
                 });
}

std::int64_t steps_of(const Product& product, const ScaledMatrix& w) {
    return (product.k + row_step(w.packed) - 1) / row_step(w.packed);
}

// The activations, where they are INT8 codes that the kernels take as such.
std::optional<Int8Activations> int8_activations(const Product& product, const ScaledMatrix& w) {
    const auto kernel = kernel_of(product.table.matmul.integers, &IntegerKernels::digits_of_codes, w.element);
    if (kernel == nullptr || product.a.front().scaled_along_k() == nullptr) return {};
    return Int8Activations::of(product, w);
}

std::optional<Kinds> suits_in_place_integer(const Product& product, const ScaledMatrix& w) {
    const IntegerKernels* kernels = product.table.matmul.integers;
    if (kernel_of(kernels, &IntegerKernels::gemv, w.element) == nullptr || !readable_in_place(w)) return {};
    if (int8_activations(product, w)) return kinds::codes;
    if (kernel_of(kernels, &IntegerKernels::pack_digits, w.element) == nullptr) return {};
    return as_numbers(product, product.a.front().bfloat16_terms());  // rounded or not
}

// Digits of the activations that are INT8 codes; false where their scales are out of range.
bool make_digits(const Product& product, const ScaledMatrix& w, const Int8Activations& a,
                 const IntegerActivations& out) {
    const std::int64_t steps = steps_of(product, w), padded_k = steps * row_step(w.packed);
    const WorkBuffer<std::int8_t> codes(padded_k);
    const WorkBuffer<float> scales(a.blocks());
    std::fill(codes.data() + product.k, codes.data() + padded_k, std::int8_t{0});
    for (std::int64_t i = 0; i < product.total_rows(); ++i) {
        a.read_codes(i, codes.data());
        a.read_scales(i, scales.data());
        if (!product.table.matmul.integers->digits_of_codes[static_cast<std::size_t>(w.element)](
                {.codes = codes.data(),
                 .steps = steps,
                 .scales = scales.data(),
                 .blocks = a.blocks(),
                 .block = a.block(),
                 .zero_points = w.zero_point.data != nullptr,
                 .scale_type = w.scale_type,
                 .out = &out[i]}))
            return false;
    }
    return true;
}

// Digits of other activations, see PackDigits::run; false where there are too many.
bool make_digits(const Product& product, const ScaledMatrix& w, std::int64_t run, const IntegerActivations& out) {
    const auto pack = kernel_of(product.table.matmul.integers, &IntegerKernels::pack_digits, w.element);
    const std::int64_t steps = steps_of(product, w);
    return all_activations(product, steps * row_step(w.packed), [&](std::int64_t i, std::span<float> row) {
        if (product.precision == Precision::fast) round_to_bfloat16(product.table, row.data(), product.k);
        return pack({.x = row.data(),
                     .steps = steps,
                     .zero_points = w.zero_point.data != nullptr,
                     .scale_type = w.scale_type,
                     .run = run,
                     .out = &out[i]});
    });
}

Refusal by_in_place_integer(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    const KernelTable& table = product.table;
    const IntegerKernels* kernels = table.matmul.integers;
    const std::int64_t rows = product.total_rows();
    const auto element = static_cast<std::size_t>(w.element);
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    const IntegerActivations x(rows, steps_of(product, w));
    const std::optional<Int8Activations> coded = int8_activations(product, w);
    const bool as_codes = coded && make_digits(product, w, *coded, x);
    const bool prepared = rows == 1 && !as_codes && product.prepared.codes != nullptr && w.zero_point.data == nullptr &&
                          kernels->lanes[element] != nullptr;
    const std::optional<LaneBlocks> blocks = prepared ? lane_blocks(w) : std::nullopt;
    const std::int64_t run = blocks ? doublewords_to_a_run(*blocks, w.packed) : 0;
    if (!as_codes && (kernels->pack_digits[element] == nullptr || !make_digits(product, w, run, x)))
        return Refusal::digits;
    if (blocks) {
        multiply_prepared(product, w, *blocks, run, x[0]);
        return Refusal::none;
    }
    for_rows(product, w, [&](std::int64_t begin, std::int64_t end) {
        // So few rows that their codes are in the first-level cache for the next activation.
        constexpr std::int64_t longest = 128;
        const std::int64_t at_once = rows == 1 ? longest : 16;
        const std::int64_t count = 4 * w.grid.grid_cols() + 8;  // eight are read at a time
        const auto scales = WorkBuffer<float>::zeros(count);
        float line[longest];
        for (std::int64_t first = begin; first < end; first += at_once) {
            const std::int64_t n = std::min(at_once, end - first);
            for (std::int64_t i = 0; i < rows; ++i) {
                kernels->gemv[element](
                    {.w = code_rows(kernels->first_level_cache, w, first, n, scales.data()), .x = &x[i], .out = line});
                for (std::int64_t j = 0; j < n; ++j) line[j] = w.with_global(line[j]);
                product.write(i, first, n, line);
            }
        }
    });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::in_place_integer = path_of_codes<suits_in_place_integer, by_in_place_integer>(
    "in_place_integer", {Refusal::zero_points, Refusal::digits});

}  // namespace breccia::inline v0_4
