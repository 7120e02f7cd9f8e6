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

// Elements of K whose sums take scales together.
std::int64_t block_of(const RowScales& how, bool packed) {
    return (how.tile_scales ? 1 : how.block_steps) * row_step(packed);
}

// The activations, where they are codes and the kernel's blocks, which may become shorter, each lie in one of theirs;
// else null.
const ScaledMatrix* codes_that_suit(const Product& product, bool packed, RowScales& how) {
    const ScaledMatrix* a = coded_activations(product);
    if (a == nullptr) return nullptr;
    const std::int64_t own = a->grid.block_cols, step = row_step(packed);
    if (own >= product.k || own % block_of(how, packed) == 0) return a;
    if (how.tile_scales || own % step != 0 || how.block_steps % (own / step) != 0) return nullptr;
    how.blocks_per_scale *= how.block_steps / (own / step);
    how.block_steps = own / step;
    return a;
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

bool pack(const Product& product, const ScaledMatrix* coded, bool packed, const RowScales& how, TermActivations& out) {
    const PairOrder order = packed ? PairOrder::packed : how.tile_scales ? PairOrder::neighbours : PairOrder::runs;
    Scratch scratch;
    bool scaled = true;
    const bool in_range = pack_terms(
        product, coded, round_up(product.k, row_step(packed)), order, out, scratch,
        [&](float* x, std::int64_t count) { scaled = scaled && (how.up == 1 || scale_up(x, count, how.up)); });
    if (!in_range || !scaled) return false;
    if (coded != nullptr) {
        const std::int64_t block = block_of(how, packed);
        out.scales.resize(static_cast<std::size_t>((product.k + block - 1) / block * tile_size));
        for (std::int64_t i = 0; i < out.rows; ++i)
            read_finer_scales(product.table, *coded, out.first + i, block, scratch.scales, out.scales.data() + i,
                              tile_size);
        // Sums that are to come down from 2^-48 meet these first, and must not become subnormal by them either.
        return how.up == 1 || all_within(out.scales, -40, 36);
    }
    return true;
}

// A thread's part of the weight.
class RowsInTiles {
public:
    RowsInTiles(const Product& product, const ScaledMatrix& w, const RowScales& how)
        : product_(product),
          w_(w),
          how_(how),
          scale_stride_(how.scale_codes ? 0 : w.grid.grid_cols() + tile_size),
          scales_(at_once * scale_stride_),
          zero_points_(static_cast<std::size_t>(w.zero_point.data != nullptr ? at_once * scale_stride_ : 0)),
          sums_(at_once * tile_size),
          turned_(at_once * tile_size) {}

    void multiply(const std::vector<TermActivations>& passes, std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; row += at_once) {
            const std::int64_t n = std::min(at_once, end - row);
            for (std::int64_t r = 0; r < n; ++r) {
                if (!how_.scale_codes) read_row_scales(row + r, scales_.data() + r * scale_stride_);
                if (w_.zero_point.data != nullptr)
                    read_zero_points(w_, row + r,
                                     zero_points_.data() + r / tile_size * tile_size * scale_stride_ + r % tile_size,
                                     tile_size);
            }
            for (const TermActivations& a : passes) {
                run(a, row, n);
                write(a, row, n);
            }
        }
    }

private:
    static constexpr std::int64_t at_once = 64;

    // Zeros after the last, for codes past the end: they are zeros too.
    void read_row_scales(std::int64_t row, float* out) {
        const std::int64_t count = w_.grid.grid_cols();
        read_scales(product_.table, w_, row / w_.grid.block_rows, 0, count, out);
        std::fill_n(out + count, tile_size, 0.0F);
    }

    void run(const TermActivations& a, std::int64_t row, std::int64_t n) {
        product_.table.matmul.bf16->tiles[static_cast<std::size_t>(w_.element)](
            {.codes = w_.data + row * w_.row_stride,
             .row_stride = w_.row_stride,
             .row_bytes = w_.row_bytes(),
             .rows = n,
             .scales = scales_.data(),
             .scale_stride = scale_stride_,
             .scales_of_row = w_.grid.grid_cols(),
             .block_steps = how_.block_steps,
             .blocks_per_scale = how_.blocks_per_scale,
             .tile_scales = how_.tile_scales,
             .code_block_shift = how_.code_block_shift,
             .scale_codes = how_.scale_codes
                                ? reinterpret_cast<const std::uint8_t*>(w_.scale.data) + row * w_.scale.row_stride
                                : nullptr,
             .scale_code_stride = how_.scale_codes ? w_.scale.row_stride : 0,
             .scale_type = w_.scale_type,
             .zero_points = w_.zero_point.data != nullptr ? zero_points_.data() : nullptr,
             .x_scales = a.scales.empty() ? nullptr : a.scales.data(),
             .x = a.x.data(),
             .vectors = a.vectors,
             .out = sums_.data()});
        for (std::int64_t r = 0; r < n; r += tile_size)
            product_.table.matmul.transpose(sums_.data() + r * tile_size, tile_size, turned_.data() + r, at_once);
    }

    void write(const TermActivations& a, std::int64_t row, std::int64_t n) {
        for (std::int64_t i = 0; i < a.rows; ++i) {
            float* sums = turned_.data() + i * at_once;
            for (std::int64_t r = 0; r < n; ++r) {
                for (std::int64_t t = 1; t < a.terms; ++t) sums[r] += sums[t * a.rows * at_once + r];
                sums[r] = w_.with_global(sums[r] * how_.down);
            }
            product_.write(a.first + i, row, n, sums);
        }
    }

    const Product& product_;
    const ScaledMatrix& w_;
    const RowScales& how_;
    std::int64_t scale_stride_;
    WorkBuffer<float> scales_;
    std::vector<std::uint8_t> zero_points_;  // zeros for rows past the end: they are looked up
    WorkBuffer<float> sums_, turned_;
};

