// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes in place by float32 activations.
#include "target.hpp"

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::BRECCIA_CPU {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "kernels/code_units.inl.hpp"
#ifdef BRECCIA_CODE_UNITS
#include BRECCIA_CODE_UNITS
#endif
#include "kernels/decode_f32.inl.hpp"
#include "kernels/in_place_f32.inl.hpp"
// clang-format on
}  // namespace

extern constinit const CodeKernelsF32 codes_f32_kernels;
constinit const CodeKernelsF32 codes_f32_kernels = code_kernels_f32(codes_f32_tile_rows);

}  // namespace breccia::inline v0_4::BRECCIA_CPU
BRECCIA_CPU_END
