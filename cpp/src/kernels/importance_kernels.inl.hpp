// SPDX-License-Identifier: Apache-2.0
//
// The unit that searches scales by weighted squared error. A format is a few numbers here (CodeGrid), so that nothing
// is compiled once a format. Sums are in the order of squared_error: lane i adds elements i, i + 16, …, then halves.
// clang-format off: sorting would break the order
#include "kernels/encode.inl.hpp"
#include "kernels/lane_types.inl.hpp"
#include "kernels/scale_rules.inl.hpp"
// clang-format on

// A grid in registers.
struct GridLanes {
    F lowest, largest, smallest_normal, magic;

    BRECCIA_INLINE_MEMBER explicit GridLanes(const CodeGrid& g)
        : lowest(f_set(g.lowest)),
          largest(f_set(g.largest)),
          smallest_normal(f_set(g.smallest_normal)),
          magic(f_set(g.magic)) {}

    // The nearest number of a minifloat; the products are exact.
    BRECCIA_INLINE_MEMBER F minifloat(F scaled) const {
        scaled = f_clamp_magnitude(scaled, largest);
        const F step = f_mul(f_binade(scaled, smallest_normal), magic);
        return f_sub(f_add(scaled, step), step);
    }
    // The same of a number that is not negative.
    BRECCIA_INLINE_MEMBER F magnitude(F scaled) const {
        scaled = f_min(scaled, largest);
        const F binade = f_max(as_float(i_and(as_bits(scaled), i_set(0x7F80'0000))), smallest_normal);
        const F step = f_mul(binade, magic);
        return f_sub(f_add(scaled, step), step);
    }
    // The nearest code of an integer format that has a zero point, and is cut off, less the zero point.
    BRECCIA_INLINE_MEMBER F integer(F scaled) const {
        return f_sub(f_add(f_min(f_max(scaled, lowest), largest), f_set(integer_magic)), f_set(integer_magic));
    }
};

// A run of numbers and their weights, sixteen at a time; where there are fewer, zeros, which add nothing.
template <class Body>
BRECCIA_INLINE void for_each_lanes(const float* x, const float* weights, std::int64_t n, Body body) {
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) body(f_load(x + i), f_load(weights + i));
    if (i < n) body(f_load_n(x + i, n - i), f_load_n(weights + i, n - i));
}

BRECCIA_INLINE F weighted_square(F error, F weight) { return f_mul(f_mul(error, error), weight); }

static float weighted_error(const float* x, const float* weights, std::int64_t n, const CodeGrid& grid,
                            const BlockScale& s) {
    F sum_f32x16 = f_set(0.0F);
    CodeGrid moved = grid;
    moved.lowest -= s.zero_point;
    moved.largest -= s.zero_point;
    const GridLanes codes(grid.integer ? moved : grid);
    const F decoded = f_set(s.decoded * s.error_unit), unit = f_set(s.error_unit);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        const auto add = [&](F x_f32x16, F weight, F value) BRECCIA_INLINE_LAMBDA {
            const F error = f_sub(f_mul(value, decoded), f_mul(x_f32x16, unit));
            sum_f32x16 = f_add(sum_f32x16, weighted_square(error, weight));
        };
        if (grid.integer)
            for_each_lanes(x, weights, n, [&](F x_f32x16, F weight) BRECCIA_INLINE_LAMBDA {
                add(x_f32x16, weight, codes.integer(scale(x_f32x16)));
            });
        else
            for_each_lanes(x, weights, n, [&](F x_f32x16, F weight) BRECCIA_INLINE_LAMBDA {
                add(x_f32x16, weight, codes.minifloat(scale(x_f32x16)));
            });
    });
    return f_sum(sum_f32x16);
}

template <bool Ends>
static IntegerSums integer_sums(const float* x, const float* weights, std::int64_t n, float lowest, float largest,
                                const BlockScale& s) {
    const F zero = f_set(0.0F);
    F error_f32x16 = zero, cross_f32x16 = zero, square_f32x16 = zero, cut_f32x16 = zero, dead_f32x16 = zero;
    const GridLanes codes({.integer = true, .lowest = lowest, .largest = largest});
    const F decoded = f_set(s.decoded * s.error_unit), unit = f_set(s.error_unit);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        for_each_lanes(x, weights, n, [&](F x_f32x16, F weight) BRECCIA_INLINE_LAMBDA {
            const F quotient = scale(x_f32x16), scaled_x = f_mul(x_f32x16, unit);
            const F code = codes.integer(quotient);
            const F square = weighted_square(f_sub(f_mul(code, decoded), scaled_x), weight);
            const F weighted_code = f_mul(weight, code);
            error_f32x16 = f_add(error_f32x16, square);
            cross_f32x16 = f_add(cross_f32x16, f_mul(weighted_code, scaled_x));
            square_f32x16 = f_add(square_f32x16, f_mul(weighted_code, code));
            if constexpr (Ends) {
                const Mask beyond = m_or(f_less(codes.largest, quotient), f_less(quotient, codes.lowest));
                cut_f32x16 = f_add(cut_f32x16, f_select(beyond, square, zero));
                const Mask alive = m_or(f_less(code, zero), f_less(zero, code));
                dead_f32x16 = f_add(dead_f32x16, f_select(alive, zero, square));
            }
        });
    });
    return {f_sum(error_f32x16), f_sum(cross_f32x16), f_sum(square_f32x16), Ends ? f_sum(cut_f32x16) : 0.0F,
            Ends ? f_sum(dead_f32x16) : 0.0F};
}

