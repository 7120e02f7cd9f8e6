// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"

namespace breccia::inline v0_3::portable {
namespace {
#include "backends/portable/vocabulary.inl.hpp"
#include "kernels/dequantize_kernels.inl.hpp"
}  // namespace

extern constinit const DequantizeKernels dequantize_kernels;
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();

}  // namespace breccia::inline v0_3::portable
