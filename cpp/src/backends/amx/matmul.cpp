// SPDX-License-Identifier: Apache-2.0
//
// Products in matrix tiles, and of a few activations by E4M3. All other kernels are those of avx512_bf16.
#include "target.hpp"

#if !defined(BRECCIA_EMULATED_BACKEND)
#include <cpuid.h>
#endif

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::amx {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "backends/avx512_bf16/decode.inl.hpp"
#include "backends/avx512_bf16/row_scales.inl.hpp"
#include "backends/avx512_bf16/gemv.inl.hpp"
#include "backends/amx/affine_gemv.inl.hpp"
#include "backends/amx/tiles.inl.hpp"
#include "backends/amx/gemm.inl.hpp"
#include "backends/amx/rows.inl.hpp"
// clang-format on
}  // namespace
}  // namespace breccia::inline v0_4::amx
BRECCIA_CPU_END

// Every processor with tiles of bfloat16 so far has those of integers, but CPUID tells them apart, so that they are
// asked for. Beyond BRECCIA_TARGET these kernels have AMX-INT8, so that they take what stands above.
BRECCIA_TARGET_BEGIN(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512fp16,gfni,avx2,fma,f16c,bmi2,amx-tile,amx-bf16,"
    "amx-int8")
namespace breccia::inline v0_4::amx {
namespace {
#include "backends/amx/integer_tiles.inl.hpp"

static bool has_integer_tiles() {
#if defined(BRECCIA_EMULATED_BACKEND)
    return true;
#else
    constexpr unsigned amx_int8 = 1U << 25;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & amx_int8) != 0;
#endif
}

constexpr IntegerPanels integer_tiles = make_integer_tiles();

static consteval ProductKernels make_product_kernels() {
    ProductKernels kernels{.gemm = gemm_amx,
                           .first_level_cache = 48 * 1024,
                           .tile_rows = 16,
                           .panel = {.rows = 384, .activations = 512, .k = panel_k},
                           .panel_of_terms = {.rows = 384, .activations = 512, .k = k_of_terms},
                           .begin = configure_tiles,
                           .end = release_tiles,
                           .gemv_e4m3 = gemv_e4m3,
                           .integer_tiles = &integer_tiles};
    set_each(kernels.tiles, []<BF16Codec C>() { return multiply_rows_in_place<C>; });
    return kernels;
}
}  // namespace

extern constinit const ProductKernels matmul_kernels;
constinit const ProductKernels matmul_kernels = make_product_kernels();

}  // namespace breccia::inline v0_4::amx
BRECCIA_TARGET_END
