// SPDX-License-Identifier: Apache-2.0
//
// Products in matrix tiles, and of a few activations by E4M3. All other kernels are those of avx512_bf16.
#include "target.hpp"

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::amx {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "backends/avx512_bf16/decode.inl.hpp"
#include "backends/avx512_bf16/row_scales.inl.hpp"
#include "backends/avx512_bf16/gemv.inl.hpp"
#include "backends/amx/affine_gemv.inl.hpp"
#include "backends/amx/tiles.inl.hpp"
#include "backends/amx/gemm.inl.hpp"
#include "backends/amx/rows.inl.hpp"
// clang-format on
}  // namespace

extern constinit const IntegerPanels integer_tiles;  // of integer_tiles.cpp
extern constinit const ProductKernels matmul_kernels;
constinit const ProductKernels matmul_kernels{.gemm = gemm_amx,
                                              .first_level_cache = 48 * 1024,
                                              .tile_rows = 16,
                                              .panel = {.rows = 384, .activations = 512, .k = panel_k},
                                              .panel_of_terms = {.rows = 384, .activations = 512, .k = k_of_terms},
                                              .begin = configure_tiles,
                                              .end = release_tiles,
                                              .tiles = Codecs::map([]<Codec C>() -> void (*)(const TileRows&) {
                                                  if constexpr (has_bf16<C>) return multiply_rows_in_place<C>;
                                                  return nullptr;
                                              }),
                                              .gemv_e4m3 = gemv_e4m3,
                                              .integer_tiles = &integer_tiles};

}  // namespace breccia::inline v0_4::amx
BRECCIA_CPU_END
