// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"

namespace breccia::inline v0_3::portable {
namespace {
#include "backends/portable/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
}  // namespace

extern constinit const QuantizeKernels quantize_kernels;
constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();

}  // namespace breccia::inline v0_3::portable
