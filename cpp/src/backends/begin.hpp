// SPDX-License-Identifier: Apache-2.0
//
// Every include a backend needs, before its target region opens, and the spellings of inlining that kernels use.
// Inlining is forced where a vector would be passed by value for a few instructions. What takes long to run is kept out
// of line, once for all its callers: compilers would copy it into every kernel, which is what a build takes its time
// for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "breccia/codecs/registry.hpp"
#include "breccia/dtype.hpp"
#include "contract/kernel_table.hpp"

#define BRECCIA_INLINE [[gnu::always_inline]] static inline
#define BRECCIA_INLINE_MEMBER [[gnu::always_inline]] inline
#define BRECCIA_INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define BRECCIA_OUT_OF_LINE [[gnu::noinline]] static
#else
#define BRECCIA_OUT_OF_LINE [[gnu::noinline, gnu::noclone]] static
#endif
