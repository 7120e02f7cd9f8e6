// SPDX-License-Identifier: Apache-2.0
#include "backends/neon/target.hpp"

namespace breccia::inline v0_3::neon {
namespace {
#include "backends/neon/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
}  // namespace

extern constinit const QuantizeKernels quantize_kernels;
constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();

}  // namespace breccia::inline v0_3::neon
