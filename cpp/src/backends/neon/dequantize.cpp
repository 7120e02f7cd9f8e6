// SPDX-License-Identifier: Apache-2.0
#include "backends/neon/target.hpp"

namespace breccia::inline v0_3::neon {
namespace {
#include "backends/neon/vocabulary.inl.hpp"
#include "kernels/dequantize_kernels.inl.hpp"
}  // namespace

extern constinit const DequantizeKernels dequantize_kernels;
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();

}  // namespace breccia::inline v0_3::neon
