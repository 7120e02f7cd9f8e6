// SPDX-License-Identifier: Apache-2.0
//
// Every include a backend needs, before its target region opens, and the two inlining spellings kernels use.
// Inlining is forced because vectors passed by value to a function that is not inlined would cross an ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "breccia/codecs/registry.hpp"
#include "breccia/dtype.hpp"
#include "runtime/kernel_table.hpp"

#define BRECCIA_INLINE [[gnu::always_inline]] static inline
#define BRECCIA_INLINE_MEMBER [[gnu::always_inline]] inline
#define BRECCIA_INLINE_LAMBDA __attribute__((always_inline))
