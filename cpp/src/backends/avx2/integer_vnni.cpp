// SPDX-License-Identifier: Apache-2.0
//
// The unit of integers once more, with AVX-VNNI: Intel's processors without AVX-512 since Alder Lake.
#define BRECCIA_INTEGER_TABLE integer_vnni_kernels
#define BRECCIA_INTEGER_TARGET "avx2,fma,f16c,bmi2,avxvnni"
#define BRECCIA_DPBUSD _mm256_dpbusd_avx_epi32

#include "backends/integer.cpp"
