// SPDX-License-Identifier: Apache-2.0
//
// The search by importance.
#include "target.hpp"

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::BRECCIA_CPU {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "kernels/importance_kernels.inl.hpp"
// clang-format on
}  // namespace

extern constinit const ImportanceKernels importance_kernels;
constinit const ImportanceKernels importance_kernels = make_importance_kernels();

}  // namespace breccia::inline v0_4::BRECCIA_CPU
BRECCIA_CPU_END
