// SPDX-License-Identifier: Apache-2.0
#include "backends/avx512_bf16/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_4::avx512_bf16 {
namespace {
#include "backends/avx512_bf16/vocabulary.inl.hpp"
#include "kernels/importance_kernels.inl.hpp"
}  // namespace

extern constinit const ImportanceKernels importance_kernels;
constinit const ImportanceKernels importance_kernels = make_importance_kernels();

}  // namespace breccia::inline v0_4::avx512_bf16
BRECCIA_TARGET_END
