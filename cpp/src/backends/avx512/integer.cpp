// SPDX-License-Identifier: Apache-2.0
//
// Rows of 4-bit codes in place by an activation as integers, in AVX-512 with VNNI, which most processors
// with AVX-512 have; 256 bits at a time, as a unit of the digits is.
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_DPBUSD _mm256_dpbusd_epi32

BRECCIA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")
namespace breccia::inline v0_4::avx512 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx512/vec.hpp"
#include "kernels/digit_unit.inl.hpp"
#include "backends/avx2/integer_rows.inl.hpp"
#include "kernels/integer_rows.inl.hpp"
// clang-format on
}  // namespace

extern constinit const IntegerKernels integer_kernels;
constinit const IntegerKernels integer_kernels = make_integer_kernels();

}  // namespace breccia::inline v0_4::avx512
BRECCIA_TARGET_END
