// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 with matrix tiles (Sapphire Rapids and later). Everything but the panel product is that of avx512.
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_VBMI

BRECCIA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c,bmi2,amx-tile,amx-bf16")
namespace breccia::amx {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx512/vec.hpp"
#include "backends/avx512/transpose.inl.hpp"
#include "kernels/all.inl.hpp"

#include "backends/avx512/bf16_vec.hpp"
#include "backends/avx512/bf16_decode.inl.hpp"
#include "backends/avx512/bf16_gemm.inl.hpp"
#include "backends/avx512/bf16_gemv.inl.hpp"
#include "backends/avx512/bf16_lanes.inl.hpp"
#include "backends/amx/gemm.inl.hpp"
// clang-format on
constexpr BF16Kernels bf16 = [] {
    // Three tile products are quicker than one float32 product.
    BF16Kernels kernels = make_bf16_kernels(gemm_amx, 16, 384, 3);
    kernels.begin = configure_tiles;
    kernels.end = release_tiles;
    return kernels;
}();
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("amx", &bf16);

}  // namespace breccia::amx
BRECCIA_TARGET_END
