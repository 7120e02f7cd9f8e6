// SPDX-License-Identifier: Apache-2.0
//
// Panels of integers in matrix tiles. Every processor with tiles of bfloat16 so far has these, but CPUID tells them
// apart, so that they are asked for.
#include "target.hpp"

#if !defined(BRECCIA_EMULATED_BACKEND)
#include <cpuid.h>
#endif

BRECCIA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c,bmi2,amx-tile,amx-int8")
namespace breccia::inline v0_4::amx {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "backends/amx/tiles.inl.hpp"
#include "backends/amx/integer_tiles.inl.hpp"
// clang-format on

static bool has_integer_tiles() {
#if defined(BRECCIA_EMULATED_BACKEND)
    return true;
#else
    constexpr unsigned amx_int8 = 1U << 25;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & amx_int8) != 0;
#endif
}
}  // namespace

extern constinit const IntegerPanels integer_tiles;
constinit const IntegerPanels integer_tiles = make_integer_tiles();

}  // namespace breccia::inline v0_4::amx
BRECCIA_TARGET_END
