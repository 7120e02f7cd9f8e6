// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "breccia/ops.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {

/// A quantized tensor whose scales stand and whose codes are put in one at a time.
class OneCode {
public:
    /// `out` holds what a cast of a tensor of that shape and amax gave.
    OneCode(const Recipe& recipe, const Shape& shape, const CastOutput& out, float amax);

    [[nodiscard]] const BlockGrid& grid() const { return grid_; }

    /// Stores the code nearest to x + added as an element's, and returns x minus the value of that code. An element
    /// that is not finite, or whose scale is not, keeps its code, and 0 is returned. Threads must not share a row: two
    /// codes of it may be in one byte.
    float put(std::int64_t matrix, std::int64_t row, std::int64_t col, float x, float added) const;

private:
    std::uint8_t code_of(float scaled, float zero_point) const;

    BlockGrid grid_;
    const FormatInfo& format_;
    bool packed_, integer_, whole_;
    std::int64_t row_bytes_;
    std::uint8_t* codes_;
    bool multiply_;
    std::vector<float> factors_, scales_;  // of blocks: see BlockScale
    std::vector<float> zero_points_;
};

}  // namespace breccia::inline v0_4
