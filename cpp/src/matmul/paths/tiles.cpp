// SPDX-License-Identifier: Apache-2.0
//
// Up to 16 activations, or terms of such, by a weight whose rows are read in place, a line of codes of 16 rows at a
// time: for matrix tiles, which take rows of codes as they lie.
#include <algorithm>
#include <bit>

#include "matmul/bf16_terms.hpp"
#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t tile_size = 16, byte_block = 32;

// How a kernel is to apply scales: the fields of that name in TileRows.
struct RowScales {
    std::int64_t block_steps = 1, blocks_per_scale = 1;
    bool tile_scales = false;
    int code_block_shift = 0;
    bool scale_codes = false;  // as they lie, in the place of numbers
    // Activations are multiplied by `up` and results by `down`: codes times E4M3 scales come out 2^-112 as large.
    float up = 1, down = 1;

    // See TermPlan.
    [[nodiscard]] std::int64_t elements(std::int64_t step) const { return (tile_scales ? 1 : block_steps) * step; }
    bool shorten(std::int64_t to, std::int64_t step) {
        if (tile_scales || to % step != 0 || block_steps % (to / step) != 0) return false;
        blocks_per_scale *= block_steps / (to / step);
        block_steps = to / step;
        return true;
    }
};

std::optional<RowScales> row_scales(const ScaledMatrix& w, std::int64_t k) {
    const std::int64_t own = w.grid.block_cols, step = row_step(w.packed);
    if (own >= k) return RowScales{.block_steps = panel_k / step, .blocks_per_scale = k};
    if (own % step == 0) {
        std::int64_t steps = panel_k / step;
        while (own / step % steps != 0) --steps;
        return RowScales{.block_steps = steps, .blocks_per_scale = own / step / steps};
    }
    const bool in_place = is_coded(w.scale_type) && w.grid.block_rows == 1 && w.scale.col_stride == 1;
    const bool powers_of_two = w.scale_type == ScaleType::e8m0;
    if (!w.packed) {
        if (own != byte_block) return {};
        return RowScales{.tile_scales = true, .scale_codes = in_place && powers_of_two};
    }
    if ((own != 16 && own != 32 && own != 64) || !in_place) return {};
    RowScales how{.block_steps = panel_k / step,
                  .blocks_per_scale = k,
                  .code_block_shift = std::countr_zero(static_cast<std::uint64_t>(own)),
                  .scale_codes = true};
    if (powers_of_two) return how;
    if (w.element != format_of<Float4E2M1FN>) return {};
    how.up = exp2i(64);
    how.down = exp2i(112 - 64);
    return how;
}

// Whether the scales' values allow it where they are to go into codes.
bool scales_fit(const ScaledMatrix& w, const RowScales& how) {
    if (how.code_block_shift == 0) return true;
    return w.scale_type == ScaleType::e8m0 ? powers_of_two_keep_normal(w) : e4m3_scales_are_positive(w);
}

// Whether there are no zero points, or each step of a row has one.
bool zero_points_suit(const ScaledMatrix& w, const RowScales& how) {
    return w.zero_point.data == nullptr || (w.packed && how.code_block_shift == 0 && zero_points_are_bytes(w));
}

// Multiplies numbers by a power of two. False where one is neither zero nor in [2^-40, 2^36]: 2^64 times these,
// products with the smallest scaled codes and with the smaller terms of a number are not subnormal.
bool scale_up(float* x, std::int64_t n, float by) {
    std::uint32_t outside = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        outside |= out_of_range(x[i], -40, 36);
        x[i] *= by;
    }
    return outside == 0;
}

// A thread's part of the weight.
struct RowsInTiles {
    static constexpr std::int64_t at_once = 64;
    const Product& product;
    const ScaledMatrix& w;
    const RowScales& how;
    std::int64_t scale_stride = how.scale_codes ? 0 : w.grid.grid_cols() + tile_size;
    WorkBuffer<float> scales = WorkBuffer<float>(at_once * scale_stride);
    // Zeros for rows past the end: they are looked up.
    std::vector<std::uint8_t> zero_points =
        std::vector<std::uint8_t>(static_cast<std::size_t>(w.zero_point.data != nullptr ? at_once * scale_stride : 0));
    WorkBuffer<float> sums = WorkBuffer<float>(at_once * tile_size), turned = WorkBuffer<float>(at_once * tile_size);

