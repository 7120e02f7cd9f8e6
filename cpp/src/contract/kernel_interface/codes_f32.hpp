// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes, as they lie, to float32: multiplied in registers by a few activations, or decoded for panels.
#pragma once

#include <array>
#include <cstdint>

#include "breccia/codecs/registry.hpp"

namespace breccia::inline v0_4 {

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
