// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 as every processor that has it offers it (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"
