// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 with byte permutations (VBMI), bfloat16 and integer (VNNI) dot products: Zen 4, Sapphire Rapids and later.
#pragma once

#include <immintrin.h>

#define BRECCIA_VBMI
#define BRECCIA_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma,f16c,bmi2"

#include "backends/begin.hpp"
