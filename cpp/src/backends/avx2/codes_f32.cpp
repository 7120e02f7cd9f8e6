// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes in place by float32 activations, in AVX2.
#include "backends/avx2/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_4::avx2 {
namespace {
// clang-format off: sorting would break the order
#include "backends/avx2/vocabulary.inl.hpp"
#include "kernels/code_units.inl.hpp"
#include "backends/avx2/code_units.inl.hpp"
#include "kernels/decode_f32.inl.hpp"
#include "kernels/in_place_f32.inl.hpp"
// clang-format on
}  // namespace

extern constinit const CodeKernelsF32 codes_f32_kernels;
constinit const CodeKernelsF32 codes_f32_kernels = code_kernels_f32(12);

}  // namespace breccia::inline v0_4::avx2
BRECCIA_TARGET_END
