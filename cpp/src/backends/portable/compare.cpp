// SPDX-License-Identifier: Apache-2.0
#include "backends/portable/target.hpp"
#include "quantize/compare_kernels.hpp"

namespace breccia::inline v0_3::portable {
namespace {
using Doubles = double __attribute__((vector_size(16)));
BRECCIA_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
BRECCIA_INLINE Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }
#include "kernels/compare_kernels.inl.hpp"
}  // namespace

extern constinit const CompareKernels compare_kernels;
constinit const CompareKernels compare_kernels = make_compare_kernels();

}  // namespace breccia::inline v0_3::portable
