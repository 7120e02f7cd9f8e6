// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in NEON (Advanced SIMD of 64-bit Arm): 16 lanes are four registers.

struct F {
    float32x4_t q[4];
};
struct I {
    int32x4_t q[4];
};
struct B {  // 64 bytes
    uint8x16_t q[4];
};
struct Mask {  // all ones or all zeros per lane
    uint32x4_t q[4];
};

/// Op on each quarter of the operands.
template <class R, auto Op, class... V>
BRECCIA_INLINE R each(V... v) {
    return {{Op(v.q[0]...), Op(v.q[1]...), Op(v.q[2]...), Op(v.q[3]...)}};
}

BRECCIA_INLINE F f_set(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {{all, all, all, all}};
}
BRECCIA_INLINE I i_set(std::int32_t x) {
    const int32x4_t all = vdupq_n_s32(x);
    return {{all, all, all, all}};
}
BRECCIA_INLINE F f_load(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) {
    alignas(16) float x[16] = {};
    for (std::int64_t i = 0; i < n; ++i) x[i] = p[i];
    return f_load(x);
}
BRECCIA_INLINE void f_store(float* p, F x) {
    vst1q_f32(p, x.q[0]);
    vst1q_f32(p + 4, x.q[1]);
    vst1q_f32(p + 8, x.q[2]);
    vst1q_f32(p + 12, x.q[3]);
}
BRECCIA_INLINE I i_load(const std::int32_t* p) {
    return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
BRECCIA_INLINE void i_store(std::int32_t* p, I x) {
    vst1q_s32(p, x.q[0]);
    vst1q_s32(p + 4, x.q[1]);
    vst1q_s32(p + 8, x.q[2]);
    vst1q_s32(p + 12, x.q[3]);
}
BRECCIA_INLINE I widen_bytes(uint8x16_t bytes) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) { return widen_bytes(vld1q_u8(p)); }
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    const uint8x8_t bytes = vld1_u8(p);
    const uint8x8_t low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
    return widen_bytes(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
}
/// The low halves of the lanes.
BRECCIA_INLINE uint16x8_t narrow_to_words(int32x4_t first, int32x4_t second) {
    return vuzp1q_u16(vreinterpretq_u16_s32(first), vreinterpretq_u16_s32(second));
}
BRECCIA_INLINE uint8x16_t narrow_to_bytes(I x) {
    const uint16x8_t first = narrow_to_words(x.q[0], x.q[1]), second = narrow_to_words(x.q[2], x.q[3]);
    return vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) { vst1q_u8(p, narrow_to_bytes(x)); }
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    alignas(16) std::uint8_t bytes[16];
    vst1q_u8(bytes, narrow_to_bytes(x));
    for (std::int64_t i = 0; i < n; ++i) p[i] = bytes[i];
}
// Two nibbles to a byte: the odd codes shifted over the upper halves of the even ones.
BRECCIA_INLINE uint8x16_t pair_nibbles(uint8x16_t first, uint8x16_t second) {
    return vsliq_n_u8(vuzp1q_u8(first, second), vuzp2q_u8(first, second), 4);
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    const uint8x16_t bytes = narrow_to_bytes(x);
    vst1_u8(p, vget_low_u8(pair_nibbles(bytes, bytes)));
}

BRECCIA_INLINE F f_add(F a, F b) { return each<F, vaddq_f32>(a, b); }
BRECCIA_INLINE F f_sub(F a, F b) { return each<F, vsubq_f32>(a, b); }
BRECCIA_INLINE F f_mul(F a, F b) { return each<F, vmulq_f32>(a, b); }
BRECCIA_INLINE F f_div(F a, F b) { return each<F, vdivq_f32>(a, b); }
BRECCIA_INLINE F f_sqrt(F a) { return each<F, vsqrtq_f32>(a); }
BRECCIA_INLINE F f_reciprocal_rest(F divisor, F reciprocal) {
    return f_div(each<F, vfmsq_f32>(f_set(1.0F), divisor, reciprocal), divisor);
}
BRECCIA_INLINE F f_divide_fast(F x, F /*divisor*/, F high, F low) { return each<F, vfmaq_f32>(f_mul(x, low), x, high); }
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { return each<F, vfmaq_f32>(c, a, b); }

