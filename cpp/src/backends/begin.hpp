// SPDX-License-Identifier: Apache-2.0
//
// Every include a backend needs, before its target region opens, and the spellings of inlining that kernels use.
// Inlining is forced where a vector would be passed by value for a few instructions. What takes long to run is kept out
// of line, once for all its callers: compilers would copy it into every kernel, which is what a build takes its time
// for. With a sanitizer's checks that time is thrice as long, and nothing is forced (BRECCIA_SANITIZED, of CMake).
//
// A target region: the functions between BEGIN and END may use the named instruction set extensions, whatever flags
// the file is compiled with. Nothing may be included inside but kernels (.inl.hpp, vec.hpp): code of the standard
// library compiled here could be the copy the linker keeps for every other file. Emulated backends have no extensions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "breccia/codecs/registry.hpp"
#include "breccia/dtype.hpp"
#include "contract/kernel_table.hpp"

#if defined(BRECCIA_SANITIZED)
#define BRECCIA_INLINE static inline
#define BRECCIA_INLINE_MEMBER inline
#else
#define BRECCIA_INLINE [[gnu::always_inline]] static inline
#define BRECCIA_INLINE_MEMBER [[gnu::always_inline]] inline
#endif
#define BRECCIA_INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define BRECCIA_OUT_OF_LINE [[gnu::noinline]] static
#else
#define BRECCIA_OUT_OF_LINE [[gnu::noinline, gnu::noclone]] static
#endif

#define BRECCIA_TEXT(name) #name
#define BRECCIA_NAME_OF(cpu) BRECCIA_TEXT(cpu)
#define BRECCIA_CPU_NAME BRECCIA_NAME_OF(BRECCIA_CPU)

#define BRECCIA_PRAGMA(text) _Pragma(#text)
#if defined(BRECCIA_EMULATED_BACKEND)
#define BRECCIA_TARGET_BEGIN(isa)
#define BRECCIA_TARGET_END
#elif defined(__clang__)
// An unknown extension would make clang ignore the whole attribute; CMake turns that warning into an error.
#define BRECCIA_TARGET_BEGIN(isa) \
    BRECCIA_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define BRECCIA_TARGET_END BRECCIA_PRAGMA(clang attribute pop)
#elif defined(__GNUC__)
#define BRECCIA_TARGET_BEGIN(isa) BRECCIA_PRAGMA(GCC push_options) BRECCIA_PRAGMA(GCC target(isa))
#define BRECCIA_TARGET_END BRECCIA_PRAGMA(GCC pop_options)
#else
#error "breccia needs gcc or clang (on Windows clang-cl): its kernels are written with their vector types"
#endif

// The region of the CPU's target.hpp, which is the baseline of the processor's family where it names no extensions.
#if defined(BRECCIA_TARGET)
#define BRECCIA_CPU_BEGIN BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
#define BRECCIA_CPU_END BRECCIA_TARGET_END
#else
#define BRECCIA_CPU_BEGIN
#define BRECCIA_CPU_END
#endif
