// SPDX-License-Identifier: Apache-2.0
//
// Every 64-bit Arm processor has NEON, so no target region opens.
#include <arm_neon.h>

#include "backends/begin.hpp"

namespace breccia::neon {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/neon/vec.hpp"
#include "kernels/transpose.inl.hpp"
#include "kernels/all.inl.hpp"
// clang-format on
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("neon");

}  // namespace breccia::neon
