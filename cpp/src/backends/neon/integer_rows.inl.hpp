// SPDX-License-Identifier: Apache-2.0
//
// One activation by rows of 4-bit codes in place, in integers: codes are looked up as signed bytes, the activation is a
// sum of signed bytes (Digits), and sdot adds up four products a lane; twice that makes a lane of a DigitStep, eight
// elements. A sum is exact; it becomes a float once and takes its scale. See also avx2/integer_rows.inl.hpp.

/// Codes as signed bytes: a code's value is byte * unit.
template <class C>
struct NibbleBytes {
    static constexpr float unit = C::decode(1);
    static constexpr auto table = [] {
        struct {
            alignas(16) std::int8_t byte[16];
        } of{};
        for (int i = 0; i < 16; ++i)
            of.byte[i] = static_cast<std::int8_t>(C::decode(static_cast<std::uint8_t>(i)) / C::decode(1));
        return of;
    }();
};

/// 32 codes of a row: those of even and of odd k.
struct NibblePair {
    int8x16_t even, odd;
};

/// Sums of products with `Count` digits, as the integers that they stand for. `digits`: from the vector's first on.
template <int Count>
BRECCIA_INLINE int32x4_t nibble_sums(NibblePair codes, const std::int8_t (*digits)[128], int vector) {
    const auto sums = [&](int d) BRECCIA_INLINE_LAMBDA {
        const std::int8_t* of = digits[d] + 16 * vector;
        return vdotq_s32(vdotq_s32(vdupq_n_s32(0), codes.even, vld1q_s8(of)), codes.odd, vld1q_s8(of + 64));
    };
    int32x4_t total = sums(0);
#pragma GCC unroll 2
    for (int d = 1; d < Count; ++d) total = vaddq_s32(vshlq_n_s32(total, 8), sums(d));
    return total;
}

/// The scales of a quarter of a step, of which `PerHalf` belong to a half; with 0 there is one to a step or to several.
template <int PerHalf>
BRECCIA_INLINE float32x4_t scales_of_quarter(const float* scales, int quarter) {
    if constexpr (PerHalf == 4)
        return vcombine_f32(vdup_n_f32(scales[2 * quarter]), vdup_n_f32(scales[2 * quarter + 1]));
    return vdupq_n_f32(scales[PerHalf * quarter / 2]);
}

/// Rows of codes by an activation of digits, `Rows` at a time.
template <class C, int PerHalf, bool HasZero, int Rows>
struct NibbleRows {
    const IntegerGemv& g;
    const DigitStep* step;
    const std::uint8_t* codes[Rows] = {};
    const float* scales[Rows] = {};
    const std::uint8_t* zeros[Rows] = {};
    float32x4_t total_f32x4[Rows] = {};

