// SPDX-License-Identifier: Apache-2.0
//
// NVFP4's two levels under which a tensor that is quantized already keeps every value. A block's scale must be one of a
// few numbers: the source's own, or the block's amax over one of E2M1's magnitudes. All of them must be products of one
// global scale and E4M3 numbers.
#pragma once

#include <utility>

#include "quantize/block_writer.hpp"
#include "quantize/stored_blocks.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {

/// A global scale, and for each block of the grid, in order, the scale under it that keeps the block's values.
class TwoLevels {
public:
    /// A block, and what its scale may be: the source's own, or its amax over one of E2M1's magnitudes.
    struct Block {
        float amax, own;       // own: without its sign
        std::uint8_t kept;     // a bit for each option under which no value is lost
        bool has_nan, turned;  // turned: the source's scale is negative

        [[nodiscard]] bool is_free() const { return has_nan || amax == 0; }  // whatever the global scale
        [[nodiscard]] float scale(std::size_t option) const;
        [[nodiscard]] bool keeps(std::size_t option) const { return (kept >> option & 1U) != 0; }
    };
    /// An option, and the E4M3 code that makes its scale with the global one; code 0 where every option loses
    /// something.
    struct Chosen {
        std::uint8_t option, code;
    };

    TwoLevels(float global_scale, ScaleRule rule, WorkBuffer<Block> blocks, WorkBuffer<Chosen> chosen)
        : global_scale_(global_scale), rule_(rule), blocks_(std::move(blocks)), chosen_(std::move(chosen)) {}

    /// Writes the tensor that is walked: blocks that keep the source's scales and codes are copied.
    void write(const BlockWalk& walk, Format element, const BlockWriter& to) const;

private:
    [[nodiscard]] BlockScale scale(std::int64_t block) const;
    /// Whether blocks keep their source's scales, and so codes of the same format.
    [[nodiscard]] bool keeps_own(std::int64_t first, std::int64_t count) const;

    float global_scale_;  // as the recipe stores it
    ScaleRule rule_;
    WorkBuffer<Block> blocks_;
    WorkBuffer<Chosen> chosen_;
};

/// Of a source that is stored already. None where no such scales are found: a block with an infinity has none.
std::optional<TwoLevels> exact_two_levels(const BlockWalk& walk, const Recipe& recipe);

}  // namespace breccia::inline v0_4
