// SPDX-License-Identifier: Apache-2.0
//
// Rows of 4-bit codes in place by an activation as integers, in NEON with dot products (Armv8.2, optional before 8.4).
#include <arm_neon.h>

#include "backends/begin.hpp"
#include "backends/region.hpp"

BRECCIA_TARGET_BEGIN("arch=armv8.2-a+dotprod")
namespace breccia::inline v0_4::neon {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/neon/vec.hpp"
#include "kernels/digit_unit.inl.hpp"
#include "backends/neon/integer_rows.inl.hpp"
#include "kernels/integer_rows.inl.hpp"
// clang-format on
}  // namespace

extern constinit const IntegerKernels integer_kernels;
constinit const IntegerKernels integer_kernels = make_integer_kernels();

}  // namespace breccia::inline v0_4::neon
BRECCIA_TARGET_END
