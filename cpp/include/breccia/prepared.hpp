// SPDX-License-Identifier: Apache-2.0
//
// A weight laid out once for the many products it will take part in.
#pragma once

#include "breccia/scaled_tensor.hpp"

namespace breccia {

/// Immutable; the same values in the form the matmul kernels read in place: codes packed and contiguous along the axis
/// they are scaled along, rows and scales on cache lines, scales that are not codes in float32. It takes the place of a
/// ScaledTensor as an operand. A weight that is in that form already is shared, not copied.
class PreparedWeight {
public:
    explicit PreparedWeight(const ScaledTensor& weight);

    [[nodiscard]] const ScaledTensor& tensor() const { return tensor_; }
    [[nodiscard]] const Shape& shape() const { return tensor_.shape(); }
    [[nodiscard]] std::int64_t nbytes() const { return tensor_.nbytes(); }
    /// The last two axes swapped; shares all memory.
    [[nodiscard]] PreparedWeight transposed() const;

private:
    struct Ready {};
    PreparedWeight(Ready, ScaledTensor tensor) : tensor_(std::move(tensor)) {}
    ScaledTensor tensor_;
};

}  // namespace breccia