    template <int Count>
    BRECCIA_INLINE_MEMBER void by_digits() {
        constexpr int first = Count < DigitStep::first ? Count : DigitStep::first;
        const int8x16_t table = vld1q_s8(NibbleBytes<C>::table.byte);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            float32x4_t unit_f32x4 = vld1q_f32(step->units + 4 * quarter);
            if constexpr (Count == 2) unit_f32x4 = vmulq_n_f32(unit_f32x4, 256.0F);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const auto less_zero_point = [&](int32x4_t sum, int of) BRECCIA_INLINE_LAMBDA {
                    if constexpr (!HasZero) return sum;
                    int32x4_t offset = vld1q_s32(step->offsets[of] + 4 * quarter);
                    if constexpr (Count == 2) offset = vshrq_n_s32(offset, 8);
                    return vmlaq_n_s32(sum, offset, static_cast<std::int8_t>(*zeros[r]));
                };
                const uint8x16_t bytes = vld1q_u8(codes[r] + 16 * quarter);
                const NibblePair pair = {vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15))),
                                         vqtbl1q_s8(table, vshrq_n_u8(bytes, 4))};
                const int32x4_t sum = less_zero_point(nibble_sums<first>(pair, step->digits, quarter), 0);
                float32x4_t sum_f32x4 = vcvtq_f32_s32(sum);
                if constexpr (Count > first) {
                    const int32x4_t small =
                        less_zero_point(nibble_sums<Count - first>(pair, step->digits + first, quarter), 1);
                    sum_f32x4 = vfmaq_n_f32(sum_f32x4, vcvtq_f32_s32(small), step->smaller);
                }
                const float32x4_t scale_f32x4 = vmulq_f32(unit_f32x4, scales_of_quarter<PerHalf>(scales[r], quarter));
                total_f32x4[r] = vfmaq_f32(total_f32x4[r], sum_f32x4, scale_f32x4);
            }
        }
    }

    BRECCIA_INLINE_MEMBER void one_step() {
        switch (step->count) {
            case 2: by_digits<2>(); break;
            case 3: by_digits<3>(); break;
            case 4: by_digits<4>(); break;
            case 5: by_digits<5>(); break;
            default: by_digits<6>();
        }
        ++step;
    }

    void run(std::int64_t row, const float* converted, std::int64_t blocks) {
        const CodeRows& w = g.w;
        const std::int64_t bytes = (w.k + 1) / 2, rest = bytes % 64;
        const std::int64_t steps_per_scale = PerHalf > 0 ? 1 : blocks == 1 ? w.k : w.block / row_step(true);
        for (int r = 0; r < Rows; ++r) {
            codes[r] = w.codes + (row + r) * w.row_stride;
            scales[r] = converted + r * blocks;
            if constexpr (HasZero) zeros[r] = w.zero_points + scale_row_of(w, row + r) * w.zero_row_stride;
            total_f32x4[r] = vdupq_n_f32(0);
        }
        std::int64_t left = steps_per_scale;
        for (std::int64_t s = 0; s < bytes / 64; ++s) {
            one_step();
            const bool next_scale = PerHalf > 0 || --left == 0;
            for (int r = 0; r < Rows; ++r) {
                codes[r] += 64;
                if (next_scale) scales[r] += PerHalf > 0 ? 2 * PerHalf : 1;
                if (HasZero && next_scale) ++zeros[r];
            }
            if (next_scale) left = steps_per_scale;
        }
        if (rest > 0) run_rest(rest, converted, blocks);
        for (int r = 0; r < Rows; ++r) g.out[row + r] = vaddvq_f32(total_f32x4[r]);
    }

    // Less than a step, filled up with codes and scales that meet zeros.
    BRECCIA_INLINE_MEMBER void run_rest(std::int64_t rest, const float* converted, std::int64_t blocks) {
        std::uint8_t last[Rows][64];
        float last_scales[Rows][8];
        for (int r = 0; r < Rows; ++r) {
            for (std::int64_t i = 0; i < 64; ++i) last[r][i] = i < rest ? codes[r][i] : 0;
            codes[r] = last[r];
            if constexpr (PerHalf == 0) continue;
            const std::int64_t there = converted + (r + 1) * blocks - scales[r];
            for (std::int64_t i = 0; i < 8; ++i) last_scales[r][i] = i < there ? scales[r][i] : 0;
            scales[r] = last_scales[r];
        }
        one_step();
    }

    BRECCIA_INLINE std::int64_t scale_row_of(const CodeRows& w, std::int64_t row) {
        return w.block_rows == 1 ? w.first_row + row : (w.first_row + row) / w.block_rows;
    }
};

