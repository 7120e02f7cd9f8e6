// SPDX-License-Identifier: Apache-2.0
//
// The verbs. Each comes in two forms: one that allocates its result and one that writes into memory of the caller's.
#pragma once

#include "breccia/scaled_tensor.hpp"

namespace breccia {

/// Shapes and types of what casting a tensor produces, for callers that allocate.
struct CastPlan {
    Shape data_shape;
    ElementType data_type;
    Shape scale_shape;
    ElementType scale_type;
    bool has_zero_point = false;
    ElementType zero_point_type;
    Shape global_scale_shape;
    bool has_global_scale = false;
};

/// Throws Error when `recipe` cannot quantize a tensor of that shape.
CastPlan plan_cast(const Shape& shape, const Recipe& recipe);

/// C-contiguous destinations with the plan's shapes and types.
struct CastOutput {
    Array data, scale;
    std::optional<Array> zero_point, global_scale;
};
CastOutput allocate(const CastPlan& plan);

/// Quantizes x, of any strides, in float32: float64 is rounded to float32 first, float16 and bfloat16 are exact.
void cast_into(const Array& x, const Recipe& recipe, const CastOutput& out);
ScaledTensor cast(const Array& x, const Recipe& recipe);

/// (decode(data) - zero_point) * scale in float32, where scale includes the global scale, rounded once more to the
/// type of `out` (nearest even). `out` has the logical shape, any strides, and must not overlap the operand.
void dequantize_into(const ScaledTensor& scaled, const Array& out);
Array dequantize(const ScaledTensor& scaled, DType dtype = DType::float32);

/// Converts to another recipe, a block row at a time: no float copy of the whole tensor is made. Each target block
/// keeps a scale that loses nothing when there is one; otherwise the bytes equal cast(dequantize(scaled), recipe).
void requantize_into(const ScaledTensor& scaled, const Recipe& recipe, const CastOutput& out);
ScaledTensor requantize(const ScaledTensor& scaled, const Recipe& recipe);

/// One side of a product: a ScaledTensor or an array of numbers. Borrows.
class Operand {
public:
    Operand(const ScaledTensor& scaled) : scaled_(&scaled) {}
    Operand(const Array& array) : array_(&array) {}
    [[nodiscard]] const ScaledTensor* scaled() const { return scaled_; }
    [[nodiscard]] const Array* array() const { return array_; }
    [[nodiscard]] const Shape& shape() const { return scaled_ != nullptr ? scaled_->shape() : array_->shape; }

private:
    const ScaledTensor* scaled_ = nullptr;
    const Array* array_ = nullptr;
};

/// Shape of a @ b with NumPy's broadcasting of the leading axes. Throws Error on a mismatch.
Shape matmul_shape(const Shape& a, const Shape& b);

/// a (..., M, K) @ b (..., K, N). Operands are dequantized block by block to float32, products accumulate in float32.
/// Error bound, u = 2^-24, against the exact product of the dequantized operands:
/// |error| <= (K / 16 + 2 K / 512 + 8) u * sum |a||b|, plus the rounding of the output type.
void matmul_into(const Operand& a, const Operand& b, const Array& out);
Array matmul(const Operand& a, const Operand& b, DType out_dtype = DType::float32);

}  // namespace breccia
