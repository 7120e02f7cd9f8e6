// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary of avx512, and what AVX512_BF16 adds to it.

#include "backends/avx512/vec.hpp"

/// sum[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]: the products are exact, subnormal operands and results are zeros.
BRECCIA_INLINE F f_dot_pairs(F sum, I a, I b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

/// 32 floats to bfloat16, nearest even.
BRECCIA_INLINE I f_round_pair(F first, F second) { return reinterpret_cast<I>(_mm512_cvtne2ps_pbh(second, first)); }

/// 16 bfloat16 numbers to floats.
BRECCIA_INLINE F f_widen(__m256i x) { return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