// ---- Scales that are codes ----

static void coded_scales(const ScaleParams& p, CodedScales& scales) {
    const bool powers = p.type == ScaleType::e8m0;
    const std::int32_t least = traits_of(p.rule).least_code;
    scales.lowest = powers || least == 0 ? 1 : least;  // 0 is left to blocks of zeros
    scales.highest = powers ? 254 : std::int32_t{Float8E4M3FN::max_code};
    scales.from_zero = !powers && scales.lowest == 1;
    for (int code = scales.lowest; code <= scales.highest; ++code) {
        const auto i = static_cast<std::size_t>(code);
        if (powers) {
            scales.factor[i] = power_of_two<OneLane>(254 - code);
            scales.decoded[i] = power_of_two<OneLane>(code);
        } else {
            const float value = e4m3_value(code);
            scales.factor[i] = f_min(nvfp4_factor<OneLane>(value, p), f32_max);
            scales.decoded[i] = value * p.global_scale;
        }
    }
    for (int code = scales.lowest; code <= scales.highest; ++code) {
        int last = code;
        while (!powers && last < scales.highest && e4m3_value(last + 1) < 2 * e4m3_value(code)) ++last;
        // Codes up to 15 stand for n · 2^-9, of which odd n have no half that is a code.
        if (!powers && code < 8) last = std::max(last, std::min(15, scales.highest));
        scales.last[static_cast<std::size_t>(code)] = static_cast<std::uint8_t>(last);
    }
}

// A block under one scale: its error and, of that, the part of what is cut off.
struct CutError {
    float error, cut;
};

