// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes as the kernels take them that read them in place.
#pragma once

#include "gemm.hpp"

namespace breccia {

/// Whether codes and scales lie along K, blocks are whole steps or a step holds whole blocks, and zero points are bytes
/// that come one to so many steps.
bool readable_in_place(const ScaledMatrix& w);

/// Rows [begin, begin + n). `scratch`: see CodeRows::scale_scratch.
CodeRows code_rows(const ScaledMatrix& w, std::int64_t begin, std::int64_t n, float* scratch);

/// Codes of a span, see CodeRows.
std::int64_t span_of(const ScaledMatrix& w);

/// Codes worth a thread.
inline constexpr std::int64_t bytes_per_task = std::int64_t{1} << 17;
/// Rows worth a thread.
std::int64_t rows_per_task(const ScaledMatrix& w);

}  // namespace breccia
