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
        // The source's own scales are tried before any other, and are nearly always the ones: of all blocks first.
        if (!read_blocks(true)) return any_scales();
        const std::optional<float> source = source_.own_global_scale();
        if (source) return fits(*source) ? levels(*source) : any_scales();
        const float own = largest_own();
        if (own == 0) return std::nullopt;  // every block is free
        const float global = global_for(own, top_of(own));
        return fits(global) ? levels(global) : any_scales();
    }

private:
    // Among all options of each block.
    std::optional<TwoLevels> any_scales() {
        if (!read_blocks(false)) return std::nullopt;
        float amax = 0;
        for (const Options& block : blocks_)
            if (!block.is_free()) amax = std::max(amax, block.amax);
        if (amax == 0) return std::nullopt;
        if (const auto global = source_.own_global_scale())
            if (fits(*global)) return levels(*global);
        if (const float own = largest_own(); own != 0) {
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

    [[nodiscard]] float largest_own() const {
        float own = 0;
        for (const Options& block : blocks_)
            if (!block.is_free() && block.keeps(own_scale)) own = std::max(own, block.own);
        return own;
    }

    // False where a block has no option; only_own: where it does not keep its values under the source's scale.
    bool read_blocks(bool only_own) {
        const std::int64_t columns = grid_.grid_cols();
        const std::int64_t step = std::max<std::int64_t>(1, piece_cols / grid_.block_cols);
        blocks_.assign(static_cast<std::size_t>(rows_ * columns), {});
        std::atomic<bool> possible = true;
        const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / std::max<std::int64_t>(grid_.cols, 1));
        parallel_for(rows_, grain, [&](std::int64_t begin, std::int64_t end) {
            Scratch scratch;
            for (std::int64_t row = begin; row < end; ++row)
                for (std::int64_t block = 0; block < columns; block += step) {
                    if (!possible.load(std::memory_order_relaxed)) return;
                    if (!read_run(row, block, std::min(step, columns - block), only_own, scratch)) possible = false;
                }
        });
        return possible;
    }

    bool read_run(std::int64_t row, std::int64_t first, std::int64_t count, bool only_own, Scratch& scratch) {
        const std::int64_t size = grid_.block_cols, matrix = row / grid_.rows, in_matrix = row % grid_.rows;
        const float* x = source_.read(matrix, in_matrix, first * size, count * size, scratch);
        for (std::int64_t i = first; i < first + count; ++i, x += size)
            if (!read_block(blocks_[static_cast<std::size_t>(row * grid_.grid_cols() + i)], x,
                            {matrix, in_matrix, in_matrix + 1, i * size, (i + 1) * size, 1}, only_own))
                return false;
        return true;
    }

    bool read_block(Options& block, const float* x, const BlockRange& range, bool only_own) {
        const std::int64_t size = grid_.block_cols;
        const BlockStats stats = kernels_.quantize.stats(x, size, false);
        block.has_nan = stats.has_nan;
        block.amax = float_from_bits(stats.amax_bits);
        block.own = abs(source_.own_scale(range).value_or(0.0F));
        if (stats.has_infinity) return false;
        if (block.is_free()) return true;
        for (std::size_t option = only_own ? own_scale : 0; option <= own_scale; ++option) {
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

    // The option by which the block's scale is a product of the global one and an E4M3 code, and that code; code 0
    // where every such option loses something.
    struct Chosen {
        std::size_t option = 0;
        std::uint8_t code = 0;
    };

    [[nodiscard]] Chosen choice_under(const Options& block, float global) const {
        constexpr std::size_t order[] = {own_scale, 0, 1, 2, 3, 4, 5, 6};
        for (const std::size_t option : order) {
            if (!block.keeps(option)) continue;
            if (const std::uint8_t code = code_of(block.scale(option), global); code != 0) return {option, code};
        }
        return {};
    }

    // Whether each block has a scale under the global one: then `chosen_` holds them.
    [[nodiscard]] bool fits(float global) {
        if (!(global > 0) || !is_finite(global)) return false;
        chosen_.resize(blocks_.size());
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            if (blocks_[i].is_free()) continue;
            chosen_[i] = choice_under(blocks_[i], global);
            if (chosen_[i].code == 0) return false;
        }
        return true;
    }

    [[nodiscard]] TwoLevels levels(float global) const {
        TwoLevels result{.global_scale = global, .scales = {}};
        result.scales.reserve(blocks_.size());
        for (std::size_t i = 0; i < blocks_.size(); ++i)
            result.scales.push_back(blocks_[i].is_free() ? free(blocks_[i]) : kept(blocks_[i], chosen_[i]));
        return result;
    }

    static BlockScale kept(const Options& block, Chosen chosen) {
        const float scale = block.scale(chosen.option);
        BlockScale s = stored_exactly(scale, ScaleType::float32, bits_of(block.amax)).value_or(BlockScale{});
        s.stored = chosen.code;
        return s;
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
    std::vector<Chosen> chosen_;
};

}  // namespace

std::optional<TwoLevels> exact_two_levels(const RowSource& source, const BlockGrid& grid, std::int64_t matrices,
                                          const Recipe& recipe) {
    return Search(source, grid, matrices, recipe).run();
}

}  // namespace breccia::inline v0_3
