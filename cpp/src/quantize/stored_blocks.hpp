// SPDX-License-Identifier: Apache-2.0
//
// A tensor that is quantized already, seen by the blocks of another recipe: the scales, codes and global scale that
// requantize tries to keep.
#pragma once

#include <optional>
#include <vector>

#include "quantize/row_source.hpp"

namespace breccia::inline v0_4 {

class StoredBlocks final : public RowSource {
public:
    /// `recipe`: what the tensor is quantized to.
    StoredBlocks(const Call& call, const ScaledTensor& scaled, const Recipe& recipe);

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override;
    /// The scale of the one stored block that holds the whole block, if one does.
    [[nodiscard]] std::optional<float> scale(const BlockRange& block) const;
    /// `scale` of `count` adjacent blocks, the first of which is `first`; 0 where there is none.
    void scales(const BlockRange& first, std::int64_t count, float* out) const;
    /// A row's codes, where they are such as `format` has, packed, and without zero points; or null.
    [[nodiscard]] const std::uint8_t* codes(Format format, std::int64_t matrix, std::int64_t row) const;
    /// The tensor's one global scale, if it has one, in the form that the recipe stores.
    [[nodiscard]] std::optional<float> global_scale() const { return global_; }

private:
    std::vector<ScaledMatrix> matrices_;
    int axis_;
    bool one_scale_;
    std::optional<float> global_;
};

}  // namespace breccia::inline v0_4