BRECCIA_INLINE I as_bits(F x) { return each<I, vreinterpretq_s32_f32>(x); }
BRECCIA_INLINE F as_float(I x) { return each<F, vreinterpretq_f32_s32>(x); }
BRECCIA_INLINE I i_add(I a, I b) { return each<I, vaddq_s32>(a, b); }
BRECCIA_INLINE I i_sub(I a, I b) { return each<I, vsubq_s32>(a, b); }
BRECCIA_INLINE I i_and(I a, I b) { return each<I, vandq_s32>(a, b); }
BRECCIA_INLINE I i_or(I a, I b) { return each<I, vorrq_s32>(a, b); }
BRECCIA_INLINE I i_xor(I a, I b) { return each<I, veorq_s32>(a, b); }
BRECCIA_INLINE I i_min(I a, I b) { return each<I, vminq_s32>(a, b); }
BRECCIA_INLINE I i_max(I a, I b) { return each<I, vmaxq_s32>(a, b); }
template <int Count>
BRECCIA_INLINE int32x4_t shift_left(int32x4_t x) {
    return vshlq_n_s32(x, Count);
}
template <int Count>
BRECCIA_INLINE int32x4_t shift_right(int32x4_t x) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), Count));
}
template <int Count>
BRECCIA_INLINE int32x4_t shift_right_signed(int32x4_t x) {
    return vshrq_n_s32(x, Count);
}
template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    return each<I, shift_left<Count>>(x);
}
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    return each<I, shift_right<Count>>(x);
}
BRECCIA_INLINE Mask i_less(I a, I b) { return each<Mask, vcltq_s32>(a, b); }
BRECCIA_INLINE Mask i_equal(I a, I b) { return each<Mask, vceqq_s32>(a, b); }
BRECCIA_INLINE Mask f_less(F a, F b) { return each<Mask, vcltq_f32>(a, b); }
BRECCIA_INLINE F f_select(Mask m, F yes, F no) { return each<F, vbslq_f32>(m, yes, no); }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) { return each<I, vbslq_s32>(m, yes, no); }
// The instructions for these answer with a NaN where either operand is one.
BRECCIA_INLINE F f_min(F a, F b) { return f_select(f_less(a, b), a, b); }
BRECCIA_INLINE F f_max(F a, F b) { return f_select(f_less(b, a), a, b); }
BRECCIA_INLINE F f_with_sign_of(F x, I magnitude) {
    return as_float(i_or(magnitude, i_and(as_bits(x), i_set(static_cast<std::int32_t>(f32_sign_bit)))));
}
BRECCIA_INLINE F f_clamp_magnitude(F x, F largest) {
    // Magnitudes are ordered as integers are, NaNs above all numbers.
    const I magnitude = i_min(i_and(as_bits(x), i_set(0x7FFF'FFFF)), as_bits(largest));
    return f_with_sign_of(x, magnitude);
}
BRECCIA_INLINE F f_binade(F x, F least) {
    return f_with_sign_of(x, i_max(i_and(as_bits(x), i_set(0x7F80'0000)), as_bits(least)));
}
BRECCIA_INLINE Mask m_or(Mask a, Mask b) { return each<Mask, vorrq_u32>(a, b); }
BRECCIA_INLINE bool i_none(Mask m) {
    return vmaxvq_u32(vorrq_u32(vorrq_u32(m.q[0], m.q[1]), vorrq_u32(m.q[2], m.q[3]))) == 0;
}

BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) {
    return {{narrow_to_bytes(a), narrow_to_bytes(b), narrow_to_bytes(c), narrow_to_bytes(d)}};
}
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) {
    return b_low_bytes(i_shr<24>(a), i_shr<24>(b), i_shr<24>(c), i_shr<24>(d));
}
BRECCIA_INLINE B b_set(int x) {
    const uint8x16_t all = vdupq_n_u8(static_cast<std::uint8_t>(x));
    return {{all, all, all, all}};
}
BRECCIA_INLINE B b_and(B a, B b) { return each<B, vandq_u8>(a, b); }
BRECCIA_INLINE B b_or(B a, B b) { return each<B, vorrq_u8>(a, b); }
template <int Count>
BRECCIA_INLINE uint8x16_t shift_bytes_right(uint8x16_t x) {
    if constexpr (Count == 0)  // which clang refuses in the intrinsic
        return x;
    else
        return vshrq_n_u8(x, Count);
}
template <int Count>
BRECCIA_INLINE B b_shr(B x) {
    return each<B, shift_bytes_right<Count>>(x);
}
BRECCIA_INLINE B b_zero_where_zero(B x, B test) { return b_and(x, each<B, vtstq_u8>(test, test)); }
BRECCIA_INLINE void b_store(std::uint8_t* p, B x) {
    vst1q_u8(p, x.q[0]);
    vst1q_u8(p + 16, x.q[1]);
    vst1q_u8(p + 32, x.q[2]);
    vst1q_u8(p + 48, x.q[3]);
}
BRECCIA_INLINE void b_store_nibbles(std::uint8_t* p, B x) {
    vst1q_u8(p, pair_nibbles(x.q[0], x.q[1]));
    vst1q_u8(p + 16, pair_nibbles(x.q[2], x.q[3]));
}

BRECCIA_INLINE int32x4_t max_of_quarters(I x) {
    return vmaxq_s32(vmaxq_s32(x.q[0], x.q[1]), vmaxq_s32(x.q[2], x.q[3]));
}
BRECCIA_INLINE std::int32_t i_max_lane(I x) { return vmaxvq_s32(max_of_quarters(x)); }
BRECCIA_INLINE I i_max_of_each(const I (&x)[16]) {
    I r;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const I* four = x + 4 * i;
        r.q[i] = vpmaxq_s32(vpmaxq_s32(max_of_quarters(four[0]), max_of_quarters(four[1])),
                            vpmaxq_s32(max_of_quarters(four[2]), max_of_quarters(four[3])));
    }
    return r;
}
BRECCIA_INLINE float f_max_lane(F x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3])));
}
BRECCIA_INLINE float f_sum(F x) {
    const float32x4_t x4 = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(x4), vget_high_f32(x4)));
}

