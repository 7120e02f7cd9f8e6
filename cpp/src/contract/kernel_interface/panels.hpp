// SPDX-License-Identifier: Apache-2.0
//
// Panels: a block of weight rows is decoded once into a buffer that stays in the second-level cache, and all
// activations are multiplied by it.
//
// Indices in this folder: n is a weight row; m or v is an activation (v where it may also be one bfloat16 term of an
// activation); k is an element along the reduction; b is a block of elements that share a scale.
#pragma once

#include <array>

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// Elements of K that a panel holds at most.
inline constexpr std::int64_t panel_k = 256;
/// Elements from one row of a decoded panel to the next. Not a power of two, or its rows would share few cache sets.
inline constexpr std::int64_t panel_stride_f32 = 272, panel_stride_bf16 = 288;
/// The rows of a decoded panel are rounded up to a multiple of this. The extra rows hold arbitrary numbers.
inline constexpr std::int64_t row_multiple = 96;
/// Activations in a full panel of activations. The last panel may have 16.
inline constexpr std::int64_t panel_width = 32;

/// c(n, m) += sum over k of w(n, k) x(k, m), in float32.
///     w(n, k) = w[n * panel_stride_f32 + k]
///     x(k, m) = x[k * width + m]
///     c(n, m) = c[n * width + m]
struct GemmF32 {
    const float* w = nullptr;
    const float* x = nullptr;
    float* c = nullptr;
    std::int64_t rows = 0, width = 0, k = 0;
};

/// c(p, n, m) += sum over b of w_scale(b, n) x_scale(p, b, m) * (sum over t and the k of b of w(n, k) x(t, p, k, m)),
/// where p is a panel of activations and an activation is the sum of its bfloat16 terms t. Blocks b are block_pairs
/// pairs of k long.
///     w(n, k)          = w[n * panel_stride_bf16 + k]
///     x(t, p, k, m)    = x[t * term_stride + p * x_panel_stride + (k / 2 * width + m) * 2 + k % 2]
///     c(p, n, m)       = c[p * c_panel_stride + n * width + m]
///     w_scale(b, n)    = w_scales[b * w_scale_stride + n]
///     x_scale(p, b, m) = x_scales[p * x_scale_panel_stride + b * width + m], or 1 where x_scales is null
struct GemmBF16 {
    const std::uint16_t* w = nullptr;
    const std::uint16_t* x = nullptr;
    float* c = nullptr;
    std::int64_t rows = 0, width = 0;
    std::int64_t pairs = 0, block_pairs = 0;  ///< half of K, half of a block: multiples of 16
    std::int64_t panels = 1, x_panel_stride = 0, c_panel_stride = 0;
    std::int64_t terms = 1, term_stride = 0;  ///< the largest term is the first
    const float* w_scales = nullptr;
    std::int64_t w_scale_stride = 0;
    const float* x_scales = nullptr;
    std::int64_t x_scale_panel_stride = 0;
    /// The codes of the next panel, which the kernel prefetches into the second-level cache, or null: next_rows rows of
    /// next_bytes bytes, next_stride apart. Hardware does not prefetch rows that are so short and so far apart.
    const std::uint8_t* next = nullptr;
    std::int64_t next_stride = 0, next_rows = 0, next_bytes = 0;
    /// The activations that the next panel is multiplied by, which are prefetched too.
    const std::uint16_t* next_x = nullptr;
    std::int64_t next_x_bytes = 0;
};

/// Packs 16 activations into the x of GemmF32 or GemmBF16; `out` is where the first of them goes. For GemmBF16 K is
/// padded with zeros to a multiple of 32.
struct PackRows {
    const float* x = nullptr;
    std::int64_t x_stride = 0, k = 0;
    void* out = nullptr;
    std::int64_t width = 0;
    /// bfloat16 only. Term t is the activation minus the terms before it, rounded to bfloat16.
    std::int64_t terms = 1, term_stride = 0;
};

/// Packs 16 activations that are bfloat16 numbers already into the x of GemmBF16, padded alike.
struct PackWords {
    std::array<const std::byte*, 16> rows{};  ///< a null row is all zeros
    std::int64_t k = 0;
    std::uint16_t* out = nullptr;
    std::int64_t width = 0;
};

/// Decodes rows of codes to bfloat16, into the w of GemmBF16. Rows are padded with zeros to a multiple of 64 elements.
struct DecodeBF16 {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    std::uint16_t* out = nullptr;
    /// Element k takes scale and zero point number (skip + k) >> block_shift of its row.
    int block_shift = 0;
    std::int64_t skip = 0;
    /// Codes of scales that the decoded numbers are multiplied by, or null. Every product must be a bfloat16 number:
    /// scales are E8M0 from 2^-60 to 2^60; or E4M3, where the codes are E2M1.
    const std::uint8_t* scales = nullptr;
    ScaleType scale_type = ScaleType::e8m0;
    std::int64_t scale_stride = 0;
    const std::uint8_t* zero_points = nullptr;  ///< only of 4-bit codes: signed bytes from -8 to 15; or null
    std::int64_t zero_stride = 0;
};

/// The largest part of a product that a panel kernel works on at a time: 32 activations of it, with the terms that are
/// read together, stay in the first-level cache, its weights and sums in the second-level cache.
struct PanelShape {
    std::int64_t rows = 0;         ///< of the weight
    std::int64_t activations = 0;  ///< rows of activations
    std::int64_t k = 0;            ///< panel_k or half of it
};

}  // namespace breccia::inline v0_4
