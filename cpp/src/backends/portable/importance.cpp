// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"

namespace breccia::inline v0_4::portable {
namespace {
#include "backends/portable/vocabulary.inl.hpp"
#include "kernels/importance_kernels.inl.hpp"
}  // namespace

extern constinit const ImportanceKernels importance_kernels;
constinit const ImportanceKernels importance_kernels = make_importance_kernels();

}  // namespace breccia::inline v0_4::portable
