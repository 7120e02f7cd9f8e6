// SPDX-License-Identifier: Apache-2.0
//
// Activations as bfloat16 terms that add up to them, for all kernels of a few activations; those of many, in panels,
// take terms in registers while they turn a panel's rows (pack_bf16 in backends/avx512_bf16/gemm.inl.hpp).
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "matmul/paths/paths.hpp"

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

/// How a kernel is to be called that takes activations as terms. `Blocks` says how it applies the weight's scales, in
/// units of so many elements of K: elements() are scaled together, and shorten() makes that fewer where it can.
template <class Blocks>
struct TermPlan {
    Blocks blocks;
    std::int64_t unit;
    /// The activations, where they are codes and the kernel's blocks, which may become shorter, each lie in one of
    /// theirs: they are multiplied without their scales. Else null.
    const ScaledMatrix* coded;
    int terms;

    TermPlan(const Product& product, const Blocks& of_weight, std::int64_t of_unit)
        : blocks(of_weight), unit(of_unit), coded(coded_activations(product)) {
        const std::int64_t own = coded != nullptr ? coded->grid.block_cols : 0;
        if (own < product.k && own % blocks.elements(unit) != 0 && !blocks.shorten(own, unit)) coded = nullptr;
        terms = coded != nullptr ? 1 : product.terms();
    }
    /// What paths say of a product.
    [[nodiscard]] Kinds kind(const Product& product) const {
        return coded != nullptr ? kinds::codes : as_numbers(product);
    }
    /// Calls pack(terms) for the activations of each call of the kernel, which takes up to 16 vectors. Empty where it
    /// returns false: a number is out of range.
    template <class Pack>
    [[nodiscard]] OneOrMore<TermActivations> calls(std::int64_t rows, Pack pack) const {
        OneOrMore<TermActivations> all;
        const std::int64_t at_once = 16 / terms;
        for (std::int64_t first = 0; first < rows; first += at_once) {
            const std::int64_t count = std::min(at_once, rows - first);
            TermActivations one{
                .first = first, .rows = count, .terms = terms, .vectors = count * terms, .x = {}, .scales = {}};
            if (!pack(one)) return {};
            all.push_back(std::move(one));
        }
        return all;
    }
    /// Scales of codes for `padded_k` elements, those of a block `stride` apart from the next one's.
    void read_scales(const Product& product, std::int64_t padded_k, std::int64_t stride, Scratch& scratch,
                     TermActivations& out) const {
        const std::int64_t block = blocks.elements(unit);
        out.scales.resize(static_cast<std::size_t>((padded_k + block - 1) / block * stride));
        for (std::int64_t i = 0; i < out.rows; ++i)
            read_finer_scales(product.table, *coded, out.first + i, block, scratch.scales, out.scales.data() + i,
                              stride);
    }
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
