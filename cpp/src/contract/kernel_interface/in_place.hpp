// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes that a kernel reads where they lie: a step of 64 bytes at a time, as bfloat16 or integers; or as
// float32.
#pragma once

#include <algorithm>
#include <array>

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// CodeRows::special describes this many rows in one byte. Ranges of rows begin at multiples of it.
inline constexpr std::int64_t special_rows = 4;

/// Weight rows and their scales in place.
///     code(n, k)  is the byte codes[n * row_stride + k], or, packed, a nibble of codes[n * row_stride + k / 2]
///     scale(n, b) is scale number b of row (first_row + n) / block_rows, rows scale_row_stride bytes apart
struct CodeRows {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    /// Elements that share a scale: a multiple of a step; or a divisor of a step, at least 16; or all of K.
    std::int64_t block = 0;
    std::int64_t first_row = 0, block_rows = 1;
    const std::byte* scales = nullptr;
    ScaleType scale_type = ScaleType::float32;
    std::int64_t scale_row_stride = 0;
    const std::uint8_t* zero_points = nullptr;  ///< one to a scale, only of 4-bit codes; or null
    std::int64_t zero_row_stride = 0;
    float* scale_scratch = nullptr;      ///< room for four rows of scales and, for IntegerGemv, eight numbers more
    std::int64_t first_level_cache = 0;  ///< bytes; decides whether the next rows are prefetched into it
    /// For prepared E4M3 weights, or null: bit n % special_rows of special[n / special_rows * spans + s] says whether a
    /// code of span s of row n is zero, subnormal or NaN. A span is row_span() elements; `spans` is their number.
    const std::uint8_t* special = nullptr;

    /// The row of the scales that a row of codes takes.
    [[nodiscard]] std::int64_t scale_row_of(std::int64_t row) const {
        // A division takes long. Unless this is likely, gcc makes one division of both.
        if (block_rows == 1) [[likely]]
            return first_row + row;
        return (first_row + row) / block_rows;
    }
};

/// Elements in a step of 64 bytes.
constexpr std::int64_t row_step(bool packed) { return packed ? 128 : 64; }

/// A span is what a kernel decodes before it looks for special codes: quickly, as if there were none, and again, by
/// tables, where there is one. It is a block; where a row has one scale, it is as long as blocks usually are, so that a
/// special code delays few others.
inline constexpr std::int64_t usual_span = 128;
constexpr std::int64_t row_span(std::int64_t block, std::int64_t k, bool packed) {
    return block >= k ? usual_span : std::max(block, row_step(packed));
}
/// Longer spans are likely to hold a special code.
inline constexpr std::int64_t longest_span_of_finite = 256;

/// out(n, v) = sum over k of w(n, k) x(v, k) for a few activations.
///     out(n, v) = out[n * vectors + v]
///     x(v, k)   = x[v * padded_k + k / step * step + place(k % step)], padded_k being K rounded up to whole steps
/// The place of an element within its step is the order in which a kernel decodes codes:
///     packed: place(k) = k % 4 * 32 + k / 4                         (elements 0, 4, 8 … then 1, 5, 9 …)
///     bytes:  place(k) = k / 8 % 2 * 32 + k / 16 * 8 + k % 8        (runs of 8: 0, 2, 4, 6 then 1, 3, 5, 7)
struct Gemv {
    CodeRows w;
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;
    float* out = nullptr;
};
using GemvKernel = void (*)(const Gemv&);
inline constexpr std::int64_t max_gemv_vectors = 8;

// ---- As float32: multiplied in registers by a few activations, or decoded for panels ----

/// out[n][v] = sum over k of w[n][k] x[v][k]. A row's codes are contiguous, packed if they have four bits.
struct InPlaceF32 {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    std::int64_t block = 0;         ///< elements to a scale: all of K, or 16, 32 or a multiple of 64
    const float* scales = nullptr;  ///< [row][block], rows scale_stride apart and longer by three
    std::int64_t scale_stride = 0;
    const float* zero_points = nullptr;      ///< as scales: integers of -8 ... 15, of 4-bit codes; or null
    const float* x = nullptr;                ///< as `arrange` leaves them, rows x_stride apart
    std::int64_t x_stride = 0, vectors = 0;  ///< 1 ... most_vectors
    float* out = nullptr;
};

/// An activation in the order and with the factor that the products of a format's codes want: see CodeUnit.
struct ArrangeF32 {
    const float* x = nullptr;
    std::int64_t k = 0;
    float* out = nullptr;  ///< zero-padded to a multiple of 64
};

/// Rows of codes to numbers, (code - zero point) * scale.
struct DecodeF32 {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    std::int64_t block = 0, skip = 0;  ///< as above; element k takes scale (skip + k) / block of its row
    const float* scales = nullptr;     ///< and zero points as above
    std::int64_t scale_stride = 0;
    const float* zero_points = nullptr;
    float* out = nullptr;  ///< rows out_stride apart, each with room for a multiple of 64
    std::int64_t out_stride = 0;
};

struct CodeKernelsF32 {
    static constexpr std::int64_t most_vectors = 4;  ///< that one pass over the codes meets

    std::array<void (*)(const ArrangeF32&), Codecs::size> arrange{};  ///< null of formats that no matrix has
    std::array<void (*)(const InPlaceF32&), Codecs::size> product{};
    std::array<void (*)(const DecodeF32&), Codecs::size> decode{};
    /// Of a panel that few activations meet, so many rows are decoded just before: they stay in the first-level cache.
    std::int64_t tile_rows = 0;
};

}  // namespace breccia::inline v0_4
