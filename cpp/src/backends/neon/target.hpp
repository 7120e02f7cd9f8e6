// SPDX-License-Identifier: Apache-2.0
//
// Every 64-bit Arm processor has NEON, so no target region opens but for products of integers: their instructions are
// optional before Armv8.4.
#pragma once

#include <arm_neon.h>

#define BRECCIA_INTEGER_ROWS "backends/neon/integer_rows.inl.hpp"
#define BRECCIA_INTEGER_PANELS "backends/neon/integer_panels.inl.hpp"
#define BRECCIA_INTEGER_TARGET "arch=armv8.2-a+dotprod"

#include "backends/begin.hpp"
