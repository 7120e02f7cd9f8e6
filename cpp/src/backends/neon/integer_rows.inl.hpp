// SPDX-License-Identifier: Apache-2.0
//
// One activation by rows of codes in place, in integers: 4-bit codes are looked up as signed bytes, the activation is a
// sum of signed bytes (Digits), and sdot adds up four products a lane; twice that makes a lane of a DigitStep, eight
// elements. A sum is exact; it becomes a float once and takes its scale. See also avx2/integer_rows.inl.hpp.

/// Codes as signed bytes: a code's value is (byte - offset) * unit.
struct NibbleBytes {
    alignas(16) std::int8_t byte[16];
    float unit;
    int offset;
    static constexpr bool are_codes = false;  ///< all codes are looked up
};
template <class C>
inline constexpr NibbleBytes nibble_bytes = [] {
    NibbleBytes of{.byte = {}, .unit = C::decode(1), .offset = 0};
    for (int i = 0; i < 16; ++i)
        of.byte[i] = static_cast<std::int8_t>(C::decode(static_cast<std::uint8_t>(i)) / C::decode(1));
    return of;
}();

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

/// No scales are read as the codes that they are.
template <int PerHalf>
struct ScaleCodes {
    static constexpr bool there = false;
};
BRECCIA_INLINE void prepare_nibble_step(DigitStep& /*step*/) {}

/// Sums of two rows at a time. `OneDigit`: steps have one, and their units are left to the caller.
template <bool AreCodes, int PerHalf, bool HasZero, bool OneDigit, class ScaleOfRow>
struct NibbleSums {
    static constexpr int rows = 2, per_half = PerHalf;
    static constexpr bool one_digit = OneDigit, has_zero = HasZero;
    using Scale = ScaleOfRow;
    const NibbleBytes& of_codes;
    const DigitStep* step;
    const std::uint8_t* codes[rows] = {};
    const Scale* scales[rows] = {};
    const std::uint8_t* zeros[rows] = {};
    float32x4_t total_f32x4[rows] = {};

    BRECCIA_INLINE_MEMBER void clear(int r) { total_f32x4[r] = vdupq_n_f32(0); }
    BRECCIA_INLINE_MEMBER float total(int r) const { return vaddvq_f32(total_f32x4[r]); }

    BRECCIA_INLINE_MEMBER void by_one_digit(std::int64_t ahead) { by_digits<1>(ahead); }
    /// One step.
    template <int Count>
    BRECCIA_INLINE_MEMBER void by_digits(std::int64_t /*ahead*/) {
        constexpr int first = Count < DigitStep::first ? Count : DigitStep::first;
        const int8x16_t table = vld1q_s8(of_codes.byte);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            float32x4_t unit_f32x4 = vld1q_f32(step->units + 4 * quarter);
            if constexpr (Count == 2) unit_f32x4 = vmulq_n_f32(unit_f32x4, 256.0F);
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
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
                float32x4_t scale_f32x4 = scales_of_quarter<PerHalf>(scales[r], quarter);
                if constexpr (!OneDigit) scale_f32x4 = vmulq_f32(unit_f32x4, scale_f32x4);
                total_f32x4[r] = vfmaq_f32(total_f32x4[r], sum_f32x4, scale_f32x4);
            }
        }
    }
};

/// The sum of a row of INT8 codes by an activation that is such codes, as DigitStep has them.
inline constexpr int byte_sums_offset = 0;
inline constexpr bool byte_sums_know_symmetric = false;
BRECCIA_INLINE void prepare_byte_step(DigitStep& /*step*/) {}
template <bool Symmetric>
struct ByteSums {
    float32x4_t total_f32x4[2] = {};  ///< of parts in turn, so that none waits for the one before

    BRECCIA_INLINE_MEMBER float total() const { return vaddvq_f32(vaddq_f32(total_f32x4[0], total_f32x4[1])); }
    /// A step; see byte_rows.
    template <bool OneUnit, int PerStep>
    BRECCIA_INLINE_MEMBER void add(const std::uint8_t* codes, const DigitStep& step, const float* scales) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(codes + 16 * part));
            const int32x4_t sum = vdotq_s32(vdupq_n_s32(0), bytes, vld1q_s8(step.digits[0] + 16 * part));
            float32x4_t scale_f32x4 = vdupq_n_f32(scales[PerStep * part / 4]);
            if constexpr (!OneUnit) scale_f32x4 = vmulq_f32(vld1q_f32(step.units + 4 * part), scale_f32x4);
            total_f32x4[part % 2] = vfmaq_f32(total_f32x4[part % 2], vcvtq_f32_s32(sum), scale_f32x4);
        }
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
