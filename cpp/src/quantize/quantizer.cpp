// SPDX-License-Identifier: Apache-2.0
#include "quantize/quantizer.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <span>

#include "quantize/importance.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {
namespace {

BlockGrid squared(BlockGrid grid, bool square_blocks) {
    if (square_blocks) grid.block_rows = grid.block_cols;
    return grid;
}

class Quantizer {
public:
    Quantizer(const RowSource& source, const Shape& shape, const Recipe& recipe, const CastOutput& out,
              const CastOptions& options)
        : source_(source),
          recipe_(recipe),
          kernels_(source.kernels()),
          format_(kernels_[recipe.element]),
          stored_grid_(recipe.layout.grid(shape)),
          walk_{source, squared(stored_grid_, options.square_blocks), element_count(batch_shape(shape))},
          writer_(kernels_, recipe, stored_grid_, out, options),
          factor_(options.factor),
          amax_(options.amax),
          choice_(source, recipe, params_) {
        if (options.importance) weighted_.emplace(source, *options.importance, shape, recipe, params_);
        params_.rule = recipe.rule;
        params_.type = recipe.scale;
        params_.search = options.importance ? ScaleSearch::amax : recipe.search;
        params_.margin_factor = exp2i(recipe.margin);
        params_.two_level = recipe.two_level;
    }

    void run() {
        if (recipe_.two_level) {
            if (source_.stored() != nullptr && in_rows() && write_exact_two_levels(walk_, recipe_, writer_)) return;
            set_global_scale();
        }
        if (recipe_.is_expanded()) return quantize_expanded();
        if (weighted_) weighted_->start();
        if (recipe_.layout.kind == LayoutKind::per_tensor) return quantize_whole();
        in_rows() ? quantize_rows() : quantize_tiles();
    }

private:
    [[nodiscard]] bool in_rows() const {
        const bool whole_bytes = !is_packed(recipe_.element) || grid_.block_cols % 2 == 0;
        const bool whole_blocks = grid_.cols % grid_.block_cols == 0;
        return grid_.block_rows == 1 && grid_.cols > 0 && whole_blocks && grid_.block_cols <= 2 * piece_cols &&
               whole_bytes && !writer_.draws() && (amax_.empty() || recipe_.two_level);
    }

    BlockStats tensor_stats() const {
        BlockStats total;
        std::mutex mutex;
        walk_.for_each_row([&](const BlockRange& row, Scratch& scratch) {
            const BlockStats stats = choice_.stats_of(row, scratch);
            const std::lock_guard lock(mutex);
            merge(total, stats);
        });
        return total;
    }

    // The same, and each block's amax, from which its scale will follow: while the tensor comes from memory there is
    // time for these maxima, too.
    BlockStats measure_blocks() {
        amax_bits_ = WorkBuffer<std::int32_t>(walk_.matrices * grid_.rows * grid_.grid_cols());
        BlockStats total;
        std::mutex mutex;
        walk_.for_each_run([&](const BlockRange& row, std::int64_t first, std::int64_t count, Scratch& scratch) {
            const float* x = walk_.read(row, first, count, scratch);
            const std::int32_t most = kernels_.quantize.block_amax(
                x, count, grid_.block_cols, amax_bits_.data() + writer_.block_at(row.matrix, row.begin_row, first));
            const auto bits = static_cast<std::uint32_t>(most);
            const BlockStats stats = bits < f32_infinity_bits
                                         ? BlockStats{.amax_bits = bits}
                                         : kernels_.quantize.stats(x, count * grid_.block_cols, false);
            const std::lock_guard lock(mutex);
            merge(total, stats);
        });
        return total;
    }

    float measured_amax() {
        const bool by_blocks = in_rows() && grid_.block_cols % amax_lanes == 0;
        return float_from_bits((by_blocks ? measure_blocks() : tensor_stats()).amax_bits);
    }

    // Of a block whose amax was given. Its elements here need not be finite.
    [[nodiscard]] BlockStats given_stats(std::int64_t block) const {
        const float amax = amax_[static_cast<std::size_t>(block)];
        return {.amax_bits = std::isnan(amax) ? 0 : bits_of(amax), .has_nan = std::isnan(amax), .has_infinity = true};
    }

