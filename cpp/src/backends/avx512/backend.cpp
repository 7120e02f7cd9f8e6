// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 as every processor that has it offers it (F, BW, DQ, VL).
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

BRECCIA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
namespace breccia::avx512 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx512/vec.hpp"
#include "backends/avx512/transpose.inl.hpp"
#include "kernels/all.inl.hpp"
// clang-format on
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("avx512");

}  // namespace breccia::avx512
BRECCIA_TARGET_END