/// Eight elements, which a lane of a step has.
struct Eight {
    float32x4_t lo, hi;
};
struct EightIntegers {
    int32x4_t lo, hi;
};
BRECCIA_INLINE Eight load_eight(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
BRECCIA_INLINE void store_eight(float* p, Eight x) { vst1q_f32(p, x.lo), vst1q_f32(p + 4, x.hi); }
BRECCIA_INLINE EightIntegers nearest(Eight x) { return {vcvtnq_s32_f32(x.lo), vcvtnq_s32_f32(x.hi)}; }
/// What rounding leaves.
BRECCIA_INLINE Eight rest_of(Eight x, EightIntegers integers) {
    return {vsubq_f32(x.lo, vcvtq_f32_s32(integers.lo)), vsubq_f32(x.hi, vcvtq_f32_s32(integers.hi))};
}
BRECCIA_INLINE Eight times(Eight x, float by) { return {vmulq_n_f32(x.lo, by), vmulq_n_f32(x.hi, by)}; }
BRECCIA_INLINE bool any_not_zero(Eight x) { return vminvq_u32(vandq_u32(vceqzq_f32(x.lo), vceqzq_f32(x.hi))) == 0; }
/// Whether a number that is not zero became zero.
BRECCIA_INLINE bool any_lost(Eight before, Eight after) {
    const uint32x4_t lo = vbicq_u32(vceqzq_f32(after.lo), vceqzq_f32(before.lo));
    const uint32x4_t hi = vbicq_u32(vceqzq_f32(after.hi), vceqzq_f32(before.hi));
    return vmaxvq_u32(vorrq_u32(lo, hi)) != 0;
}
/// The bits of the largest magnitude.
BRECCIA_INLINE std::int32_t largest_of(Eight x) {
    const auto magnitude = [](float32x4_t v) BRECCIA_INLINE_LAMBDA { return vreinterpretq_s32_f32(vabsq_f32(v)); };
    return vmaxvq_s32(vmaxq_s32(magnitude(x.lo), magnitude(x.hi)));
}
BRECCIA_INLINE std::int32_t sum_of(EightIntegers x) { return vaddvq_s32(vaddq_s32(x.lo, x.hi)); }

/// `count` digits of the integers of a lane's elements, to where its codes meet them. Returns whether the last is not
/// zero everywhere.
BRECCIA_INLINE bool put_lane(EightIntegers x, int count, std::int8_t (*digits)[128], int lane) {
    bool any = false;
    for (int d = count - 1; d >= 0; --d) {
        std::int32_t digit[8];
        const auto lowest = [](int32x4_t v) BRECCIA_INLINE_LAMBDA { return vshrq_n_s32(vshlq_n_s32(v, 24), 24); };
        const EightIntegers low = {lowest(x.lo), lowest(x.hi)};
        vst1q_s32(digit, low.lo), vst1q_s32(digit + 4, low.hi);
        for (int e = 0; e < 8; ++e) {
            digits[d][e % 2 * 64 + 4 * lane + e / 2] = static_cast<std::int8_t>(digit[e]);
            any |= d == count - 1 && digit[e] != 0;
        }
        x = {vshrq_n_s32(vsubq_s32(x.lo, low.lo), 8), vshrq_n_s32(vsubq_s32(x.hi, low.hi), 8)};
    }
    return any;
}

/// See pack_step of avx512_bf16/integer_gemv.inl.hpp, whose digits these are; here a lane is a pair of vectors.
template <class C>
static bool pack_nibble_step(const PackDigits& p, std::int64_t s, std::int32_t largest) {
    constexpr int lanes_of_step = 16;
    DigitStep& to = p.out->steps[s];
    const float* x = p.x + s * row_step(true);
    const int exponent = (largest >> 23) - 127;
    constexpr int fineness = 7;
    const int least = exponent - fineness > -100 ? exponent - fineness : -100;
    const auto at_least = exponent < -100 ? largest : static_cast<std::int32_t>(bits_of(exp2i(least)));
    float left[lanes_of_step][8];
    bool thirds = false, any = false;
    for (int lane = 0; lane < lanes_of_step; ++lane) {
        const Eight value = load_eight(x + 8 * lane);
        const std::int32_t own = largest_of(value), most = own > at_least ? own : at_least;
        float unit = 1, up = 1;
        // Where all are zero or subnormal there is none to go by; the latter leave something behind.
        if (exponent >= -100) {
            const int unit_exponent = unit_exponent_of(most);
            unit = float_from_bits(static_cast<std::uint32_t>(unit_exponent) << 23);
            up = float_from_bits(static_cast<std::uint32_t>(254 - unit_exponent) << 23);
        }
        const Eight v = times(value, up);
        if (any_lost(value, v)) return false;
        const EightIntegers integers = nearest(v);
        const Eight rest = rest_of(v, integers);
        any |= any_not_zero(rest);
        store_eight(left[lane], rest);
        thirds |= put_lane(integers, DigitStep::first, to.digits, lane);
        to.offsets[0][lane] = -sum_of(integers);
        to.units[lane] = unit * NibbleBytes<C>::unit;
    }
    int further = 0;
    while (any) {
        if (++further > DigitStep::most - DigitStep::first) return false;
        const float more = exp2i(8 * further - 1);
        any = false;
        for (int lane = 0; lane < lanes_of_step; ++lane) {
            const Eight v = times(load_eight(left[lane]), more);
            const EightIntegers integers = nearest(v);
            any |= any_not_zero(rest_of(v, integers));
            put_lane(integers, further, to.digits + DigitStep::first, lane);
            to.offsets[1][lane] = -sum_of(integers);
        }
    }
    to.smaller = exp2i(1 - 8 * further);
    to.further = static_cast<std::uint8_t>(further);
    to.count = static_cast<std::uint8_t>(!thirds && further == 0 ? 2 : DigitStep::first + further);
    return true;
}

template <class C>
static bool pack_nibble_digits(const PackDigits& p) {
    p.out->bias = 1;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        const float* x = p.x + s * row_step(true);
        std::int32_t largest = 0;
        for (int lane = 0; lane < 16; ++lane) {
            const std::int32_t own = largest_of(load_eight(x + 8 * lane));
            largest = own > largest ? own : largest;
        }
        if ((largest >> 23) - 127 > 100) return false;  // infinities and NaN, too
        if (!pack_nibble_step<C>(p, s, largest)) return false;
    }
    return true;
}
