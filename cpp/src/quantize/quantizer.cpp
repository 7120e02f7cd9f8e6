// SPDX-License-Identifier: Apache-2.0
#include "quantize/quantizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>

#include "quantize/exact_two_level.hpp"
#include "quantize/importance.hpp"
#include "quantize/scale_choice.hpp"
#include "quantize/stored_blocks.hpp"
#include "runtime/ieee_arithmetic.hpp"
#include "runtime/threads.hpp"
#include "runtime/workspace.hpp"

namespace breccia::inline v0_4 {
namespace {

class Quantizer {
public:
    Quantizer(const RowSource& source, const Shape& shape, const Recipe& recipe, const CastOutput& out,
              const CastOptions& options)
        : source_(source),
          recipe_(recipe),
          out_(out),
          kernels_(source.kernels()),
          format_(kernels_[recipe.element]),
          grid_(recipe.layout.grid(shape)),
          matrices_(element_count(batch_shape(shape))),
          packed_(is_packed(recipe.element)),
          row_bytes_(packed_ ? (grid_.cols + 1) / 2 : grid_.cols),
          factor_(options.factor),
          amax_(options.amax),
          offset_(options.offset),
          row_length_(options.row_length == 0 ? grid_.cols : options.row_length),
          stored_grid_(grid_),
          choice_(source, kernels_, recipe, params_) {
        if (options.square_blocks) grid_.block_rows = grid_.block_cols;
        if (options.importance) {
            weights_ = std::make_unique<ColumnWeights>(*options.importance, shape);
            weighted_ = std::make_unique<WeightedSearch>(kernels_, recipe, params_);
        }
        if (options.seed) key_.emplace(*options.seed, RandomStream::rounding);
        params_.rule = recipe.rule;
        params_.type = recipe.scale;
        params_.search = options.importance ? ScaleSearch::amax : recipe.search;
        params_.margin_factor = exp2i(recipe.margin);
        params_.two_level = recipe.two_level;
    }

    void run() {
        if (out_.global_scale) {
            if (source_.stored() != nullptr && in_rows())
                if (const auto levels = exact_two_levels(source_, *source_.stored(), grid_, matrices_, recipe_))
                    return keep_all(*levels);
            set_global_scale();
        }
        if (recipe_.is_expanded()) return quantize_expanded();
        if (weighted_) weighted_->start();
        if (recipe_.layout.kind == LayoutKind::per_tensor) return quantize_whole();
        in_rows() ? quantize_rows() : quantize_tiles();
    }

private:
    [[nodiscard]] bool in_rows() const {
        const bool whole_bytes = !packed_ || grid_.block_cols % 2 == 0;
        const bool whole_blocks = grid_.cols % grid_.block_cols == 0;
        return grid_.block_rows == 1 && grid_.cols > 0 && whole_blocks && grid_.block_cols <= 2 * piece_cols &&
               whole_bytes && !key_ && (amax_.empty() || recipe_.two_level);
    }
    [[nodiscard]] std::uint8_t* row_codes(std::int64_t matrix, std::int64_t row) const {
        return out_.data.as<std::uint8_t>() + (matrix * grid_.rows + row) * row_bytes_;
    }
    [[nodiscard]] std::int64_t block_index(std::int64_t matrix, std::int64_t block_row) const {
        return (matrix * stored_grid_.grid_rows() + block_row) * grid_.grid_cols();
    }
    [[nodiscard]] std::byte* scale_at(std::int64_t block) const {
        return out_.scale.as<std::byte>() + block * static_cast<std::int64_t>(out_.scale.type.size());
    }
    [[nodiscard]] std::uint8_t* zero_point_at(std::int64_t block) const {
        return out_.zero_point ? out_.zero_point->as<std::uint8_t>() + block : nullptr;
    }

    template <class F>
    void for_each_row(F body) const {
        if (grid_.cols == 0) return;  // of any number of rows
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / grid_.cols);
        parallel_for(matrices_ * grid_.rows, grain, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            for (std::int64_t i = begin; i < end; ++i)
                body(BlockRange{i / grid_.rows, i % grid_.rows, i % grid_.rows + 1, 0, grid_.cols, 1}, scratch);
        });
    }

