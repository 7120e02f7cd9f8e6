// SPDX-License-Identifier: Apache-2.0
//
// Activations as bfloat16 terms, packed in the order of codes in doublewords: for rows across lanes and rows in tiles.
#pragma once

#include <algorithm>
#include <vector>

#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {

/// Where terms go: vector t * rows + i is term t of row i.
struct LaneTerms {
    std::int64_t rows = 0, terms = 0, vectors = 0;
    PairOrder order = PairOrder::bytes;
    std::uint16_t* out = nullptr;
};

/// read(k, count, x): elements [k, k + count) of every row, to rows of x panel_k apart. False where a number is neither
/// zero nor within [2^-100, 2^100].
template <class Read>
bool pack_terms(const BF16Kernels& bf16, const LaneTerms& to, std::int64_t k_end, Read read) {
    std::vector<float> chunk(static_cast<std::size_t>(to.rows * panel_k));
    for (std::int64_t k = 0; k < k_end; k += panel_k) {
        const std::int64_t count = std::min(panel_k, k_end - k);
        read(k, count, chunk.data());
        for (std::int64_t term = 0; term < to.terms; ++term) {
            if (term > 0)
                for (float& value : chunk) value -= to_float(to_bfloat16(value));
            const bool in_range = bf16.pack_lanes({.x = chunk.data(),
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
