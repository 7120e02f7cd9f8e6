// SPDX-License-Identifier: Apache-2.0
//
// Rows of 4-bit codes in place by an activation as integers, in AVX2 with AVX-VNNI: Intel's processors without AVX-512
// since Alder Lake.
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_DPBUSD _mm256_dpbusd_avx_epi32

BRECCIA_TARGET_BEGIN("avx2,fma,f16c,bmi2,avxvnni")
namespace breccia::inline v0_4::avx2 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx2/vec.hpp"
#include "kernels/digit_unit.inl.hpp"
#include "backends/avx2/integer_rows.inl.hpp"
#include "kernels/integer_rows.inl.hpp"
// clang-format on
}  // namespace

extern constinit const IntegerKernels integer_vnni_kernels;
constinit const IntegerKernels integer_vnni_kernels = make_integer_kernels();

}  // namespace breccia::inline v0_4::avx2
BRECCIA_TARGET_END
