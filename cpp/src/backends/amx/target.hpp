// SPDX-License-Identifier: Apache-2.0
//
// Sapphire Rapids and later.
#pragma once

#include <immintrin.h>

#define BRECCIA_VBMI
#define BRECCIA_TARGET \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512fp16,gfni,avx2,fma,f16c,bmi2,amx-tile,amx-bf16"

#include "backends/begin.hpp"
