// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <span>

#include "quantize/exact_scale.hpp"
#include "quantize/scale_choice.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr float e2m1_magnitudes[] = {6, 4, 3, 2, 1.5F, 1, 0.5F};
constexpr std::uint8_t own_scale = std::size(e2m1_magnitudes);  // the option after amax over each of them
constexpr float significands[] = {8, 12, 10, 14, 9, 11, 13, 15};

// A block, and what its scale may be: the source's own, or its amax over one of E2M1's magnitudes.
struct Block {
    float amax, own;       // own: without its sign
    std::uint8_t kept;     // a bit for each option under which no value is lost
    bool has_nan, turned;  // turned: the source's scale is negative

    [[nodiscard]] bool is_free() const { return has_nan || amax == 0; }  // whatever the global scale
    [[nodiscard]] float scale(std::size_t option) const {
        return option == own_scale ? own : amax / e2m1_magnitudes[option];
    }
    [[nodiscard]] bool keeps(std::size_t option) const { return (kept >> option & 1U) != 0; }
};

// An option, and the E4M3 code that makes its scale with the global one; code 0 where every option loses something.
struct Chosen {
    std::uint8_t option, code;
};

class TwoLevels {
public:
    TwoLevels(const BlockWalk& walk, const Recipe& recipe)
        : walk_(walk),
          stored_(*walk.source.stored()),
          count_(walk.matrices * walk.grid.rows * walk.grid.grid_cols()),
          recipe_(recipe),
          kernels_(walk.source.kernels()),
          blocks_(count_),
          chosen_(count_) {}

    // The global scale, as the recipe stores it, under which the blocks then have the scales that they keep.
    std::optional<float> find() {
        // Nearly always every block keeps its values under the source's own scales: these are tried for all blocks
        // before any other.
        if (!read_blocks(true)) return any_scales();
        const std::optional<float> source = stored_.global_scale();
        if (source) return fits(*source) ? source : any_scales();
        const float own = largest_own();
        if (own == 0) return std::nullopt;  // every block is free
        const float global = global_for(own, top_of(own));
        return fits(global) ? global : any_scales();
    }

    void write(float global, const BlockWriter& to) const {
        to.write_global_scale(global);
        const std::int64_t size = walk_.grid.block_cols;
        walk_.for_each_run([&](const BlockRange& row, std::int64_t first, std::int64_t count, Scratch& scratch) {
            const std::uint8_t* own = stored_.codes(recipe_.element, row.matrix, row.begin_row);
            const std::int64_t index = to.block_at(row.matrix, row.begin_row, first);
            if (own != nullptr && keeps_own(index, count)) {
                std::copy_n(own + first * size / 2, count * size / 2,
                            to.codes(row.matrix, row.begin_row, first * size));
                for (std::int64_t i = index; i < index + count; ++i) *to.scale(i) = std::byte{chosen_.data()[i].code};
                return;
            }
            const float* x = walk_.read(row, first, count, scratch);
            for (std::int64_t j = 0; j < count; ++j) {
                const BlockScale s = scale(index + j);
                to.write_scale(index + j, s);
                to.encode(x + j * size, size, s, row.matrix, row.begin_row, (first + j) * size);
            }
        });
    }

private:
    // Among all options of each block.
    std::optional<float> any_scales() {
        if (!read_blocks(false)) return std::nullopt;
        float amax = 0;
        for (const Block& block : blocks())
            if (!block.is_free()) amax = std::max(amax, block.amax);
        if (amax == 0) return std::nullopt;
        if (const auto global = stored_.global_scale())
            if (fits(*global)) return global;
        if (const float own = largest_own(); own != 0) {
            const float global = global_for(own, top_of(own));
            if (fits(global)) return global;
        }
        // A large E4M3 number for the largest scale leaves the most numbers for the small ones. The block of the
        // largest scale need not be that of the largest value.
        for (const float magnitude : {6.0F, 4.0F})
            for (const float significand : significands)
                for (const float unit : {significand > 14 ? 16.0F : 32.0F, significand > 14 ? 8.0F : 16.0F}) {
                    const float global = global_for(amax / magnitude, significand * unit);
                    if (fits(global)) return global;
                }
        return std::nullopt;
    }

    [[nodiscard]] std::span<const Block> blocks() const { return {blocks_.data(), static_cast<std::size_t>(count_)}; }

    [[nodiscard]] float largest_own() const {
        float own = 0;
        for (const Block& block : blocks())
            if (!block.is_free() && block.keeps(own_scale)) own = std::max(own, block.own);
        return own;
    }

    // False where a block has no option; only_own: where it does not keep its values under the source's scale.
    bool read_blocks(bool only_own) {
        std::atomic<bool> possible = true;
        walk_.for_each_run([&](const BlockRange& row, std::int64_t first, std::int64_t count, Scratch& scratch) {
            if (possible.load(std::memory_order_relaxed) && !read_run(row, first, count, only_own, scratch))
                possible = false;
        });
        return possible;
    }

