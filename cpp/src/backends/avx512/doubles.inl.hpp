// SPDX-License-Identifier: Apache-2.0
//
// What kernels/compare_kernels.inl.hpp is written with, in AVX-512.

using Doubles = __m512d;
BRECCIA_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
BRECCIA_INLINE Doubles larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
