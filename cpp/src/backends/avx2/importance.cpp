// SPDX-License-Identifier: Apache-2.0
#include "backends/avx2/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_4::avx2 {
namespace {
#include "backends/avx2/vocabulary.inl.hpp"
#include "kernels/importance_kernels.inl.hpp"
}  // namespace

extern constinit const ImportanceKernels importance_kernels;
constinit const ImportanceKernels importance_kernels = make_importance_kernels();

}  // namespace breccia::inline v0_4::avx2
BRECCIA_TARGET_END
