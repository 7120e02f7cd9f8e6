// SPDX-License-Identifier: Apache-2.0
//
// The verbs. Each comes in two forms: one that allocates its result and one that writes into memory of the caller's.
#pragma once

#include "breccia/prepared.hpp"
#include "breccia/scaled_tensor.hpp"

namespace breccia::inline v0_4 {

/// Shapes and types of what casting a tensor produces, for callers that allocate.
struct CastPlan {
    Shape data_shape;               ///< of the codes; along the last axis half the elements where two share a byte
    ElementType data_type;          ///< bytes
    Shape scale_shape;              ///< of the scales and of the zero points
    ElementType scale_type;         ///< numbers, or the bytes of codes
    bool has_zero_point = false;    ///< whether the recipe has one, or exponents in its place
    ElementType zero_point_type;    ///< signed or unsigned bytes; float16 of exponents
    Shape global_scale_shape;       ///< (), or one for each matrix of a batch; float32
    bool has_global_scale = false;  ///< whether the recipe has one
};

/// Throws Error when `recipe` cannot quantize a tensor of that shape.
BRECCIA_API CastPlan plan_cast(const Shape& shape, const Recipe& recipe);

/// C-contiguous destinations with the plan's shapes and types.
struct CastOutput {
    Array data;                         ///< codes
    Array scale;                        ///< scales of blocks
    std::optional<Array> zero_point;    ///< where the plan has one
    std::optional<Array> global_scale;  ///< where the plan has one
};
/// The parts of the plan, with memory of their own.
BRECCIA_API CastOutput allocate(const CastPlan& plan);

/// How a cast departs from its recipe.
struct CastOptions {
    std::optional<std::uint64_t> seed;  ///< round stochastically, with draws from this seed and elements' positions
    std::int64_t hadamard_block = 0;    ///< transform runs of so many elements of a row first; a power of two, or 0
    std::uint64_t hadamard_seed = 0;    ///< of the transform's signs
    std::optional<float> factor;        ///< one scale per tensor, from elsewhere: codes of x * factor
    bool square_blocks = false;         ///< n x n elements share the scale that each of their rows stores
    /// For a part of a larger tensor whose scale follows from all of it: the whole's largest finite magnitude, for
    /// recipes of one scale per tensor or of two levels; for recipes of one scale per row, cut along rows, that of each
    /// row, and NaN where the whole row holds a NaN that the element format has not. Empty: measured.
    std::vector<float> amax;
    std::int64_t offset = 0;      ///< place of the first element in the larger tensor: stochastic rounding draws on it
    std::int64_t row_length = 0;  ///< of the larger tensor's rows; 0: those of x
    /// What errors of each column count, numbers of shape (K,) or (…, K) with the batch of x: scales are those of least
    /// weighted squared error, whatever search the recipe names. What is zero or no finite number takes the mean of its
    /// column over the batch, else of all.
    std::optional<Array> importance;
};

/// Quantizes x, of any strides, in float32: float64 is rounded to float32 first, float16 and bfloat16 are exact. Throws
/// Error, and has written nothing, unless `out` has the parts of plan_cast() in memory that can be written and that
/// neither x nor another part lies in.
BRECCIA_API void cast_into(const Array& x, const Recipe& recipe, const CastOutput& out,
                           const CastOptions& options = {});
/// The same into memory of its own.
BRECCIA_API ScaledTensor cast(const Array& x, const Recipe& recipe, const CastOptions& options = {});

/// (decode(data) - zero_point) * scale in float32, where scale includes the global scale, rounded once more to the
/// type of `out` (nearest even); of groups with exponents see recipes::expanded. `out` has the logical shape, any
/// strides, and must not overlap the operand.
BRECCIA_API void dequantize_into(const ScaledTensor& scaled, const Array& out);
/// The same into a C-contiguous array of its own.
BRECCIA_API Array dequantize(const ScaledTensor& scaled, DType dtype = DType::float32);

/// Converts to another recipe, a block row at a time: no float copy of the whole tensor is made. A target block gets a
/// scale that loses nothing where one is found (docs/numerics.md says which are tried); otherwise the bytes equal
/// cast(dequantize(scaled), recipe). To the tensor's own recipe and layout its parts are copied.
BRECCIA_API void requantize_into(const ScaledTensor& scaled, const Recipe& recipe, const CastOutput& out);
/// The same into memory of its own.
BRECCIA_API ScaledTensor requantize(const ScaledTensor& scaled, const Recipe& recipe);

/// One side of a product: a ScaledTensor, a prepared one or an array of numbers. Borrows: what it is made from must
/// outlive it.
class Operand {
public:
    /// What stands on that side.
    /// @{
    Operand(const ScaledTensor& scaled) : scaled_(&scaled) {}
    Operand(const PreparedWeight& weight) : scaled_(&weight.tensor()) {}
    Operand(const Array& array) : array_(&array) {}
    /// @}
    /// What it is: one of the two, the other null; and its logical shape.
    /// @{
    [[nodiscard]] const ScaledTensor* scaled() const { return scaled_; }
    [[nodiscard]] const Array* array() const { return array_; }
    [[nodiscard]] const Shape& shape() const { return scaled_ != nullptr ? scaled_->shape() : array_->shape; }
    /// @}

private:
    const ScaledTensor* scaled_ = nullptr;
    const Array* array_ = nullptr;
};

/// Shape of a @ b with NumPy's broadcasting of the leading axes. Throws Error on a mismatch.
BRECCIA_API Shape matmul_shape(const Shape& a, const Shape& b);

/// How activations enter a product.
enum class Precision : std::uint8_t {
    exact,  ///< as they are: products are exact or those of float32
    fast    ///< rounded to bfloat16 where that is quicker: an error of up to 2^-8 |a||b| per product
};

/// a (..., M, K) @ b (..., K, N). Codes and their scales are never rounded to a narrower type; sums are float32.
/// Error bound of Precision::exact, u = 2^-24, against the exact product of the dequantized operands:
/// |error| <= (min(K, 256) + K / 8 + 8) u * sum |a||b|, plus the rounding of the output type, and K * 2^-126: bfloat16
/// instructions have no subnormals. The result does not depend on the number of threads.
BRECCIA_API void matmul_into(const Operand& a, const Operand& b, const Array& out,
                             Precision precision = Precision::exact);
/// The same into a C-contiguous array of its own.
BRECCIA_API Array matmul(const Operand& a, const Operand& b, DType out_dtype = DType::float32,
                         Precision precision = Precision::exact);

/// x (..., K) @ transpose of w (N, K), plus `bias` (N,) where it is not null: the layer of a network whose weight is
/// stored as checkpoints do. The sum with the bias is rounded once to float32 (float64 where `out` is) and then to the
/// type of `out`. Of x and w at least two axes; `out` (..., N) must not overlap what is read.
BRECCIA_API void linear_into(const Operand& x, const Operand& w, const Array* bias, const Array& out,
                             Precision precision = Precision::exact);
/// The same into a C-contiguous array of its own.
BRECCIA_API Array linear(const Operand& x, const Operand& w, const Array* bias = nullptr,
                         DType out_dtype = DType::float32, Precision precision = Precision::exact);

/// Rows offsets[e] to offsets[e + 1] of x (T, K) @ transpose of w_stack (E, N, K)[e]: the layer of a mixture of
/// experts, whose rows are sorted by expert. `offsets` has E + 1 numbers that do not fall, from 0 to at most T; rows of
/// `out` (T, N) past the last are zero. A ScaledTensor `x` must be scaled along its rows, each by itself. Bytes and
/// errors of each row are those of matmul; `out` must not overlap what is read.
BRECCIA_API void grouped_matmul_into(const Operand& x, const ScaledTensor& w_stack,
                                     std::span<const std::int64_t> offsets, const Array& out,
                                     Precision precision = Precision::exact);
/// The same into a C-contiguous array of its own.
BRECCIA_API Array grouped_matmul(const Operand& x, const ScaledTensor& w_stack, std::span<const std::int64_t> offsets,
                                 DType out_dtype = DType::float32, Precision precision = Precision::exact);

}  // namespace breccia::inline v0_4