    void multiply(const OneOrMore<TermActivations>& calls, std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; row += at_once) {
            const std::int64_t n = std::min(at_once, end - row);
            for (std::int64_t r = 0; r < n; ++r) {
                if (!how.scale_codes) read_row_scales(row + r, scales.data() + r * scale_stride);
                if (w.zero_point.data != nullptr)
                    read_zero_points(w, row + r,
                                     zero_points.data() + r / tile_size * tile_size * scale_stride + r % tile_size,
                                     tile_size);
            }
            for (const TermActivations& a : calls) {
                run(a, row, n);
                write(a, row, n);
            }
        }
    }

    // Zeros after the last, for codes past the end: they are zeros too.
    void read_row_scales(std::int64_t row, float* out) {
        const std::int64_t count = w.grid.grid_cols();
        read_scales(product.table, w, row / w.grid.block_rows, 0, count, out);
        std::fill_n(out + count, tile_size, 0.0F);
    }

    void run(const TermActivations& a, std::int64_t row, std::int64_t n) {
        product.table.matmul.bf16->tiles[static_cast<std::size_t>(w.element)](
            {.codes = w.data + row * w.row_stride,
             .row_stride = w.row_stride,
             .row_bytes = w.row_bytes(),
             .rows = n,
             .scales = scales.data(),
             .scale_stride = scale_stride,
             .scales_of_row = w.grid.grid_cols(),
             .block_steps = how.block_steps,
             .blocks_per_scale = how.blocks_per_scale,
             .tile_scales = how.tile_scales,
             .code_block_shift = how.code_block_shift,
             .scale_codes = how.scale_codes
                                ? reinterpret_cast<const std::uint8_t*>(w.scale.data) + row * w.scale.row_stride
                                : nullptr,
             .scale_code_stride = how.scale_codes ? w.scale.row_stride : 0,
             .scale_type = w.scale_type,
             .zero_points = w.zero_point.data != nullptr ? zero_points.data() : nullptr,
             .x_scales = a.scales.empty() ? nullptr : a.scales.data(),
             .x = a.x.data(),
             .vectors = a.vectors,
             .out = sums.data()});
        for (std::int64_t r = 0; r < n; r += tile_size)
            product.table.matmul.transpose(sums.data() + r * tile_size, tile_size, turned.data() + r, at_once);
    }

    void write(const TermActivations& a, std::int64_t row, std::int64_t n) {
        for (std::int64_t i = 0; i < a.rows; ++i) {
            float* line = turned.data() + i * at_once;
            for (std::int64_t r = 0; r < n; ++r) {
                for (std::int64_t t = 1; t < a.terms; ++t) line[r] += line[t * a.rows * at_once + r];
                line[r] = w.with_global(line[r] * how.down);
            }
            product.write(a.first + i, row, n, line);
        }
    }
};

std::optional<TermPlan<RowScales>> tile_plan(const Product& product, const ScaledMatrix& w) {
    if (kernel_of(product.table.matmul.bf16, &BF16Kernels::tiles, w.element) == nullptr) return {};
    if (product.k == 0 || w.col_stride != 1 || w.packed != is_packed(w.element)) return {};
    const std::optional<RowScales> scales = row_scales(w, product.k);
    if (!scales || !zero_points_suit(w, *scales)) return {};
    return TermPlan(product, *scales, row_step(w.packed));
}

std::optional<Kinds> suits_tiles(const Product& product, const ScaledMatrix& w) {
    const auto how = tile_plan(product, w);
    return how ? std::optional(how->kind(product)) : std::nullopt;
}

Refusal by_tiles(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    const TermPlan how = *tile_plan(product, w);  // NOLINT(bugprone-unchecked-optional-access): suits() had one
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    if (!scales_fit(w, how.blocks)) return Refusal::scales;
    const float up = how.blocks.up;
    const PairOrder order = w.packed                 ? PairOrder::packed
                            : how.blocks.tile_scales ? PairOrder::neighbours
                                                     : PairOrder::runs;
    Scratch scratch;
    const auto calls = how.calls(product.total_rows(), [&](TermActivations& call) {
        bool fit = true;
        const auto adjust = [&](float* x, std::int64_t count) { fit = fit && (up == 1 || scale_up(x, count, up)); };
        if (!pack_terms(product, how.coded, round_up(product.k, how.unit), order, call, scratch, adjust) || !fit)
            return false;
        if (how.coded == nullptr) return true;
        how.read_scales(product, product.k, tile_size, scratch, call);
        // Sums that are to come down from 2^-48 meet these first, and must not become subnormal by them either.
        return up == 1 || all_within(call.scales, -40, 36);
    });
    if (calls.size() == 0) return Refusal::range;
    parallel_for(product.call, (product.n + tile_size - 1) / tile_size,
                 std::max<std::int64_t>(1, bytes_per_task / (tile_size * w.row_bytes())),
                 [&](std::int64_t begin, std::int64_t end) {
                     RowsInTiles{product, w, how.blocks}.multiply(calls, begin * tile_size,
                                                                  std::min(end * tile_size, product.n));
                 });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::tiles =
    path_of_codes<suits_tiles, by_tiles>("tiles", {Refusal::zero_points, Refusal::scales, Refusal::range});

}  // namespace breccia::inline v0_4