// `Vectors`: how long the block is, or 0 if that is for `n` to say. What a block's candidates share stays in registers.
template <int Vectors, bool WithCut>
BRECCIA_INLINE CutError coded_error(const float* x, const float* weights, std::int64_t n, const GridLanes& grid,
                                    float factor, float decoded, float unit) {
    const F factor_f32x16 = f_set(factor), value_f32x16 = f_set(decoded * unit), unit_f32x16 = f_set(unit);
    const F end_f32x16 = f_mul(grid.largest, value_f32x16), zero = f_set(0.0F);
    F error_f32x16 = zero, cut_f32x16 = zero;
    const auto add = [&](F x_f32x16, F weight) BRECCIA_INLINE_LAMBDA {
        const F magnitude = as_float(i_and(as_bits(x_f32x16), i_set(0x7FFF'FFFF)));
        const F scaled_x = f_mul(magnitude, unit_f32x16);
        const F value = grid.magnitude(f_mul(magnitude, factor_f32x16));
        const F square = weighted_square(f_sub(f_mul(value, value_f32x16), scaled_x), weight);
        error_f32x16 = f_add(error_f32x16, square);
        if constexpr (WithCut) cut_f32x16 = f_add(cut_f32x16, f_select(f_less(end_f32x16, scaled_x), square, zero));
    };
    if constexpr (Vectors == 0)
        for_each_lanes(x, weights, n, add);
    else
        for (int v = 0; v < Vectors; ++v) add(f_load(x + v * lanes), f_load(weights + v * lanes));
    return {f_sum(error_f32x16), WithCut ? f_sum(cut_f32x16) : 0.0F};
}

// Every code whose scale can be the best. Above the least scale that cuts nothing off stand those below its double: the
// numbers of the double's grid within the block's range are numbers of the scale's own. Below it scales are tried until
// what is cut off is by itself as much as the best error: what a smaller scale cuts off is more.
static int last_code(const CodedScales& scales, int own, float amax, float largest) {
    const auto decoded = [&](int code) BRECCIA_INLINE_LAMBDA { return scales.decoded[static_cast<std::size_t>(code)]; };
    int whole = own;
    while (whole > scales.lowest && decoded(whole - 1) * largest >= amax) --whole;
    while (whole < scales.highest && decoded(whole) * largest < amax) ++whole;
    const int last = scales.last[static_cast<std::size_t>(whole)];
    return last < own ? own : last;
}

template <int Vectors>
static int best_code(const float* x, const float* weights, std::int64_t n, const GridLanes& grid,
                     const CodedScales& scales, int own, int last, float unit) {
    const auto decoded = [&](int code) BRECCIA_INLINE_LAMBDA { return scales.decoded[static_cast<std::size_t>(code)]; };
    const auto factor = [&](int code) BRECCIA_INLINE_LAMBDA { return scales.factor[static_cast<std::size_t>(code)]; };
    int best = own;
    float best_error = coded_error<Vectors, false>(x, weights, n, grid, factor(own), decoded(own), unit).error;
    for (int code = own + 1; code <= last; ++code) {
        const float error = coded_error<Vectors, false>(x, weights, n, grid, factor(code), decoded(code), unit).error;
        if (error < best_error) best_error = error, best = code;
    }
    for (int code = own - 1; code >= scales.lowest; --code) {
        const CutError e = coded_error<Vectors, true>(x, weights, n, grid, factor(code), decoded(code), unit);
        const bool nearer = own - code < (best < own ? own - best : best - own);
        if (e.error < best_error || (e.error == best_error && nearer)) best_error = e.error, best = code;
        if (e.cut >= best_error) break;
    }
    return best;
}

static void search_block(const WeightedBlocks& b, std::int64_t i, const CodeGrid& g, const GridLanes& grid,
                         const CodedScales& scales, std::uint8_t& code) {
    const float *x = b.x + i * b.block, *weights = b.weights + i * b.block;
    I amax_i32x16 = i_set(0);
    for_each_lanes(x, weights, b.block, [&](F x_f32x16, F) BRECCIA_INLINE_LAMBDA {
        amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(x_f32x16), i_set(0x7FFF'FFFF)));
    });
    const std::int32_t amax_bits = i_max_lane(amax_i32x16);
    const bool lost = code == 0 && scales.from_zero;
    const int own = lost ? scales.lowest : code;
    if (amax_bits == 0 || amax_bits >= 0x7F80'0000 || own < scales.lowest || own > scales.highest) return;
    const int exponent = (amax_bits >> 23) - 127, last = last_code(scales, own, as_float(amax_bits), g.largest);
    const float unit = exp2i(exponent < -126 ? 126 : (exponent > 126 ? -126 : -exponent));
    int best;
    if (b.block == lanes)
        best = best_code<1>(x, weights, b.block, grid, scales, own, last, unit);
    else if (b.block == 2 * lanes)
        best = best_code<2>(x, weights, b.block, grid, scales, own, last, unit);
    else
        best = best_code<0>(x, weights, b.block, grid, scales, own, last, unit);
    if (lost) {
        const auto i_best = static_cast<std::size_t>(best);
        const float factor = scales.factor[i_best], decoded = scales.decoded[i_best];
        const float error = coded_error<0, false>(x, weights, b.block, grid, factor, decoded, unit).error;
        if (!(error < coded_error<0, false>(x, weights, b.block, grid, 0.0F, 0.0F, unit).error)) return;
    }
    code = static_cast<std::uint8_t>(best);
}

// ---- Sixteen blocks side by side: a lane tries the codes of its own block, in the order of best_code ----

inline constexpr std::int64_t longest_turned = 128;  // elements of a block: both arrays stay in the first-level cache

struct TurnedBlocks {
    alignas(64) float x[longest_turned * lanes];  // magnitudes, in the unit of each block
    alignas(64) float weights[longest_turned * lanes];
    std::int64_t block;
    F amax_f32x16, unit_f32x16, binade_f32x16;  // the unit is 1 over the binade of the amax
};

struct LaneErrors {
    F error, cut;
};

// Added in the order of coded_error, so that a block's sums have the same bits.
template <bool WithCut>
BRECCIA_INLINE LaneErrors turned_errors(const TurnedBlocks& b, const GridLanes& grid, F factor, F value) {
    const F end = f_mul(grid.largest, value), zero = f_set(0.0F);
    F errors_f32x16[lanes], cuts_f32x16[lanes];
    for (std::int64_t i = 0; i < lanes; ++i) {
        F error = zero, cut = zero;
        for (std::int64_t k = i; k < b.block; k += lanes) {
            const F x = f_load(b.x + k * lanes);
            const F code = grid.magnitude(f_mul(x, factor));
            const F square = weighted_square(f_sub(f_mul(code, value), x), f_load(b.weights + k * lanes));
            error = f_add(error, square);
            if constexpr (WithCut) cut = f_add(cut, f_select(f_less(end, x), square, zero));
        }
        errors_f32x16[i] = error;
        if constexpr (WithCut) cuts_f32x16[i] = cut;
    }
    return {sum_of_halves(errors_f32x16), WithCut ? sum_of_halves(cuts_f32x16) : zero};
}

template <bool WithCut>
static LaneErrors errors_of_codes(const TurnedBlocks& b, const GridLanes& grid, const ScaleParams& p, I codes) {
    F factor, decoded;
    if (p.type == ScaleType::e8m0) {
        factor = power_of_two<SixteenLanes>(i_sub(i_set(254), codes));
        decoded = power_of_two<SixteenLanes>(codes);
    } else {
        const F value = e4m3_value(codes);
        factor = f_min(nvfp4_factor<SixteenLanes>(value, p), f_set(f32_max));
        decoded = f_mul(value, f_set(p.global_scale));
    }
    return turned_errors<WithCut>(b, grid, f_mul(factor, b.binade_f32x16), f_mul(decoded, b.unit_f32x16));
}

// Whether all amaxes are 2^-40 to 2^40: in the unit of a block its numbers, and factors for them, stay in range.
static bool turn_blocks(const float* x, const float* weights, std::int64_t block, TurnedBlocks& b) {
    I amax_i32x16 = i_set(0);
    b.block = block;
    for (std::int64_t k = 0; k < block; k += lanes) {
        transpose_16x16(x + k, block, b.x + k * lanes, lanes);
        transpose_16x16(weights + k, block, b.weights + k * lanes, lanes);
    }
    for (std::int64_t k = 0; k < block; ++k) {
        const I magnitude = i_and(as_bits(f_load(b.x + k * lanes)), i_set(0x7FFF'FFFF));
        amax_i32x16 = i_max(amax_i32x16, magnitude);
        f_store(b.x + k * lanes, as_float(magnitude));
    }
    const I below = i_set((127 - 40) << 23), above = i_set((127 + 40) << 23);
    if (!i_none(i_less(amax_i32x16, below)) || !i_none(i_less(above, amax_i32x16))) return false;
    b.amax_f32x16 = as_float(amax_i32x16);
    b.unit_f32x16 = as_float(i_shl<23>(i_sub(i_set(254), i_shr<23>(amax_i32x16))));
    b.binade_f32x16 = as_float(i_and(amax_i32x16, i_set(0x7F80'0000)));
    for (std::int64_t k = 0; k < block; ++k) f_store(b.x + k * lanes, f_mul(f_load(b.x + k * lanes), b.unit_f32x16));
    return true;
}

static bool search_sixteen(const float* x, const float* weights, std::int64_t block, const CodeGrid& g,
                           const GridLanes& grid, const CodedScales& scales, const ScaleParams& p,
                           std::uint8_t* codes) {
    TurnedBlocks b;
    if (!turn_blocks(x, weights, block, b)) return false;
    alignas(64) float amax[lanes];
    alignas(64) std::int32_t lasts[lanes];
    f_store(amax, b.amax_f32x16);
    for (int i = 0; i < lanes; ++i) {
        if (codes[i] < scales.lowest || codes[i] > scales.highest) return false;
        lasts[i] = last_code(scales, codes[i], amax[i], g.largest);
    }
    const I own = i_load_bytes(codes), last = i_load(lasts), one = i_set(1);
    const F most = f_set(std::numeric_limits<float>::infinity());
    I best = own;
    F best_error = errors_of_codes<false>(b, grid, p, own).error;
    for (I code = i_add(own, one); !i_none(i_less(code, i_add(last, one))); code = i_add(code, one)) {
        const F error = f_select(i_less(last, code), most, errors_of_codes<false>(b, grid, p, code).error);
        const Mask better = f_less(error, best_error);
        best_error = f_select(better, error, best_error);
        best = i_select(better, code, best);
    }
    I lowest = i_set(scales.lowest);  // a lane's, once what it cuts off is too much
    for (I code = i_sub(own, one); !i_none(i_less(i_sub(lowest, one), code)); code = i_sub(code, one)) {
        const LaneErrors e = errors_of_codes<true>(b, grid, p, i_max(code, one));
        const F error = f_select(i_less(code, lowest), most, e.error);
        // Of equal errors the nearer code's counts as less.
        const I away = i_max(i_sub(best, own), i_sub(own, best));
        const F next = as_float(i_add(as_bits(best_error), one));
        const Mask better = f_less(error, f_select(i_less(i_sub(own, code), away), next, best_error));
        best_error = f_select(better, error, best_error);
        best = i_select(better, code, best);
        lowest = i_select(f_less(e.cut, best_error), lowest, i_max(lowest, code));
    }
    i_store_bytes(codes, best);
    return true;
}

static void search_codes(const WeightedBlocks& b, const CodeGrid& g, const CodedScales& scales, const ScaleParams& p,
                         std::uint8_t* codes) {
    const GridLanes grid(g);
    // Where a global scale is out of all proportion a factor in units of the block may leave the range of floats.
    const bool in_range =
        p.type == ScaleType::e8m0 || (scales.factor[static_cast<std::size_t>(scales.lowest)] < exp2i(80) &&
                                      scales.factor[static_cast<std::size_t>(scales.highest)] > exp2i(-80));
    const bool side_by_side = in_range && b.block % lanes == 0 && b.block <= longest_turned;
    for (std::int64_t i = 0; i < b.blocks;) {
        const float *x = b.x + i * b.block, *weights = b.weights + i * b.block;
        if (side_by_side && b.blocks - i >= lanes &&
            search_sixteen(x, weights, b.block, g, grid, scales, p, codes + i)) {
            i += lanes;
            continue;
        }
        const std::int64_t end = b.blocks - i < lanes ? b.blocks : i + lanes;
        for (; i < end; ++i) search_block(b, i, g, grid, scales, codes[i]);
    }
}

static consteval ImportanceKernels make_importance_kernels() {
    return {.coded_scales = coded_scales,
            .search_codes = search_codes,
            .error = weighted_error,
            .integer_sums = integer_sums<false>,
            .integer_sums_and_ends = integer_sums<true>};
}