    void set_global_scale() {
        set_global_levels(params_, amax_.empty() ? measured_amax() : amax_[0]);
        writer_.write_global_scale(recipe_.global_divides ? params_.global_encode : params_.global_scale);
    }

    // One scale for the whole tensor: statistics of every row, then every row's codes.
    void quantize_whole() const {
        if (factor_) {
            const float scale = 1 / *factor_;
            return encode_whole({.stored = bits_of(scale), .factor = *factor_, .multiply = true, .decoded = scale});
        }
        if (!amax_.empty()) return encode_whole(format_.choose_scale(given_stats(0), params_, 0));
        const BlockStats stats = tensor_stats();
        const BlockRange whole{.end_row = grid_.rows, .end_col = grid_.cols, .matrices = walk_.matrices};
        Scratch scratch;
        if (weighted_)
            return encode_whole(weighted_->best(stats, [&](const BlockScale& s) { return tensor_error(s); }));
        if (const auto kept = choice_.exact_scale(whole, stats, scratch)) return encode_whole(*kept);
        encode_whole(choice_.best(stats, [&](const BlockScale& s) { return tensor_error(s); }));
    }

    void encode_whole(const BlockScale& s) const {
        writer_.write_scale(0, s);
        walk_.for_each_row([&](const BlockRange& row, Scratch& scratch) {
            source_.for_each_piece(row, scratch, [&](const float* x, std::int64_t r, std::int64_t col, std::int64_t n) {
                writer_.encode(x, n, s, row.matrix, r, col);
            });
        });
    }

    // Rows are added in order whichever thread computed them.
    double tensor_error(const BlockScale& s) const {
        std::vector<double> errors(static_cast<std::size_t>(walk_.matrices * grid_.rows));
        walk_.for_each_row([&](const BlockRange& row, Scratch& scratch) {
            errors[static_cast<std::size_t>(row.matrix * grid_.rows + row.begin_row)] =
                weighted_ ? weighted_->error(row, s, scratch) : choice_.squared_error(row, s, scratch);
        });
        return std::accumulate(errors.begin(), errors.end(), 0.0);
    }

    // Blocks along a row: one pass over the data.
    void quantize_rows() const {
        walk_.for_each_run([&](const BlockRange& row, std::int64_t first, std::int64_t count, Scratch& scratch) {
            const float* x = walk_.read(row, first, count, scratch);
            if (source_.stored() != nullptr && !recipe_.two_level) return keep_or_quantize(row, first, count, x);
            const std::int32_t* amax = amax_bits_.data();
            if (amax != nullptr) amax += writer_.block_at(row.matrix, row.begin_row, first);
            if (!weighted_ || weighted_->coded()) quantize_blocks(row, first, count, x, amax);
            if (weighted_) weighted_->improve(row, first, count, grid_.block_cols, x, writer_);
        });
    }

    // `amax_bits`: of each block, or null.
    void quantize_blocks(const BlockRange& row, std::int64_t first, std::int64_t count, const float* x,
                         const std::int32_t* amax_bits) const {
        const std::int64_t index = writer_.block_at(row.matrix, row.begin_row, first);
        format_.quantize_row({.x = x,
                              .blocks = count,
                              .block = grid_.block_cols,
                              .params = params_,
                              .amax_bits = amax_bits,
                              .codes = writer_.codes(row.matrix, row.begin_row, first * grid_.block_cols),
                              .scales = writer_.scale(index),
                              .zero_points = writer_.zero_point(index)});
    }

