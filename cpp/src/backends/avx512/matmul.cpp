// SPDX-License-Identifier: Apache-2.0
#include "backends/avx512/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_3::avx512 {
namespace {
#include "backends/avx512/vocabulary.inl.hpp"
#include "kernels/matmul_kernels.inl.hpp"
}  // namespace

extern constinit const CodeKernelsF32 codes_f32_kernels;
extern constinit const MatmulKernels matmul_kernels;
constinit const MatmulKernels matmul_kernels = make_matmul_kernels(nullptr, &codes_f32_kernels);

}  // namespace breccia::inline v0_3::avx512
BRECCIA_TARGET_END
