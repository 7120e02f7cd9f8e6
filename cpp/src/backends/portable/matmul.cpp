// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"

namespace breccia::inline v0_3::portable {
namespace {
#include "backends/portable/vocabulary.inl.hpp"
#include "kernels/matmul_kernels.inl.hpp"
}  // namespace

extern constinit const MatmulKernels matmul_kernels;
constinit const MatmulKernels matmul_kernels = make_matmul_kernels();

}  // namespace breccia::inline v0_3::portable
