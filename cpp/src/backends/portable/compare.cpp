// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"
#include "quantize/compare_kernels.hpp"

namespace breccia::inline v0_3::portable {
namespace {
inline constexpr int vector_bytes = 16;
#include "kernels/compare_kernels.inl.hpp"
}  // namespace

extern constinit const CompareKernels compare_kernels;
constinit const CompareKernels compare_kernels = make_compare_kernels();

}  // namespace breccia::inline v0_3::portable
