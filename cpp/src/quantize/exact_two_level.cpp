// SPDX-License-Identifier: Apache-2.0
#include "quantize/exact_two_level.hpp"

#include <algorithm>
#include <atomic>

#include "quantize/exact_scale.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_3 {
namespace {

constexpr float magnitudes[] = {6, 4, 3, 2, 1.5F, 1, 0.5F};
constexpr std::size_t own_scale = std::size(magnitudes);  // the option after amax over each of them
constexpr float significands[] = {8, 12, 10, 14, 9, 11, 13, 15};

// What a block's scale may be.
struct Options {
    float amax = 0, own = 0;
    std::uint8_t kept = 0;  // a bit for each option under which no value is lost
    bool has_nan = false;

    [[nodiscard]] bool is_free() const { return has_nan || amax == 0; }  // whatever the global scale
    [[nodiscard]] float scale(std::size_t option) const {
        return option == own_scale ? own : amax / magnitudes[option];
    }
    [[nodiscard]] bool keeps(std::size_t option) const { return (kept >> option & 1U) != 0; }
};

class Search {
public:
    Search(const RowSource& source, const BlockGrid& grid, std::int64_t matrices, const Recipe& recipe)
        : source_(source), grid_(grid), rows_(matrices * grid.rows), recipe_(recipe), kernels_(kernels()) {}

    std::optional<TwoLevels> run() {
        if (!read_blocks()) return std::nullopt;
        float amax = 0, own = 0;
        for (const Options& block : blocks_) {
            if (block.is_free()) continue;
            amax = std::max(amax, block.amax);
            if (block.keeps(own_scale)) own = std::max(own, block.own);
        }
        if (amax == 0) return std::nullopt;
        if (const auto global = source_.own_global_scale())
            if (fits(*global)) return levels(*global);
        if (own != 0) {
            const float global = global_for(own, top_of(own));
            if (fits(global)) return levels(global);
        }
        // The largest scale is a large E4M3 number, or there would be less room for the small ones; the block that has
        // it need not be the one of the largest value.
        for (const float magnitude : {6.0F, 4.0F})
            for (const float significand : significands)
                for (const float unit : {significand > 14 ? 16.0F : 32.0F, significand > 14 ? 8.0F : 16.0F}) {
                    const float global = global_for(amax / magnitude, significand * unit);
                    if (fits(global)) return levels(global);
                }
        return std::nullopt;
    }

private:
    // False where a block has no option.
    bool read_blocks() {
        const std::int64_t columns = grid_.grid_cols();
        blocks_.resize(static_cast<std::size_t>(rows_ * columns));
        std::atomic<bool> possible = true;
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / std::max<std::int64_t>(grid_.cols, 1));
        parallel_for(rows_, grain, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            for (std::int64_t i = begin; i < end; ++i)
                for (std::int64_t block = 0; block < columns; ++block) {
                    if (!possible.load(std::memory_order_relaxed)) return;
                    if (!read_block(i, block, scratch)) possible = false;
                }
        });
        return possible;
    }

    bool read_block(std::int64_t row, std::int64_t column, Scratch& scratch) {
        const std::int64_t size = grid_.block_cols, col = column * size;
        const BlockRange range{row / grid_.rows, row % grid_.rows, row % grid_.rows + 1, col, col + size, 1};
        const float* x = source_.read(range.matrix, range.begin_row, col, size, scratch);
        const BlockStats stats = kernels_.quantize.stats(x, size, false);
        Options& block = blocks_[static_cast<std::size_t>(row * grid_.grid_cols() + column)];
        block.has_nan = stats.has_nan;
        block.amax = float_from_bits(stats.amax_bits);
        block.own = abs(source_.own_scale(range).value_or(0.0F));
        if (stats.has_infinity) return false;
        if (block.is_free()) return true;
        for (std::size_t option = 0; option <= own_scale; ++option) {
            const auto s = stored_exactly(block.scale(option), ScaleType::float32, stats.amax_bits);
            if (s && kernels_[recipe_.element].keeps(x, size, *s))
                block.kept |= static_cast<std::uint8_t>(1U << option);
        }
        return block.kept != 0;
    }

    [[nodiscard]] float global_for(float scale, float stored) const {
        return recipe_.global_divides ? stored / scale : scale / stored;
    }

    // The E4M3 number for the largest own scale: with a power of two for the global scale where that is possible.
    static float top_of(float own) {
        const float significand = float_from_bits((bits_of(own) & 0x007F'FFFFU) | 0x3F80'0000U);
        if ((bits_of(own) & 0x000F'FFFFU) != 0 || bits_of(own) < 0x0080'0000U) return 256;
        return significand > 1.75F ? significand * 128 : significand * 256;
    }

    // The E4M3 code that makes a scale with the global one, or 0.
    [[nodiscard]] std::uint8_t code_of(float scale, float global) const {
        const float wanted = recipe_.global_divides ? scale * global : scale / global;
        if (!(wanted <= Float8E4M3FN::max)) return 0;
        const std::uint8_t code = Float8E4M3FN::encode(wanted);
        const float stored = Float8E4M3FN::decode(code);
        return (recipe_.global_divides ? stored / global : stored * global) == scale ? code : std::uint8_t{0};
    }

    // The block's scale under a global one; none where every option loses something.
    [[nodiscard]] std::optional<BlockScale> scale_under(const Options& block, float global) const {
        constexpr std::size_t order[] = {own_scale, 0, 1, 2, 3, 4, 5, 6};
        for (const std::size_t option : order) {
            if (!block.keeps(option)) continue;
            const float scale = block.scale(option);
            const std::uint8_t code = code_of(scale, global);
            if (code == 0) continue;
            auto s = stored_exactly(scale, ScaleType::float32, bits_of(block.amax));
            if (s) s->stored = code;
            return s;
        }
        return std::nullopt;
    }

    [[nodiscard]] bool fits(float global) const {
        if (!(global > 0) || !is_finite(global)) return false;
        return std::ranges::all_of(
            blocks_, [&](const Options& block) { return block.is_free() || scale_under(block, global).has_value(); });
    }

    [[nodiscard]] TwoLevels levels(float global) const {
        TwoLevels result{.global_scale = global, .scales = {}};
        result.scales.reserve(blocks_.size());
        for (const Options& block : blocks_) {
            const auto scale = block.is_free() ? std::optional(free(block)) : scale_under(block, global);
            result.scales.push_back(scale.value_or(BlockScale{}));  // there is one: `fits`
        }
        return result;
    }

    // Of a block of zeros, as the recipe's rule has it, or one with a NaN.
    [[nodiscard]] BlockScale free(const Options& block) const {
        BlockScale s;
        if (block.has_nan) {
            s.poisoned = true;
            s.stored = Float8E4M3FN::nan_code;
            s.decoded = s.factor = std::numeric_limits<float>::quiet_NaN();
        } else {
            s.stored = recipe_.rule == ScaleRule::nvfp4_torchao ? 8 : 0;
            s.multiply = s.all_finite = true;
        }
        return s;
    }

    const RowSource& source_;
    const BlockGrid& grid_;
    std::int64_t rows_;
    const Recipe& recipe_;
    const KernelTable& kernels_;
    std::vector<Options> blocks_;
};

}  // namespace

std::optional<TwoLevels> exact_two_levels(const RowSource& source, const BlockGrid& grid, std::int64_t matrices,
                                          const Recipe& recipe) {
    return Search(source, grid, matrices, recipe).run();
}

}  // namespace breccia::inline v0_3
