// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes in place by float32 activations, in NEON.
#include "backends/neon/target.hpp"

namespace breccia::inline v0_4::neon {
namespace {
// clang-format off: sorting would break the order
#include "backends/neon/vocabulary.inl.hpp"
#include "kernels/code_units.inl.hpp"
#include "kernels/decode_f32.inl.hpp"
#include "kernels/in_place_f32.inl.hpp"
// clang-format on
}  // namespace

extern constinit const CodeKernelsF32 codes_f32_kernels;
constinit const CodeKernelsF32 codes_f32_kernels = code_kernels_f32(24);

}  // namespace breccia::inline v0_4::neon
