// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 as every processor that has it offers it (F, BW, DQ, VL). Most have VNNI, too, which products of integers use
// 256 bits at a time, as a unit of the digits is.
#pragma once

#include <immintrin.h>

#define BRECCIA_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"
#define BRECCIA_CODE_UNITS "backends/avx2/code_units.inl.hpp"
#define BRECCIA_INTEGER_ROWS "backends/avx2/integer_rows.inl.hpp"
#define BRECCIA_INTEGER_PANELS "backends/avx512/integer_panels.inl.hpp"
#define BRECCIA_INTEGER_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2"
#define BRECCIA_DPBUSD _mm256_dpbusd_epi32

#include "backends/begin.hpp"
