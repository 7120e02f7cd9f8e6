// SPDX-License-Identifier: Apache-2.0
#include "backends/neon/target.hpp"
#include "quantize/compare_kernels.hpp"

namespace breccia::inline v0_3::neon {
namespace {
using Doubles = float64x2_t;
BRECCIA_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
BRECCIA_INLINE Doubles larger(Doubles a, Doubles b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
#include "kernels/compare_kernels.inl.hpp"
}  // namespace

extern constinit const CompareKernels compare_kernels;
constinit const CompareKernels compare_kernels = make_compare_kernels();

}  // namespace breccia::inline v0_3::neon
