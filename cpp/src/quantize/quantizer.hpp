// SPDX-License-Identifier: Apache-2.0
//
// The loop behind cast and requantize: rows of float32 from any source, quantized block by block.
#pragma once

#include "breccia/ops.hpp"
#include "quantize/row_source.hpp"

namespace breccia::inline v0_4 {

/// Sets both global numbers for a tensor of that amax: the encoding factor as TransformerEngine's
/// compute_global_encode_scaling_factor_FP4 does, the scale that is stored as torchao's per_tensor_amax_to_scale.
inline void set_global_levels(ScaleParams& params, float amax) {
    constexpr float range = Float8E4M3FN::max * Float4E2M1FN::max;
    const float encode = range / amax;
    if (amax == 0) {
        params.global_encode = params.global_scale = 1;
    } else if (!is_finite(encode)) {  // a tensor of subnormals
        params.global_encode = std::numeric_limits<float>::max();
        params.global_scale = 1 / params.global_encode;
    } else {
        params.global_encode = encode;
        params.global_scale = amax / range;
    }
}

/// `shape` is the tensor's; `out` has the shapes of plan_cast(shape, recipe).
void quantize(const RowSource& source, const Shape& shape, const Recipe& recipe, const CastOutput& out,
              const CastOptions& options = {});

/// What was written to `out`, as a tensor of that shape in the recipe's own layout.
ScaledTensor assemble(CastOutput out, const Recipe& recipe, const Shape& shape, DType original_dtype);

}  // namespace breccia::inline v0_4
