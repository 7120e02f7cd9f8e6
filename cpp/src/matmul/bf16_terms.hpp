// SPDX-License-Identifier: Apache-2.0
//
// Activations as bfloat16 terms that add up to them, for all kernels of a few activations; those of many, in panels,
// take terms in registers while they turn a panel's rows (pack_bf16 in backends/avx512_bf16/gemm.inl.hpp).
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// Takes the next term off numbers: it goes to `term`, and x keeps what is left, exactly.
inline void take_term(const KernelTable& table, std::span<float> x, std::uint16_t* term) {
    table.dequantize.store[static_cast<std::size_t>(DType::bfloat16)](x.data(), std::ssize(x), term);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] -= float_from_bits(static_cast<std::uint32_t>(term[i]) << 16);
}

/// Some of a product's activations, as bfloat16 terms that add up to them: vector t * rows + i is term t of row i. Or
/// codes, as one term, and their scales: [block of the kernel][vectors; of tiles 16].
struct TermActivations {
    std::int64_t first, rows, terms, vectors;
    WorkBuffer<std::uint16_t> x;
    std::vector<float> scales;
};

/// How a kernel of terms is to be called, whose scales come in such blocks.
template <class Blocks>
struct TermPlan {
    Blocks blocks;
    const ScaledMatrix* coded;  ///< the activations, where they are multiplied without their scales
    int terms;

    TermPlan(const Product& product, const Blocks& of_scales, const ScaledMatrix* coded_activations)
        : blocks(of_scales), coded(coded_activations), terms(coded != nullptr ? 1 : product.terms()) {}
    /// Activations from `first` on of one call of the kernel, which takes up to 16 vectors.
    [[nodiscard]] TermActivations pass(std::int64_t first, std::int64_t rows) const {
        const std::int64_t count = std::min(at_once(), rows - first);
        return {.first = first, .rows = count, .terms = terms, .vectors = count * terms, .x = {}, .scales = {}};
    }
    [[nodiscard]] std::int64_t at_once() const { return 16 / terms; }
};

/// Packs the activations that `to` names, codes of `coded` unless that is null, in the order of codes in doublewords,
/// padded with zeros to `padded_k` elements: vector t * rows + i is term t of row i. adjust(x, count) changes elements
/// of a row before. False where a number is neither zero nor within [2^-100, 2^100].
template <class Adjust>
bool pack_terms(const Product& product, const ScaledMatrix* coded, std::int64_t padded_k, PairOrder order,
                TermActivations& to, Scratch& scratch, Adjust adjust) {
    const KernelTable& table = product.table;
    const std::int64_t numbers = to.rows * panel_k;
    to.x = WorkBuffer<std::uint16_t>(padded_k * to.vectors);
    // The kernel writes 32 elements at a time of all vectors that there are.
    const std::int64_t written = to.vectors == to.rows * to.terms ? product.k / 32 * 32 : 0;
    std::fill(to.x.data() + written * to.vectors, to.x.data() + padded_k * to.vectors, std::uint16_t{0});
    const auto chunk = WorkBuffer<float>::zeros(numbers);
    const WorkBuffer<std::uint16_t> taken(to.terms > 1 ? numbers : 0);
    for (std::int64_t k = 0; k < product.k; k += panel_k) {
        const std::int64_t count = std::min(panel_k, product.k - k);
        read_activations(product, coded, to.first, to.rows, k, count, scratch, chunk.data(), panel_k);
        for (std::int64_t i = 0; i < to.rows; ++i) adjust(chunk.data() + i * panel_k, count);
        for (std::int64_t term = 0; term < to.terms; ++term) {
            if (term > 0) take_term(table, {chunk.data(), static_cast<std::size_t>(numbers)}, taken.data());
            const bool in_range =
                table.matmul.bf16->pack_lanes({.x = chunk.data(),
                                               .x_stride = panel_k,
                                               .rows = to.rows,
                                               .k = count,
                                               .out = to.x.data() + k * to.vectors + term * to.rows * 2,
                                               .vectors = to.vectors,
                                               .order = order});
            if (term == 0 && !in_range) return false;  // the other terms may be smaller: they are exact
        }
    }
    return true;
}

}  // namespace breccia::inline v0_4
