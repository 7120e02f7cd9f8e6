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
    scales.lowest = powers ? 1 : (p.rule == ScaleRule::nvfp4_torchao ? 8 : 1);
    scales.highest = powers ? 254 : std::int32_t{Float8E4M3FN::max_code};
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
template <int Vectors>
static int best_code(const float* x, const float* weights, std::int64_t n, const GridLanes& grid, float largest,
                     const CodedScales& scales, int own, float amax, float unit) {
    const auto decoded = [&](int code) BRECCIA_INLINE_LAMBDA { return scales.decoded[static_cast<std::size_t>(code)]; };
    const auto factor = [&](int code) BRECCIA_INLINE_LAMBDA { return scales.factor[static_cast<std::size_t>(code)]; };
    int whole = own;
    while (whole > scales.lowest && decoded(whole - 1) * largest >= amax) --whole;
    while (whole < scales.highest && decoded(whole) * largest < amax) ++whole;
    int last = scales.last[static_cast<std::size_t>(whole)];
    if (last < own) last = own;
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

static void search_codes(const WeightedBlocks& b, const CodeGrid& g, const CodedScales& scales, std::uint8_t* codes) {
    const GridLanes grid(g);
    for (std::int64_t i = 0; i < b.blocks; ++i) {
        const float *x = b.x + i * b.block, *weights = b.weights + i * b.block;
        I amax_i32x16 = i_set(0);
        for_each_lanes(x, weights, b.block, [&](F x_f32x16, F) BRECCIA_INLINE_LAMBDA {
            amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(x_f32x16), i_set(0x7FFF'FFFF)));
        });
        const std::int32_t amax_bits = i_max_lane(amax_i32x16);
        const int own = codes[i];
        if (amax_bits == 0 || amax_bits >= 0x7F80'0000 || own < scales.lowest || own > scales.highest) continue;
        const int exponent = (amax_bits >> 23) - 127;
        const float unit = exp2i(exponent < -126 ? 126 : (exponent > 126 ? -126 : -exponent)),
                    amax = as_float(amax_bits);
        int best;
        if (b.block == lanes)
            best = best_code<1>(x, weights, b.block, grid, g.largest, scales, own, amax, unit);
        else if (b.block == 2 * lanes)
            best = best_code<2>(x, weights, b.block, grid, g.largest, scales, own, amax, unit);
        else
            best = best_code<0>(x, weights, b.block, grid, g.largest, scales, own, amax, unit);
        codes[i] = static_cast<std::uint8_t>(best);
    }
}

static consteval ImportanceKernels make_importance_kernels() {
    return {.coded_scales = coded_scales,
            .search_codes = search_codes,
            .error = weighted_error,
            .integer_sums = integer_sums<false>,
            .integer_sums_and_ends = integer_sums<true>};
}
