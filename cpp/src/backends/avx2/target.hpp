// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

#define BRECCIA_TARGET "avx2,fma,f16c,bmi2"
