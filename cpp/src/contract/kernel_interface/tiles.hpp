// SPDX-License-Identifier: Apache-2.0
//
// Weight rows in matrix tiles (AMX): 16 rows of codes in place by up to 16 activations, a step of 64 bytes at a time.
#pragma once

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// out(n, v) = sum over k of w(n, k) x(v, k).
///     out(n, v)   = out[n * 16 + v], room for a multiple of 16 rows
///     scale(n, i) = scales[n * scale_stride + i], room for a multiple of 16 rows
///     x           = pairs as PackLanes has them, padded with zeros to whole steps; their order is `packed` where codes
///                   are packed, `neighbours` with tile_scales, else `runs`
/// Scales apply in one of three ways:
///     to sums of blocks: a block is block_steps steps, and blocks_per_scale blocks take the same scale
///     to tiles, of byte codes, where tile_scales: a block is one step, and each half of it (32 elements) has a scale
///     to packed codes, where code_block_shift > 0: 1 << code_block_shift elements (16, 32 or 64) share a scale. It is
///         E8M0 from 2^-60 to 2^60; or, of E2M1 codes, E4M3 that is neither negative nor NaN, and then results come out
///         multiplied by 2^-112
struct TileRows {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, row_bytes = 0, rows = 0;
    const float* scales = nullptr;
    std::int64_t scale_stride = 0, scales_of_row = 0;
    std::int64_t block_steps = 1, blocks_per_scale = 1;
    bool tile_scales = false;
    int code_block_shift = 0;
    /// Codes of scales, in place of `scales`, or null: of scales that apply to codes, and of E8M0 that apply to tiles.
    const std::uint8_t* scale_codes = nullptr;
    std::int64_t scale_code_stride = 0;
    ScaleType scale_type = ScaleType::float32;
    /// Of unsigned 4-bit codes whose blocks are whole steps, or null: signed bytes from -8 to 15. That of row n and
    /// scale i is zero_points[n / 16 * 16 * scale_stride + i * 16 + n % 16].
    const std::uint8_t* zero_points = nullptr;
    const float* x_scales = nullptr;  ///< of block b and activation v: x_scales[b * 16 + v]; or null
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;
    float* out = nullptr;
};

}  // namespace breccia::inline v0_4
