// SPDX-License-Identifier: Apache-2.0
#include "quantize/expanded.hpp"

namespace breccia::inline v0_4 {

void quantize_expanded(const BlockWalk& walk, Format element, const ScaleParams& params, const ScaleChoice& choice,
                       const BlockWriter& to) {
    const KernelTable& kernels = walk.source.kernels();
    const FormatRange range{.max = info(element).max, .smallest = info(element).smallest};
    const std::int64_t size = walk.grid.block_cols;
    walk.for_each_row([&](const BlockRange& row, Scratch& scratch) {
        scratch.expanded.resize(static_cast<std::size_t>(size));
        for (std::int64_t block = 0; block < walk.grid.grid_cols(); ++block) {
            const std::int64_t col = block * size;
            const float* x = walk.read(row, block, 1, scratch);
            std::uint16_t exponent = to_float16(1.0F).bits;
            BlockScale s;
            if (const auto kept = choice.kept({row.matrix, row.begin_row, row.end_row, col, col + size}, x, size)) {
                s = *kept;
            } else if (const std::uint32_t amax_bits =
                           kernels.quantize.expand(x, size, range, scratch.expanded.data(), &exponent);
                       amax_bits != 0) {
                s.stored = kernels[element].choose_scale({.amax_bits = amax_bits}, params, 0).stored;
                s.multiply = s.all_finite = true;
                x = scratch.expanded.data();
            } else {
                s = kernels[element].choose_scale(kernels.quantize.stats(x, size, false), params, 0);
            }
            to.write_expanded(to.block_at(row.matrix, row.begin_row, block), s, exponent);
            to.encode(x, size, s, row.matrix, row.begin_row, col);
        }
    });
}

}  // namespace breccia::inline v0_4
