// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes as the kernels take them that read them in place.
#pragma once

#include <functional>

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// Whether codes and scales lie along K, blocks are whole steps or a step holds whole blocks, and zero points are bytes
/// that come one to so many steps. Reads none of them; the kernels take zero points that zero_points_are_small() of.
bool readable_in_place(const ScaledMatrix& w);

/// Rows [begin, begin + n). `first_level_cache`, `scratch`: see CodeRows::scale_scratch.
CodeRows code_rows(std::int64_t first_level_cache, const ScaledMatrix& w, std::int64_t begin, std::int64_t n,
                   float* scratch);

/// Codes of a span, see CodeRows.
std::int64_t span_of(const ScaledMatrix& w);

/// Codes worth a thread.
inline constexpr std::int64_t bytes_per_task = std::int64_t{1} << 17;
/// Calls body(begin, end) for `n` rows in all, from threads. Ranges begin at multiples of four, which kernels take
/// together: which rows these are must not depend on the number of threads.
void for_rows(const ScaledMatrix& w, std::int64_t n, const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace breccia::inline v0_4
