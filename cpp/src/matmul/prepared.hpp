// SPDX-License-Identifier: Apache-2.0
//
// Weights made ready: as a LaneProduct reads them, groups of 16 rows side by side, a doubleword of each in turn.
#pragma once

#include "breccia/prepared.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

/// What a PreparedWeight adds to its tensor: for every matrix of a batch its codes and scales in that order.
struct InterleavedWeight {
    Array codes, scales;  ///< batch axes, 1, bytes of a matrix
    std::optional<Array> zero_points;
    std::optional<Array> special;  ///< of rows in place, which the weight keeps: see CodeRows
    ScaleType scale_type = ScaleType::float32;
};

/// What a PreparedWeight added to the tensor, else null.
inline const InterleavedWeight* interleaved_of(const ScaledTensor& scaled) { return scaled.interleaved_.get(); }

/// How the scales of a weight come to the sums of a LaneProduct, whose members these are. `stored` scales of a row,
/// a multiple of 4, are kept; each of the weight's own stands for `repeats` of them.
struct LaneBlocks {
    std::int64_t block_quads = 0, scale_step = 1, stored = 4, repeats = 1;
    int block_shift = 0;
    /// See TermPlan: elements of K that a kernel sums up before it scales.
    [[nodiscard]] std::int64_t elements(std::int64_t quad) const {
        return block_quads > 0 ? block_quads * quad : std::int64_t{16} << block_shift;
    }
    bool shorten(std::int64_t to, std::int64_t quad) {
        if (scale_step != 0 || elements(quad) % to != 0 || to % quad != 0) return false;
        block_quads = to / quad;
        return true;
    }
    [[nodiscard]] std::int64_t group_bytes(ScaleType type) const { return stored * (is_coded(type) ? 16 : 64); }
};

/// Doublewords of 16 rows to a quad.
constexpr std::int64_t quads_of(std::int64_t k, bool packed) { return (k + (packed ? 31 : 15)) / (packed ? 32 : 16); }

/// None where the weight's blocks, type of zero points or order in memory do not suit.
std::optional<LaneBlocks> lane_blocks(const ScaledMatrix& w);

/// Scales of rows [row, row + 16), those past the end zero, to `out`. Codes stay codes where the kernel reads all that
/// there are, else false; float32 always can be had.
bool interleave_scales(const KernelTable& table, const ScaledMatrix& w, const LaneBlocks& blocks, std::int64_t row,
                       ScaleType type, Scratch& scratch, std::byte* out);

/// The same of zero points, for a weight that has them.
void interleave_zero_points(const KernelTable& table, const ScaledMatrix& w, const LaneBlocks& blocks, std::int64_t row,
                            Scratch& scratch, std::byte* out);

}  // namespace breccia::inline v0_4
