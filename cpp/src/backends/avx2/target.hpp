// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#define BRECCIA_TARGET "avx2,fma,f16c,bmi2"
#define BRECCIA_CODE_UNITS "backends/avx2/code_units.inl.hpp"
#define BRECCIA_INTEGER_ROWS "backends/avx2/integer_rows.inl.hpp"
#define BRECCIA_INTEGER_PANELS "backends/avx2/integer_panels.inl.hpp"
#ifndef BRECCIA_INTEGER_TARGET
#define BRECCIA_INTEGER_TARGET BRECCIA_TARGET
#endif

#include "backends/begin.hpp"