    BlockStats tensor_stats() const {
        BlockStats total;
        std::mutex mutex;
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            const BlockStats stats = choice_.stats_of(row, scratch);
            const std::lock_guard lock(mutex);
            merge(total, stats);
        });
        return total;
    }

    // The same, and each block's amax, from which its scale will follow: while the tensor comes from memory there is
    // time for these maxima, too.
    BlockStats measure_blocks() {
        amax_bits_ = WorkBuffer<std::int32_t>(matrices_ * grid_.rows * grid_.grid_cols());
        BlockStats total;
        std::mutex mutex;
        for_each_run([&](const BlockRange& row, std::int64_t block, std::int64_t count, const float* x) {
            const std::int32_t most = kernels_.quantize.block_amax(
                x, count, grid_.block_cols, amax_bits_.data() + block_index(row.matrix, row.begin_row) + block);
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
        write_global_scale(recipe_.global_divides ? params_.global_encode : params_.global_scale);
    }

    // Parts of an output may lie at any address.
    void write_global_scale(float x) const {
        if (out_.global_scale) std::memcpy(out_.global_scale->as<std::byte>(), &x, sizeof x);
    }

    void write_scale(std::int64_t block, const BlockScale& s) const {
        std::byte* p = scale_at(block);
        for (std::size_t i = 0; i < out_.scale.type.size(); ++i) p[i] = static_cast<std::byte>(s.stored >> 8 * i);
        if (auto* zero_point = zero_point_at(block))
            *zero_point = static_cast<std::uint8_t>(static_cast<int>(s.zero_point));
    }

    // Elements [col, col + n) of a row, under one scale.
    void encode_run(const float* x, std::int64_t n, const BlockScale& s, std::int64_t matrix, std::int64_t row,
                    std::int64_t col) const {
        std::uint8_t* codes = row_codes(matrix, row);
        if (!key_) return format_.encode(x, n, s, codes, col, packed_);
        const auto first = static_cast<std::uint32_t>(offset_ + (matrix * grid_.rows + row) * row_length_ + col);
        format_.encode_stochastic(x, n, s, *key_, first, codes, col, packed_);
    }

    void encode(const BlockRange& b, const BlockScale& s, Scratch& scratch) const {
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t row, std::int64_t col, std::int64_t n) {
            encode_run(x, n, s, b.matrix, row, col);
        });
    }

    // One scale for the whole tensor: statistics of every row, then every row's codes.
    void quantize_whole() const {
        if (factor_) {
            const float scale = 1 / *factor_;
            return encode_whole({.stored = bits_of(scale), .factor = *factor_, .multiply = true, .decoded = scale});
        }
        if (!amax_.empty()) return encode_whole(format_.choose_scale(given_stats(0), params_, 0));
        const BlockStats stats = tensor_stats();
        const BlockRange whole{.end_row = grid_.rows, .end_col = grid_.cols, .matrices = matrices_};
        Scratch scratch;
        if (weighted_)
            return encode_whole(weighted_->best(stats, [&](const BlockScale& s) { return tensor_error(s); }));
        if (const auto kept = choice_.exact_scale(whole, stats, scratch)) return encode_whole(*kept);
        encode_whole(choice_.best(stats, [&](const BlockScale& s) { return tensor_error(s); }));
    }

    void encode_whole(const BlockScale& s) const {
        write_scale(0, s);
        for_each_row([&](const BlockRange& row, Scratch& scratch) { encode(row, s, scratch); });
    }

    // Rows are added in order whichever thread computed them.
    double tensor_error(const BlockScale& s) const {
        std::vector<double> errors(static_cast<std::size_t>(matrices_ * grid_.rows));
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            errors[static_cast<std::size_t>(row.matrix * grid_.rows + row.begin_row)] =
                weighted_ ? weighted_error(row, s, scratch) : choice_.squared_error(row, s, scratch);
        });
        double total = 0;
        for (const double error : errors) total += error;
        return total;
    }

    float weighted_error(const BlockRange& b, const BlockScale& s, Scratch& scratch) const {
        float total = 0;
        source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t col, std::int64_t n) {
            total += weighted_->error(x, weights_->of(b.matrix, col), n, s);
        });
        return total;
    }

    // The scale of a block of any shape, which is put in one piece.
    [[nodiscard]] BlockScale weighted_scale(const BlockRange& b, Scratch& scratch) const {
        std::vector<float>& x = scratch.gathered;
        std::vector<float>& weights = scratch.gathered_weights;
        x.clear(), weights.clear();
        source_.for_each_piece(b, scratch, [&](const float* values, std::int64_t, std::int64_t col, std::int64_t n) {
            x.insert(x.end(), values, values + n);
            const float* h = weights_->of(b.matrix, col);
            weights.insert(weights.end(), h, h + n);
        });
        const auto n = static_cast<std::int64_t>(x.size());
        return weighted_->choose(x, weights.data(), kernels_.quantize.stats(x.data(), n, choice_.needs_range()));
    }

    // Replaces scales and codes of blocks of a row by those that the search with weights finds. Where scales are codes,
    // those of the amax rule are in their places, where the search begins.
    void improve_blocks(const BlockRange& row, std::int64_t block, std::int64_t count, const float* x) const {
        const std::int64_t size = grid_.block_cols, index = block_index(row.matrix, row.begin_row) + block;
        const float* weights = weights_->of(row.matrix, block * size);
        std::array<std::uint8_t, piece_cols> better;
        auto* scales = reinterpret_cast<std::uint8_t*>(scale_at(index));
        if (weighted_->coded()) {
            std::copy_n(scales, count, better.begin());
            weighted_->search_codes({x, weights, count, size}, better.data());
        }
        for (std::int64_t j = 0; j < count; ++j) {
            const float* values = x + j * size;
            BlockScale s;
            if (weighted_->coded()) {
                const std::uint8_t code = better[static_cast<std::size_t>(j)];
                if (code == scales[j]) continue;
                s = weighted_->of_code(code);
            } else {
                s = weighted_->choose({values, static_cast<std::size_t>(size)}, weights + j * size,
                                      kernels_.quantize.stats(values, size, choice_.needs_range()));
            }
            write_scale(index + j, s);
            encode_run(values, size, s, row.matrix, row.begin_row, (block + j) * size);
        }
    }

    // Calls body(row, first block, blocks, values) for runs of blocks along each row.
    template <class F>
    void for_each_run(F body) const {
        const std::int64_t blocks = grid_.grid_cols();
        const std::int64_t step = blocks_of_a_piece(grid_.block_cols);
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            for (std::int64_t block = 0; block < blocks; block += step) {
                const std::int64_t count = std::min(step, blocks - block);
                const std::int64_t col = block * grid_.block_cols;
                body(row, block, count,
                     source_.read(row.matrix, row.begin_row, col, count * grid_.block_cols, scratch));
            }
        });
    }

    // Blocks along a row: one pass over the data.
    void quantize_rows() const {
        for_each_run([&](const BlockRange& row, std::int64_t block, std::int64_t count, const float* x) {
            if (source_.stored() != nullptr && !recipe_.two_level) return keep_or_quantize(row, block, count, x);
            const std::int32_t* amax = amax_bits_.data();
            if (amax != nullptr) amax += block_index(row.matrix, row.begin_row) + block;
            if (!weighted_ || weighted_->coded()) quantize_blocks(row, block, count, x, amax);
            if (weighted_) improve_blocks(row, block, count, x);
        });
    }

    // Groups along rows, each with an exponent. It is 1 where a scale loses nothing so, and of groups that have no
    // other, which are divided by the scale.
    void quantize_expanded() const {
        const FormatInfo& element = info(recipe_.element);
        const FormatRange range{.max = element.max, .smallest = element.smallest};
        const std::int64_t size = grid_.block_cols;
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            for (std::int64_t block = 0; block < grid_.grid_cols(); ++block) {
                const std::int64_t col = block * size, index = block_index(row.matrix, row.begin_row) + block;
                const float* x = source_.read(row.matrix, row.begin_row, col, size, scratch);
                scratch.expanded.resize(static_cast<std::size_t>(size));
                std::uint16_t exponent = to_float16(1.0F).bits;
                BlockScale s;
                if (const auto kept = kept_scale(row, col, size, x)) {
                    s = *kept;
                } else if (const std::uint32_t bits =
                               kernels_.quantize.expand(x, size, range, scratch.expanded.data(), &exponent);
                           bits != 0) {
                    s = {.stored = format_.choose_scale({.amax_bits = bits}, params_, 0).stored,
                         .multiply = true,
                         .all_finite = true};
                    x = scratch.expanded.data();
                } else {
                    s = format_.choose_scale(kernels_.quantize.stats(x, size, false), params_, 0);
                }
                std::memcpy(scale_at(index), &s.stored, sizeof(float));
                std::memcpy(out_.zero_point->as<std::byte>() + index * std::int64_t{sizeof exponent}, &exponent,
                            sizeof exponent);
                encode_run(x, size, s, row.matrix, row.begin_row, col);
            }
        });
    }

    // The scale under which a block of a row that was read loses nothing, where the source may have one.
    [[nodiscard]] std::optional<BlockScale> kept_scale(const BlockRange& row, std::int64_t col, std::int64_t size,
                                                       const float* x) const {
        if (source_.stored() == nullptr) return {};
        return choice_.exact_scale({row.matrix, row.begin_row, row.end_row, col, col + size},
                                   kernels_.quantize.stats(x, size, choice_.needs_range()),
                                   [&](auto body) { return body(x, size); });
    }

    // `amax_bits`: of each block, or null.
    void quantize_blocks(const BlockRange& row, std::int64_t block, std::int64_t count, const float* x,
                         const std::int32_t* amax_bits) const {
        const std::int64_t index = block_index(row.matrix, row.begin_row) + block, col = block * grid_.block_cols;
        format_.quantize_row({.x = x,
                              .blocks = count,
                              .block = grid_.block_cols,
                              .params = params_,
                              .amax_bits = amax_bits,
                              .codes = row_codes(row.matrix, row.begin_row) + (packed_ ? col / 2 : col),
                              .scales = scale_at(index),
                              .zero_points = zero_point_at(index)});
    }

    // Blocks that keep the source's scales and codes are copied.
    void keep_all(const TwoLevels& levels) const {
        write_global_scale(levels.global_scale());
        const std::int64_t blocks = grid_.grid_cols(), size = grid_.block_cols;
        const std::int64_t step = blocks_of_a_piece(size);
        for_each_row([&](const BlockRange& row, Scratch& scratch) {
            const std::uint8_t* own = source_.stored()->codes(recipe_.element, row.matrix, row.begin_row);
            for (std::int64_t first = 0; first < blocks; first += step) {
                const std::int64_t count = std::min(step, blocks - first), col = first * size;
                const std::int64_t index = block_index(row.matrix, row.begin_row) + first;
                if (own != nullptr && levels.keeps_own(index, count)) {
                    std::copy_n(own + col / 2, count * size / 2, row_codes(row.matrix, row.begin_row) + col / 2);
                    auto* scales = reinterpret_cast<std::uint8_t*>(scale_at(index));
                    for (std::int64_t i = 0; i < count; ++i) scales[i] = levels.code(index + i);
                    continue;
                }
                const float* x = source_.read(row.matrix, row.begin_row, col, count * size, scratch);
                for (std::int64_t j = 0; j < count; ++j) {
                    const BlockScale s = levels.scale(index + j);
                    write_scale(index + j, s);
                    encode_run(x + j * size, size, s, row.matrix, row.begin_row, col + j * size);
                }
            }
        });
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
            write_scale(block_index(row.matrix, row.begin_row) + first + j, *kept);
            encode_run(values, size, *kept, row.matrix, row.begin_row, col);
            done = j + 1;
        }
        quantize(done, count);
    }

    // Blocks of several rows, long blocks, odd blocks of packed codes, and stochastic rounding. A band of
    // blocks is worked through row by row, a few thousand columns at a time: rows are read in long runs, and are still
    // in a cache when they are encoded.
    void quantize_tiles() const {
        constexpr std::int64_t cached_cols = 4096;
        const std::int64_t grid_rows = grid_.grid_rows(), grid_cols = grid_.grid_cols();
        if (grid_cols == 0) return;  // of any number of rows
        const std::int64_t per_unit = std::max<std::int64_t>(1, std::min(grid_.block_rows, grid_.rows) * grid_.cols);
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / per_unit);
        const std::int64_t step = std::max<std::int64_t>(1, cached_cols / std::max<std::int64_t>(1, grid_.block_cols));
        parallel_for(matrices_ * grid_rows, grain, [&](std::int64_t begin, std::int64_t end) {
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
                            write_scale(block_index(matrix, r / stored_grid_.block_rows) + block + j,
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
            scales[0] = format_.choose_scale(given_stats(block_index(matrix, block_row)), params_, 0);
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
                s = weighted_scale(b, scratch);
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
                encode_run(x, part, s, b.matrix, row, col);
                x += part, col += part;
            }
        });
    }

    const RowSource& source_;
    const Recipe& recipe_;
    const CastOutput& out_;
    const KernelTable& kernels_;
    const FormatKernels& format_;
    BlockGrid grid_;
    std::int64_t matrices_;
    bool packed_;
    std::int64_t row_bytes_;
    std::optional<float> factor_;
    std::span<const float> amax_;           // given: of the tensor, or of each row
    std::int64_t offset_ = 0, row_length_;  // where random numbers are drawn
    BlockGrid stored_grid_;                 // of the scales; finer than grid_ where a square's rows each store one
    std::optional<RandomKey> key_;          // of stochastic rounding
    ScaleParams params_;
    ScaleChoice choice_;
    std::unique_ptr<const ColumnWeights> weights_;  // and the search with them
    std::unique_ptr<WeightedSearch> weighted_;
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
    const IeeeArithmetic arithmetic;
    Quantizer(source, shape, recipe, out, options).run();
}

}  // namespace breccia::inline v0_4
