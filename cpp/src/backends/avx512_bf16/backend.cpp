// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 with byte permutations (VBMI), bfloat16 and integer (VNNI) dot products: Zen 4, Sapphire Rapids and later.
#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_VBMI

BRECCIA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma,f16c,bmi2")
namespace breccia::avx512_bf16 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/avx512/vec.hpp"
#include "backends/avx512/transpose.inl.hpp"
#include "kernels/all.inl.hpp"

#include "backends/avx512/bf16_vec.hpp"
#include "backends/avx512/bf16_decode.inl.hpp"
#include "backends/avx512/bf16_gemm.inl.hpp"
#include "backends/avx512/row_scales.inl.hpp"
#include "backends/avx512/bf16_gemv.inl.hpp"
#include "backends/avx512/bf16_lanes.inl.hpp"
#include "backends/avx512/integer_gemv.inl.hpp"
#include "backends/avx512/integer_lanes.inl.hpp"
// clang-format on

/// Activations for a lane_product, rounded to nearest. Returns what pack_bf16 does.
static bool pack_lanes(const PackLanes& p) {
    alignas(64) static constexpr std::uint16_t orders[2][32] = {
        {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
         16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31},
        {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
         16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31}};
    const I order = _mm512_load_si512(orders[p.packed ? 1 : 0]);
    const __mmask16 lane = first_lanes(p.rows);
    OrdinaryRange range;
    for (std::int64_t k = 0; k < p.k; k += 32) {
        I row[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            row[i] = i_set(0);
            if (i >= p.rows) continue;
            const float* from = p.x + i * p.x_stride + k;
            const F first = load_checked(range, from, p.k - k), second = load_checked(range, from + 16, p.k - k - 16);
            row[i] = _mm512_permutexvar_epi16(order, f_round_pair(first, second));
        }
        std::uint16_t* out = p.out + k * p.vectors;
        if (p.vectors == 1) {
            _mm512_storeu_si512(out, row[0]);
            continue;
        }
        transpose_16x16(row);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(out + i * 2 * p.vectors, lane, row[i]);
    }
    return range.strange == 0;
}
static consteval BF16Kernels make_bf16_kernels(const ProductKernels& product) {
    BF16Kernels kernels{product};
    kernels.pack = pack_bf16;
    kernels.pack_words = pack_words;
    kernels.pack_lanes = pack_lanes;
    kernels.decode = Codecs::map([]<Codec C>() -> void (*)(const DecodeBF16&) {
        if constexpr (has_bf16<C>) return decode_bf16<C>;
        return nullptr;
    });
    kernels.gemv = Codecs::map([]<Codec C>() -> void (*)(const Gemv&) {
        if constexpr (has_bf16<C>) return gemv_bf16<C>;
        return nullptr;
    });
    kernels.lanes = Codecs::map([]<Codec C>() -> void (*)(const LaneProduct&) {
        if constexpr (has_bf16<C>) return lane_product<C>;
        return nullptr;
    });
    kernels.pack_digits = Codecs::map([]<Codec C>() -> bool (*)(const PackDigits&) {
        if constexpr (has_code_bytes<C>) return pack_digits<C>;
        return nullptr;
    });
    kernels.gemv_integers = Codecs::map([]<Codec C>() -> void (*)(const IntegerGemv&) {
        if constexpr (has_code_bytes<C>) return integer_gemv<C>;
        return nullptr;
    });
    kernels.integer_lanes = Codecs::map([]<Codec C>() -> void (*)(const IntegerLanes&) {
        if constexpr (has_code_bytes<C>) return integer_lanes<C>;
        return nullptr;
    });
    return kernels;
}

// Two products of pairs take the time of one float32 product.
constexpr BF16Kernels bf16 = make_bf16_kernels({.gemm = gemm_bf16,
                                                .tile_rows = 24,
                                                .panel_rows = 192,
                                                .max_terms = 2,
                                                .lane_vectors = 24,
                                                .prepared_lane_vectors = 48});
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("avx512_bf16", &bf16);

}  // namespace breccia::avx512_bf16
BRECCIA_TARGET_END