std::optional<TermPlan<RowScales>> tile_plan(const Product& product, const ScaledMatrix& w) {
    if (kernel_of(product.table.matmul.bf16, &BF16Kernels::tiles, w.element) == nullptr) return {};
    if (product.k == 0 || w.col_stride != 1 || w.packed != is_packed(w.element)) return {};
    std::optional<RowScales> scales = row_scales(w, product.k);
    if (!scales || !zero_points_suit(w, *scales)) return {};
    const ScaledMatrix* coded = codes_that_suit(product, w.packed, *scales);
    return TermPlan(product, *scales, coded);
}

std::optional<Entry> suits_tiles(const Product& product, const ScaledMatrix& w) {
    const auto how = tile_plan(product, w);
    return how ? std::optional<Entry>({.terms = how->terms, .coded = how->coded != nullptr}) : std::nullopt;
}

Refusal by_tiles(const Product& product, const ScaledMatrix& w, const Limits& /*limits*/) {
    const TermPlan how = *tile_plan(product, w);  // NOLINT(bugprone-unchecked-optional-access): suits() had one
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    if (!scales_fit(w, how.blocks)) return Refusal::scales;
    const std::int64_t rows = product.total_rows();
    std::vector<TermActivations> passes;
    for (std::int64_t first = 0; first < rows; first += how.at_once()) {
        passes.push_back(how.pass(first, rows));
        if (!pack(product, how.coded, w.packed, how.blocks, passes.back())) return Refusal::range;
    }
    parallel_for(product.call, (product.n + tile_size - 1) / tile_size,
                 std::max<std::int64_t>(1, bytes_per_task / (tile_size * w.row_bytes())),
                 [&](std::int64_t begin, std::int64_t end) {
                     RowsInTiles(product, w, how.blocks)
                         .multiply(passes, begin * tile_size, std::min(end * tile_size, product.n));
                 });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::tiles =
    path_of_codes<suits_tiles, by_tiles>("tiles", {Refusal::zero_points, Refusal::scales, Refusal::range});

}  // namespace breccia::inline v0_4
