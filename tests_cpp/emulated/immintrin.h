// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the compiler's header when BRECCIA_EMULATE_AVX512 is on: the avx512, avx512_bf16 and amx backends are
// then compiled to plain code and tested on any x86-64. SIMDe has most instructions; those it lacks, and those whose
// results it rounds or flushes otherwise than the processor, are here and in tiles.hpp.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#define SIMDE_NO_INLINE  // compilers take minutes for a kernel otherwise
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <simde/x86/gfni.h>

#include "avx512.hpp"
#include "tiles.hpp"
