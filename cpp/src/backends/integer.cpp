// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes in place by an activation as integers, and codes by many activations that are INT8 codes, with
// instructions for integers (BRECCIA_INTEGER_TARGET).
#include "target.hpp"

#ifndef BRECCIA_INTEGER_TABLE
#define BRECCIA_INTEGER_TABLE integer_kernels
#endif

BRECCIA_TARGET_BEGIN(BRECCIA_INTEGER_TARGET)
namespace breccia::inline v0_4::BRECCIA_CPU {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include BRECCIA_INTEGER_ROWS
#include "kernels/digits_of_codes.inl.hpp"
#include BRECCIA_INTEGER_PANELS
#include "kernels/integer_packing.inl.hpp"
#include "kernels/integer_panels.inl.hpp"
#include "kernels/integer_rows.inl.hpp"
// clang-format on
}  // namespace

extern constinit const IntegerKernels BRECCIA_INTEGER_TABLE;
constinit const IntegerKernels BRECCIA_INTEGER_TABLE = make_integer_kernels();

}  // namespace breccia::inline v0_4::BRECCIA_CPU
BRECCIA_TARGET_END
