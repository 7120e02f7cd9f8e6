// SPDX-License-Identifier: Apache-2.0
#include "backends/neon/target.hpp"

namespace breccia::inline v0_3::neon {
namespace {
#include "backends/neon/vocabulary.inl.hpp"
#include "kernels/matmul_kernels.inl.hpp"
}  // namespace

extern constinit const CodeKernelsF32 codes_f32_kernels;
extern constinit const MatmulKernels matmul_kernels;
constinit const MatmulKernels matmul_kernels = make_matmul_kernels(nullptr, &codes_f32_kernels);

}  // namespace breccia::inline v0_3::neon
