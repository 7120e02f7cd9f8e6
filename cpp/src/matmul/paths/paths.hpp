// SPDX-License-Identifier: Apache-2.0
//
// The ways to multiply. Each is in the file of its name, and cpu_info()["kernels"] and docs/kernels.md call it so.
// A path returns false, and has written nothing, where it does not suit the machine, the formats, the layout in memory
// or the range of the activations.
#pragma once

#include "matmul/product.hpp"

namespace breccia::inline v0_4::paths {

/// One or two activations by codes that are small integers, read in place: integer dot products.
bool in_place_integer(const Product& product, const ScaledMatrix& w);

/// Up to 16 activations by rows of codes in place: matrix tiles.
bool tiles(const Product& product, const ScaledMatrix& w);

/// Up to 48 activations by 16 weight rows at a time, one in each lane: bfloat16 dot products.
bool lanes(const Product& product, const ScaledMatrix& w);

/// Up to 16 activations by rows of codes read in place: bfloat16 dot products.
bool in_place_bf16(const Product& product, const ScaledMatrix& w);

/// Up to eight activations by rows of codes read in place: float32. For processors without bfloat16 dot products.
bool in_place_f32(const Product& product, const ScaledMatrix& w);

/// Up to three activations by weight rows dequantized to float32, one at a time.
bool rows_f32(const Product& product, const Rows& w);

/// Any number of activations by panels of codes decoded to bfloat16; scales multiply sums of blocks.
bool panels_bf16(const Product& product, const ScaledMatrix& w);

/// Any operands: panels dequantized to float32.
void panels_f32(const Product& product, const Rows& w);

}  // namespace breccia::inline v0_4::paths
