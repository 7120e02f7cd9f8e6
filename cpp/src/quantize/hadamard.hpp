// SPDX-License-Identifier: Apache-2.0
//
// The random Hadamard transform of a cast's rows.
#pragma once

#include "quantize/row_source.hpp"

namespace breccia::inline v0_4 {

/// Rows of another source, each block of which is x · diag(signs) · H / √block. The sign of element i of a block
/// follows from the seed and i.
class HadamardSource final : public RowSource {
public:
    /// `block` is a power of two that divides `cols`.
    HadamardSource(const RowSource& source, std::int64_t block, std::uint64_t seed);

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override;

private:
    const RowSource& source_;
    std::int64_t block_;
    std::vector<float> signs_;
};

}  // namespace breccia::inline v0_4
