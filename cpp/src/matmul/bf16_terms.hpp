// SPDX-License-Identifier: Apache-2.0
//
// Activations as bfloat16 terms that add up to them, for all kernels of a few activations; those of many, in panels,
// take terms in registers while they turn a panel's rows (pack_bf16 in backends/avx512_bf16/gemm.inl.hpp).
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "contract/kernel_table.hpp"
#include "runtime/threads.hpp"

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

/// Where terms go, in the order of codes in doublewords, for rows across lanes and rows in tiles: vector t * rows + i
/// is term t of row i.
struct LaneTerms {
    std::int64_t rows = 0, terms = 0, vectors = 0;
    PairOrder order = PairOrder::bytes;
    std::uint16_t* out = nullptr;
};

/// read(k, count, x): elements [k, k + count) of every row, to rows of x panel_k apart. False where a number is neither
/// zero nor within [2^-100, 2^100].
template <class Read>
bool pack_terms(const KernelTable& table, const LaneTerms& to, std::int64_t k_end, Read read) {
    const std::int64_t numbers = to.rows * panel_k;
    const WorkBuffer<float> chunk(numbers);
    const WorkBuffer<std::uint16_t> taken(to.terms > 1 ? numbers : 0);
    std::fill_n(chunk.data(), numbers, 0.0F);
    for (std::int64_t k = 0; k < k_end; k += panel_k) {
        const std::int64_t count = std::min(panel_k, k_end - k);
        read(k, count, chunk.data());
        for (std::int64_t term = 0; term < to.terms; ++term) {
            if (term > 0) take_term(table, {chunk.data(), static_cast<std::size_t>(numbers)}, taken.data());
            const bool in_range = table.matmul.bf16->pack_lanes({.x = chunk.data(),
                                                                 .x_stride = panel_k,
                                                                 .rows = to.rows,
                                                                 .k = count,
                                                                 .out = to.out + k * to.vectors + term * to.rows * 2,
                                                                 .vectors = to.vectors,
                                                                 .order = to.order});
            if (term == 0 && !in_range) return false;  // the other terms may be smaller: they are exact
        }
    }
    return true;
}

}  // namespace breccia::inline v0_4