    void keep_or_quantize(const BlockRange& row, std::int64_t first, std::int64_t count, const float* x) const {
        const std::int64_t size = grid_.block_cols;
        const PieceStats stats(kernels_.quantize, x, count, size, choice_.needs_range(), choice_.amax_decides());
        const auto quantize = [&](std::int64_t begin, std::int64_t end) {
            if (begin < end) quantize_blocks(row, first + begin, end - begin, x + begin * size, stats.amax_bits(begin));
        };
        std::int64_t done = 0;
        for (std::int64_t j = 0; j < count; ++j) {
            const float* values = x + j * size;
            const std::int64_t col = (first + j) * size;
            const auto kept = choice_.exact_scale({row.matrix, row.begin_row, row.end_row, col, col + size},
                                                  stats.of(j), [&](auto body) { return body(values, size); });
            if (!kept) continue;
            quantize(done, j);
            writer_.write_scale(writer_.block_at(row.matrix, row.begin_row, first + j), *kept);
            writer_.encode(values, size, *kept, row.matrix, row.begin_row, col);
            done = j + 1;
        }
        quantize(done, count);
    }

    // Groups along rows, each with an exponent (kernels/expansion.inl.hpp). It is 1 where a scale loses nothing so, and
    // of groups that have no other, which are divided by the scale.
    void quantize_expanded() const {
        const FormatRange range{.max = info(recipe_.element).max, .smallest = info(recipe_.element).smallest};
        const std::int64_t size = grid_.block_cols;
        walk_.for_each_row([&](const BlockRange& row, Scratch& scratch) {
            scratch.expanded.resize(static_cast<std::size_t>(size));
            for (std::int64_t block = 0; block < grid_.grid_cols(); ++block) {
                const std::int64_t col = block * size;
                const float* x = walk_.read(row, block, 1, scratch);
                std::uint16_t exponent = to_float16(1.0F).bits;
                BlockScale s;
                if (const auto kept =
                        choice_.kept({row.matrix, row.begin_row, row.end_row, col, col + size}, x, size)) {
                    s = *kept;
                } else if (const std::uint32_t amax_bits =
                               kernels_.quantize.expand(x, size, range, scratch.expanded.data(), &exponent);
                           amax_bits != 0) {
                    s.stored = format_.choose_scale({.amax_bits = amax_bits}, params_, 0).stored;
                    s.multiply = s.all_finite = true;
                    x = scratch.expanded.data();
                } else {
                    s = format_.choose_scale(kernels_.quantize.stats(x, size, false), params_, 0);
                }
                writer_.write_expanded(writer_.block_at(row.matrix, row.begin_row, block), s, exponent);
                writer_.encode(x, size, s, row.matrix, row.begin_row, col);
            }
        });
    }

