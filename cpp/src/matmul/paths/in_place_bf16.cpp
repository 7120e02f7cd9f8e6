// SPDX-License-Identifier: Apache-2.0
//
// A few activations by a packed weight. An activation that is not a bfloat16 number is the sum of two or three that
// are: the products stay exact.
#include <algorithm>
#include <cstring>

#include "matmul/bf16_terms.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

// One step's worth of elements in the order the kernel decodes codes.
void reorder(const std::uint16_t* from, bool packed, std::uint16_t* to) {
    if (packed) {
        for (std::int64_t part = 0; part < 4; ++part)
            for (std::int64_t i = 0; i < 32; ++i) to[part * 32 + i] = from[4 * i + part];
    } else {
        for (std::int64_t run = 0; run < 8; ++run) std::memcpy(to + run % 2 * 32 + run / 2 * 8, from + run * 8, 16);
    }
}

// The bfloat16 terms of an activation, most significant first, in the kernel's order; `x` is left with what `most`
// terms do not hold. Returns how many are not all zero; the rest are. x.size() is a multiple of the step.
int split(const KernelTable& table, std::span<float> x, bool packed, int most, std::uint16_t* terms) {
    const std::int64_t n = std::ssize(x), step = row_step(packed);
    const WorkBuffer<std::uint16_t> term(n);
    for (int t = 0;; ++t) {
        std::uint32_t any = 0;
        for (const float value : x) any |= bits_of(value);
        if (t > 0 && (t == most || (any & f32_abs_mask) == 0)) {
            std::fill(terms + t * n, terms + most * n, std::uint16_t{0});
            return t;
        }
        take_term(table, x, term.data());
        for (std::int64_t k = 0; k < n; k += step) reorder(term.data() + k, packed, terms + t * n + k);
    }
}

// Activations as terms: [activation][most][stride], of which the first `used` count.
struct Split {
    const std::uint16_t* terms;
    std::int64_t stride;
    int most, used;
};

// Activations [first, first + rows) by the weight, one pass over its codes.
void multiply(const Product& product, const ScaledMatrix& w, const Split& split, std::int64_t first,
              std::int64_t rows) {
    const BF16Kernels& bf16 = *product.table.matmul.bf16;
    const std::int64_t padded_k = split.stride, used = split.used;
    // The kernel comes for some numbers of vectors; the rest are rows of zeros.
    std::int64_t vectors = rows * used;
    if (vectors == 5 || vectors == 7) ++vectors;
    const WorkBuffer<std::uint16_t> x(vectors * padded_k);
    std::fill(x.data() + rows * used * padded_k, x.data() + vectors * padded_k, std::uint16_t{0});
    for (std::int64_t i = 0; i < rows * used; ++i)
        std::copy_n(split.terms + (i / used * split.most + i % used) * padded_k, padded_k, x.data() + i * padded_k);

    for_rows(product, w, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t n = end - begin, scales = 4 * w.grid.grid_cols();
        const WorkBuffer<float> buffer(n * (vectors + 1) + scales);
        float* sums = buffer.data();
        float* line = sums + n * vectors;
        std::fill_n(line + n, scales, 0.0F);
        CodeRows rows_of_w = code_rows(bf16.first_level_cache, w, begin, n, line + n);
        if (const PreparedRows& prepared = product.prepared; prepared.special != nullptr)
            rows_of_w.special = prepared.special + begin / special_rows * prepared.special_row_stride;
        bf16.gemv[static_cast<std::size_t>(w.element)](
            {.w = rows_of_w, .x = x.data(), .vectors = vectors, .out = sums});
        for (std::int64_t i = 0; i < rows; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
                const float* parts = sums + j * vectors + i * used;
                float sum = parts[0];
                for (std::int64_t t = 1; t < used; ++t) sum += parts[t];
                line[j] = w.with_global(sum);
            }
            product.write(first + i, begin, n, line);
        }
    });
}

std::optional<Kinds> suits_in_place_bf16(const Product& product, const ScaledMatrix& w) {
    const GemvKernel kernel = kernel_of(product.table.matmul.bf16, &BF16Kernels::gemv, w.element);
    if (kernel == nullptr || !readable_in_place(w)) return {};
    return as_numbers(product);
}

Refusal by_in_place_bf16(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    const std::int64_t rows = product.total_rows(), step = row_step(w.packed);
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    const std::int64_t padded_k = (product.k + step - 1) / step * step;
    const int most = product.precision == Precision::fast ? 1 : 3;
    const WorkBuffer<std::uint16_t> terms(rows * most * padded_k);
    int used = 1;
    const bool in_range = all_activations(product, padded_k, [&](std::int64_t i, std::span<float> row) {
        if (!all_within(row, -100, 100)) return false;
        used = std::max(used, split(product.table, row, w.packed, most, terms.data() + i * most * padded_k));
        return true;
    });
    if (!in_range) return Refusal::range;
    const std::int64_t at_once = max_gemv_vectors / used;
    if (rows > 2 * at_once) return Refusal::terms;
    for (std::int64_t first = 0; first < rows; first += at_once) {
        const Split x{.terms = terms.data() + first * most * padded_k, .stride = padded_k, .most = most, .used = used};
        multiply(product, w, x, first, std::min(at_once, rows - first));
    }
    return Refusal::none;
}

}  // namespace

constinit const Path paths::in_place_bf16 = path_of_codes<suits_in_place_bf16, by_in_place_bf16>(
    "in_place_bf16", {Refusal::zero_points, Refusal::range, Refusal::terms});

}  // namespace breccia::inline v0_4
