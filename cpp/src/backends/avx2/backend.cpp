// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

BRECCIA_TARGET_BEGIN("avx2,fma,f16c,bmi2")
namespace breccia::avx2 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx2/vec.hpp"
#include "kernels/transpose.inl.hpp"
#include "kernels/all.inl.hpp"
// clang-format on
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("avx2");

}  // namespace breccia::avx2
BRECCIA_TARGET_END
