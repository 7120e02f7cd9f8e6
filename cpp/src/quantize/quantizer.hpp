// SPDX-License-Identifier: Apache-2.0
//
// The loop behind cast and requantize: rows of float32 from any source, quantized block by block.
#pragma once

#include <algorithm>
#include <array>

#include "breccia/ops.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

/// Rows [begin_row, end_row) by columns [begin_col, end_col) of one matrix, or of several.
struct BlockRange {
    std::int64_t matrix = 0, begin_row = 0, end_row = 0, begin_col = 0, end_col = 0, matrices = 1;
};

/// Long runs go through the kernels in pieces that stay in the first-level cache.
inline constexpr std::int64_t piece_cols = 4096;

class StoredBlocks;

class RowSource {
public:
    RowSource(const RowSource&) = delete;
    RowSource& operator=(const RowSource&) = delete;
    virtual ~RowSource() = default;
    /// The kernels of the verb, which it takes once.
    [[nodiscard]] const KernelTable& kernels() const { return kernels_; }
    /// Elements [begin, begin + n) of a row, valid until the next call with the same scratch.
    virtual const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                              Scratch& scratch) const = 0;
    /// Calls body(values, row, first column, count) for every piece of a block.
    template <class F>
    void for_each_piece(const BlockRange& b, Scratch& scratch, F body) const {
        all_pieces(b, scratch, [&](const float* x, std::int64_t row, std::int64_t col, std::int64_t n) {
            body(x, row, col, n);
            return true;
        });
    }
    /// The same until body returns false. Returns whether it never did.
    template <class F>
    bool all_pieces(const BlockRange& b, Scratch& scratch, F body) const {
        for (std::int64_t matrix = b.matrix; matrix < b.matrix + b.matrices; ++matrix)
            for (std::int64_t row = b.begin_row; row < b.end_row; ++row)
                for (std::int64_t col = b.begin_col; col < b.end_col; col += piece_cols) {
                    const std::int64_t n = std::min(piece_cols, b.end_col - col);
                    if (!body(read(matrix, row, col, n, scratch), row, col, n)) return false;
                }
        return true;
    }
    /// Where the values are quantized already: what they are stored as, so that scales which lose nothing are tried
    /// before the recipe's rule. Else null.
    [[nodiscard]] const StoredBlocks* stored() const { return stored_; }

protected:
    explicit RowSource(const KernelTable& kernels, const StoredBlocks* stored = nullptr)
        : kernels_(kernels), stored_(stored) {}

private:
    const KernelTable& kernels_;
    const StoredBlocks* stored_;
};

/// Blocks of a row that go through the kernels together.
inline std::int64_t blocks_of_a_piece(std::int64_t block_cols) {
    return std::max<std::int64_t>(1, piece_cols / block_cols);
}

/// Statistics of such blocks: by one call where all are finite and their largest magnitudes are all that is asked for.
class PieceStats {
public:
    /// `range`: whether the least and the largest value are asked for, too.
    PieceStats(const QuantizeKernels& kernels, const float* x, std::int64_t blocks, std::int64_t size, bool range,
               bool amax_decides)
        : kernels_(kernels), x_(x), size_(size), range_(range) {
        finite_ = amax_decides && size % amax_lanes == 0 &&
                  static_cast<std::uint32_t>(kernels.block_amax(x, blocks, size, amax_.data())) < f32_infinity_bits;
    }

    [[nodiscard]] BlockStats of(std::int64_t block) const {
        if (!finite_) return kernels_.stats(x_ + block * size_, size_, range_);
        return {.amax_bits = static_cast<std::uint32_t>(amax_[static_cast<std::size_t>(block)])};
    }
    /// The bits of the amaxes of a block and those after it; null where a value is not finite, or scales need more.
    [[nodiscard]] const std::int32_t* amax_bits(std::int64_t block) const {
        return finite_ ? amax_.data() + block : nullptr;
    }

private:
    const QuantizeKernels& kernels_;
    const float* x_;
    std::int64_t size_;
    bool range_, finite_ = false;
    std::array<std::int32_t, piece_cols / amax_lanes> amax_;
};

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

/// Elements worth giving to a thread of their own.
inline constexpr std::int64_t parallel_grain = 1 << 16;

}  // namespace breccia::inline v0_4
