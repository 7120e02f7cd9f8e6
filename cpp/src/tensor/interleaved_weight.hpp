// SPDX-License-Identifier: Apache-2.0
//
// What a PreparedWeight adds to its tensor: codes and scales in the order in which a LaneProduct reads them.
#pragma once

#include "breccia/scaled_tensor.hpp"

namespace breccia::inline v0_4 {

/// For every matrix of a batch: groups of 16 rows side by side, a doubleword of each in turn.
struct InterleavedWeight {
    Array codes, scales;  ///< batch axes, 1, bytes of a matrix
    std::optional<Array> zero_points;
    std::optional<Array> special;  ///< of rows in place, which the weight keeps: see CodeRows
    ScaleType scale_type = ScaleType::float32;
};

/// What a PreparedWeight added to the tensor, else null.
inline const InterleavedWeight* interleaved_of(const ScaledTensor& scaled) { return scaled.interleaved_.get(); }

}  // namespace breccia::inline v0_4
