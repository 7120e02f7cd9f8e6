// SPDX-License-Identifier: Apache-2.0
#include "backends/avx2/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_3::avx2 {
namespace {
#include "backends/avx2/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
}  // namespace

extern constinit const QuantizeKernels quantize_kernels;
constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();

}  // namespace breccia::inline v0_3::avx2
BRECCIA_TARGET_END