    bool read_run(const BlockRange& row, std::int64_t first, std::int64_t count, bool only_own, Scratch& scratch) {
        const std::int64_t size = walk_.grid.block_cols;
        const float* x = walk_.read(row, first, count, scratch);
        std::array<float, piece_cols> own;
        stored_.scales({row.matrix, row.begin_row, row.end_row, first * size, (first + 1) * size}, count, own.data());
        const PieceStats pieces(kernels_.quantize, x, count, size, false, true);
        const bool same_codes = stored_.codes(recipe_.element, row.matrix, row.begin_row) != nullptr;
        Block* block = blocks_.data() + (row.matrix * walk_.grid.rows + row.begin_row) * walk_.grid.grid_cols() + first;
        for (std::int64_t i = 0; i < count; ++i, ++block, x += size) {
            const auto at = static_cast<std::size_t>(i);
            const BlockStats stats = pieces.of(i);
            if (stats.has_infinity) return false;
            *block = {.amax = float_from_bits(stats.amax_bits),
                      .own = abs(own[at]),
                      .kept = 0,
                      .has_nan = stats.has_nan,
                      .turned = std::signbit(own[at])};
            if (!block->is_free() && !find_options(*block, x, only_own, same_codes)) return false;
        }
        return true;
    }

    // `same_codes`: the values are the products of the block's own scale and codes of this format.
    bool find_options(Block& block, const float* x, bool only_own, bool same_codes) const {
        constexpr float products_are_normal = 0x1p-100F;
        for (std::size_t option = only_own ? own_scale : 0; option <= own_scale; ++option) {
            bool kept = same_codes && option == own_scale && block.own >= products_are_normal && is_finite(block.own);
            if (!kept) {
                const auto s = stored_exactly(block.scale(option), ScaleType::float32, bits_of(block.amax));
                kept = s && kernels_[recipe_.element].keeps(x, walk_.grid.block_cols, *s);
            }
            if (kept) block.kept |= static_cast<std::uint8_t>(1U << option);
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
        std::uint8_t code = 0;
        kernels_[format_of<Float8E4M3FN>].encode_unscaled(&wanted, 1, &code);
        const float stored = Float8E4M3FN::decode(code);
        return (recipe_.global_divides ? stored / global : stored * global) == scale ? code : std::uint8_t{0};
    }

    [[nodiscard]] Chosen choice_under(const Block& block, float global) const {
        constexpr std::uint8_t order[] = {own_scale, 0, 1, 2, 3, 4, 5, 6};
        for (const std::uint8_t option : order) {
            if (!block.keeps(option)) continue;
            if (const std::uint8_t code = code_of(block.scale(option), global); code != 0) return {option, code};
        }
        return {0, 0};
    }

    // Whether each block has a scale under the global one: then `chosen_` holds them.
    [[nodiscard]] bool fits(float global) {
        if (!(global > 0) || !is_finite(global)) return false;
        float known = 0;  // the last block's own scale, and its code
        std::uint8_t code = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            const Block& block = blocks_.data()[i];
            if (block.is_free()) continue;
            if (block.own != known) code = code_of(block.own, global);
            known = block.own;
            Chosen& chosen = chosen_.data()[i];
            chosen = block.keeps(own_scale) && code != 0 ? Chosen{own_scale, code} : choice_under(block, global);
            if (chosen.code == 0) return false;
        }
        return true;
    }

    // Of a block of zeros, as the recipe's rule has it, or one with a NaN, whatever the global scale.
    [[nodiscard]] BlockScale free_scale(bool has_nan) const {
        BlockScale s;
        if (has_nan) {
            s.poisoned = true;
            s.stored = Float8E4M3FN::nan_code;
            s.decoded = s.factor = std::numeric_limits<float>::quiet_NaN();
        } else {
            s.stored = traits_of(recipe_.rule).least_code;
            s.multiply = s.all_finite = true;
        }
        return s;
    }

    [[nodiscard]] BlockScale scale(std::int64_t block) const {
        const Block& it = blocks_.data()[block];
        if (it.is_free()) return free_scale(it.has_nan);
        const Chosen chosen = chosen_.data()[block];
        const float scale = it.scale(chosen.option);
        BlockScale s = stored_exactly(scale, ScaleType::float32, bits_of(it.amax)).value_or(BlockScale{});
        s.stored = chosen.code;
        return s;
    }

    // Whether blocks keep their source's scales, and so codes of the same format.
    [[nodiscard]] bool keeps_own(std::int64_t first, std::int64_t count) const {
        for (std::int64_t i = first; i < first + count; ++i) {
            const Block& it = blocks_.data()[i];
            if (it.is_free() || it.turned || chosen_.data()[i].option != own_scale) return false;
        }
        return true;
    }

    const BlockWalk& walk_;
    const StoredBlocks& stored_;
    std::int64_t count_;
    const Recipe& recipe_;
    const KernelTable& kernels_;
    WorkBuffer<Block> blocks_;
    WorkBuffer<Chosen> chosen_;
};

}  // namespace

bool write_exact_two_levels(const BlockWalk& walk, const Recipe& recipe, const BlockWriter& to) {
    TwoLevels levels(walk, recipe);
    const std::optional<float> global = levels.find();
    if (global) levels.write(*global, to);
    return global.has_value();
}

}  // namespace breccia::inline v0_4