    // Blocks of several rows, long blocks, odd blocks of packed codes, and stochastic rounding. A band of
    // blocks is worked through row by row, a few thousand columns at a time: rows are read in long runs, and are still
    // in a cache when they are encoded.
    void quantize_tiles() const {
        const std::int64_t grid_rows = grid_.grid_rows(), grid_cols = grid_.grid_cols();
        if (grid_cols == 0) return;  // of any number of rows
        const std::int64_t per_unit = std::max<std::int64_t>(1, std::min(grid_.block_rows, grid_.rows) * grid_.cols);
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / per_unit);
        const std::int64_t step = std::max<std::int64_t>(1, piece_cols / std::max<std::int64_t>(1, grid_.block_cols));
        parallel_for(walk_.source.call(), walk_.matrices * grid_rows, grain, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            std::vector<BlockScale> scales;
            for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t matrix = i / grid_rows, block_row = i % grid_rows;
                for (std::int64_t block = 0; block < grid_cols; block += step) {
                    const std::int64_t count = std::min(step, grid_cols - block);
                    choose_scales(matrix, block_row, block, count, scratch, scales);
                    const BlockRange b = range_of(matrix, block_row, block, count);
                    for (std::int64_t r = b.begin_row; r < b.end_row; r += stored_grid_.block_rows)
                        for (std::int64_t j = 0; j < count; ++j)
                            writer_.write_scale(writer_.block_at(matrix, r / stored_grid_.block_rows, block + j),
                                                scales[static_cast<std::size_t>(j)]);
                    encode_tiles(b, scales, scratch);
                }
            }
        });
    }

    // The rows and columns of `count` blocks side by side.
    [[nodiscard]] BlockRange range_of(std::int64_t matrix, std::int64_t block_row, std::int64_t block,
                                      std::int64_t count) const {
        const std::int64_t row = block_row * grid_.block_rows, col = block * grid_.block_cols;
        return {.matrix = matrix,
                .begin_row = row,
                .end_row = row + std::min(grid_.block_rows, grid_.rows - row),
                .begin_col = col,
                .end_col = col + std::min(count * grid_.block_cols, grid_.cols - col)};
    }

    void choose_scales(std::int64_t matrix, std::int64_t block_row, std::int64_t block, std::int64_t count,
                       Scratch& scratch, std::vector<BlockScale>& scales) const {
        scales.resize(static_cast<std::size_t>(count));
        if (!amax_.empty() && !recipe_.two_level) {  // a row is one block
            scales[0] = format_.choose_scale(given_stats(writer_.block_at(matrix, block_row)), params_, 0);
            return;
        }
        const bool amax_decides = !weighted_ && choice_.amax_decides();
        std::vector<std::int32_t>& amax = scratch.amax;
        if (amax_decides) {
            amax.assign(static_cast<std::size_t>(count * amax_lanes), 0);
            const BlockRange b = range_of(matrix, block_row, block, count);
            for (std::int64_t row = b.begin_row; row < b.end_row; ++row) {
                const std::int64_t n = b.end_col - b.begin_col;
                kernels_.quantize.fold_amax(source_.read(matrix, row, b.begin_col, n, scratch), n, grid_.block_cols,
                                            amax.data());
            }
        }
        for (std::int64_t j = 0; j < count; ++j) {
            BlockScale& s = scales[static_cast<std::size_t>(j)];
            const auto bits = [&] {
                const auto first = amax.begin() + j * amax_lanes;
                return static_cast<std::uint32_t>(*std::max_element(first, first + amax_lanes));
            };
            const BlockRange b = range_of(matrix, block_row, block + j, 1);
            if (weighted_)
                s = weighted_->choose(b, scratch);
            else if (amax_decides && bits() < f32_infinity_bits)
                s = choice_.choose(b, bits(), scratch);
            else
                s = choice_.choose(b, scratch);
        }
    }

    void encode_tiles(const BlockRange& b, const std::vector<BlockScale>& scales, Scratch& scratch) const {
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t row, std::int64_t col, std::int64_t n) {
            for (std::int64_t end = col + n; col < end;) {
                const std::int64_t block = col / grid_.block_cols;
                const std::int64_t part = std::min((block + 1) * grid_.block_cols, end) - col;
                const auto& s = scales[static_cast<std::size_t>(block - b.begin_col / grid_.block_cols)];
                writer_.encode(x, part, s, b.matrix, row, col);
                x += part, col += part;
            }
        });
    }

    const RowSource& source_;
    const Recipe& recipe_;
    const KernelTable& kernels_;
    const FormatKernels& format_;
    BlockGrid stored_grid_;  // of the scales; finer than walk_.grid where a square's rows each store one
    BlockWalk walk_;
    const BlockGrid& grid_ = walk_.grid;
    BlockWriter writer_;
    std::optional<float> factor_;
    std::span<const float> amax_;  // given: of the tensor, or of each row
    ScaleParams params_;
    ScaleChoice choice_;
    std::optional<WeightedChoice> weighted_;
    WorkBuffer<std::int32_t> amax_bits_;  // of every block, where the pass for the global scale took them
};

}  // namespace

ScaledTensor assemble(CastOutput out, const Recipe& recipe, const Shape& shape, DType original_dtype) {
    return {std::move(out.data),
            std::move(out.scale),
            recipe,
            recipe.layout,
            {.zero_point = std::move(out.zero_point),
             .global_scale = std::move(out.global_scale),
             .shape = shape,
             .original_dtype = original_dtype}};
}

void quantize(const RowSource& source, const Shape& shape, const Recipe& recipe, const CastOutput& out,
              const CastOptions& options) {
    Quantizer(source, shape, recipe, out, options).run();
}

}  // namespace breccia::inline v0_4
