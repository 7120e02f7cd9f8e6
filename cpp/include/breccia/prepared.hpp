// SPDX-License-Identifier: Apache-2.0
//
// A weight laid out once for the many products it will take part in.
#pragma once

#include "breccia/scaled_tensor.hpp"

namespace breccia::inline v0_4 {

/// Immutable; the weight, and beside it its codes and scales in the order in which the kernels for few activations read
/// them: 16 rows side by side, as many bytes as the weight has (rows padded to 16, K to 32). Where this machine or the
/// recipe has no such kernel: codes packed and contiguous along the axis they are scaled along, rows and scales on
/// cache lines, scales that are not codes in float32; a weight that is in that form already is shared, not copied.
///
/// It takes the place of a ScaledTensor as an operand. tensor() has the values and, where no copy was needed to order
/// them, the very arrays it was made from.
class BRECCIA_API PreparedWeight {
public:
    /// Throws Error where the weight is not in memory the core can read.
    explicit PreparedWeight(const ScaledTensor& weight);

    /// The weight, with its shape and its bytes.
    /// @{
    [[nodiscard]] const ScaledTensor& tensor() const { return tensor_; }
    [[nodiscard]] const Shape& shape() const { return tensor_.shape(); }
    [[nodiscard]] std::int64_t nbytes() const { return tensor_.nbytes(); }
    /// @}
    /// Bytes that products with few activations read instead; 0 where these read tensor().
    [[nodiscard]] std::int64_t packed_nbytes() const { return tensor_.packed_nbytes(); }
    /// The last two axes swapped; shares all memory.
    [[nodiscard]] PreparedWeight transposed() const;

private:
    struct Ready {};
    PreparedWeight(Ready, ScaledTensor tensor) : tensor_(std::move(tensor)) {}
    ScaledTensor tensor_;
};

}  // namespace breccia::inline v0_4