/// The fields moved to those of a float, which a multiplication by a power of two rebiases, subnormals included.
template <class C>
BRECCIA_INLINE F decode_minifloat(I codes) {
    constexpr int shift = 23 - C::mantissa_bits;
    const I magnitude = i_shl<shift>(i_and(codes, i_set(C::magnitude_mask)));
    const I sign = i_and(i_shl<32 - C::bits>(codes), i_set(static_cast<std::int32_t>(f32_sign_bit)));
    const F value = f_mul(as_float(i_or(magnitude, sign)), f_set(exp2i(127 - C::bias)));
    if constexpr (!C::has_nan) {
        return value;
    } else {
        const Mask special = C::specials == Specials::nan_zero ? i_equal(codes, i_set(C::nan_code))
                                                               : i_less(i_set(C::max_code << shift), magnitude);
        if (i_none(special)) [[likely]]
            return value;
        alignas(16) std::int32_t code[16];
        alignas(16) float entry[16];
        i_store(code, codes);
        for (int i = 0; i < 16; ++i) entry[i] = decode_table<C>.values[code[i]];
        return f_load(entry);
    }
}

template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    if constexpr (C::family == CodecFamily::minifloat) {
        return decode_minifloat<C>(codes);
    } else if constexpr (C::family == CodecFamily::exponent) {
        // The exponent field is the code, but 2^-127 is a subnormal and 255 a NaN.
        const I bits = i_shl<23>(codes);
        const I low = i_select(i_equal(codes, i_set(0)), i_set(0x0040'0000), bits);
        return as_float(i_select(i_equal(codes, i_set(255)), i_set(0x7FC0'0000), low));
    } else if constexpr (C::lowest < 0) {
        constexpr int unused = 32 - C::bits;
        return each<F, vcvtq_f32_s32>(each<I, shift_right_signed<unused>>(i_shl<unused>(codes)));
    } else {
        return each<F, vcvtq_f32_s32>(i_and(codes, i_set(C::code_mask)));
    }
}

template <class C>
inline constexpr bool f_decodes_wide = false;
inline constexpr bool f_stores_bf16 = false, b_compares_quarters = false;

BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE F f_load_as(const Float16* p) {
    const auto* words = reinterpret_cast<const std::uint16_t*>(p);
    const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(words));
    const float16x8_t high = vreinterpretq_f16_u16(vld1q_u16(words + 8));
    return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
             vcvt_high_f32_f16(high)}};
}
BRECCIA_INLINE F f_load_as(const BFloat16* p) {
    const auto* words = reinterpret_cast<const std::uint16_t*>(p);
    const uint16x8_t low = vld1q_u16(words), high = vld1q_u16(words + 8);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
             vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))}};
}
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    auto* words = reinterpret_cast<std::uint16_t*>(p);
    vst1q_u16(words, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.q[0]), x.q[1])));
    vst1q_u16(words + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.q[2]), x.q[3])));
}
BRECCIA_INLINE void i_store_words(std::uint16_t* p, I x) {
    vst1q_u16(p, narrow_to_words(x.q[0], x.q[1]));
    vst1q_u16(p + 8, narrow_to_words(x.q[2], x.q[3]));
}

BRECCIA_INLINE F f_of_signed_bytes(const std::uint8_t* p) { return f_decode<Int8>(i_load_bytes(p)); }
/// A number that all lanes take: units are one vector here.
struct Spread {
    BRECCIA_INLINE_MEMBER explicit Spread(int /*runs*/) {}
    BRECCIA_INLINE_MEMBER F operator()(const float* p) const { return f_set(*p); }
};

/// Asks for the line of a row that will be read soon.
BRECCIA_INLINE void prefetch(const std::uint8_t* p) { __builtin_prefetch(p); }

/// Weight rows that meet one activation at a time.
inline constexpr int single_vector_rows = 4;

/// Weight rows of a matmul tile one vector wide. Its sums take 16 of the 32 registers, which four pipelines of four
/// cycles need; six rows would leave too few for two vectors of activations.
inline constexpr int gemm_rows = 4;
inline constexpr std::int64_t wide_gemm_k = 256;
inline constexpr std::int64_t codes_f32_tile_rows = 24;  // see CodeKernelsF32::tile_rows

using Doubles = float64x2_t;
BRECCIA_INLINE Doubles d_multiply_add(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
BRECCIA_INLINE Doubles d_larger(Doubles a, Doubles b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }

#include "kernels/transpose.inl.hpp"
