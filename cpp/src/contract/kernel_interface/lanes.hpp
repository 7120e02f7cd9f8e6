// SPDX-License-Identifier: Apache-2.0
//
// Sixteen weight rows at a time: across lanes, each of them a lane of a vector register, or in matrix tiles (AMX).
//
// A word is 32 bits of codes of one row: 4 elements, or 8 packed ones. A quad is four words: 16 elements, or 32 packed.
#pragma once

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// out(g, v, lane) = sum over k of w(16 g + lane, k) x(v, k) for up to 16 activations.
///     out(g, v, lane) = out[(g * vectors + v) * 16 + lane]
/// Byte i of a row of codes, where they are interleaved (rows are padded with zeros to whole quads):
///     codes[g * quads * 256 + i / 4 * 64 + lane * 4 + i % 4]
/// Scale of block b, of float32 or of one byte, `at` being the group's scales + g * group_scale_stride bytes:
///     float32: ((const float*)at)[b * 16 + lane]
///     byte:    at[b / 4 * 64 + lane * 4 + b % 4]
/// Activations, with `parts` = 2 where codes are bytes and 4 where they are packed, are in pairs: the pair of word j,
/// part p (0 … parts - 1) and activation v holds x(v, k) and x(v, k + parts), where k = j * 2 * parts + p, at
///     x[((j * parts + p) * vectors + v) * 2]
struct LaneProduct {
    const std::uint8_t* codes = nullptr;
    bool interleaved = false;                    ///< else rows in place:
    std::int64_t row_stride = 0, row_bytes = 0;  ///< the distance of rows in place, and the bytes of one
    std::int64_t rows = 0, quads = 0;
    /// A block has block_quads quads: at most 256 elements, so that few products are summed before they are scaled.
    /// Where it is 0, a block has 16 << block_shift elements: 16, 32 or 64.
    std::int64_t block_quads = 0;
    int block_shift = 0;
    const std::byte* scales = nullptr;  ///< of a byte: E4M3, neither negative nor NaN; or E8M0, neither 0 nor 255
    ScaleType scale_type = ScaleType::float32;
    std::int64_t scale_step = 1;  ///< scales from one block to the next: 0 where all of K shares one
    std::int64_t group_scale_stride = 0;
    /// Of unsigned 4-bit codes, or null: signed bytes from -8 to 15, which lie as scales of one byte do.
    const std::byte* zero_points = nullptr;
    std::int64_t group_zero_stride = 0;
    const float* x_scales = nullptr;  ///< x_scales[b * vectors + v], or null
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;  ///< 1, 2, 3, 4, 8 or 16
    float* out = nullptr;
};

/// Which elements make pair i:
///     bytes       2 pairs of 4 elements: pair 2 j + p     = 4 j + p, 4 j + p + 2                 (0 2, 1 3)
///     packed      4 pairs of 8:          pair 4 j + p     = 8 j + p, 8 j + p + 4                 (0 4, 1 5, 2 6, 3 7)
///     neighbours  in order:              pair i           = 2 i, 2 i + 1                         (0 1, 2 3 …)
///     runs        8 pairs of 16:         pair 8 j + 2 p + q = 16 j + 8 q + 2 p, and the next one (0 1, 8 9, 2 3 …)
enum class PairOrder : std::uint8_t { bytes, packed, neighbours, runs };

/// Packs activations for LaneProduct or TileRows: pair i of activation v goes to out[(i * vectors + v) * 2].
struct PackLanes {
    const float* x = nullptr;  ///< `rows` rows of k elements, padded with zeros to a multiple of 32
    std::int64_t x_stride = 0, rows = 0, k = 0;
    std::uint16_t* out = nullptr;
    std::int64_t vectors = 0;
    PairOrder order = PairOrder::bytes;
};

/// Weight rows in matrix tiles: 16 rows of codes in place by up to 16 activations, a step of 64 bytes at a time.
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
