// SPDX-License-Identifier: Apache-2.0
//
// Encoding with vectors: every minifloat and integer format by the same few instructions, equal to C::encode bit for
// bit. Written over the vocabulary of vec.hpp: F is 16 floats, I is 16 32-bit integers.

inline constexpr std::int64_t lanes = 16;
inline constexpr float integer_magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to the nearest integer

// A minifloat's magnitude after rounding, as the sum that rounded it.
struct Rounded {
    I sum_i32x16, magic_i32x16, exponent_i32x16;
};

template <class C>
BRECCIA_INLINE Rounded round_minifloat(I magnitude_i32x16) {
    constexpr int min_exponent_bits = (C::min_exponent + 127) << 23;
    const I clamped = i_min(magnitude_i32x16, i_set(static_cast<int>(bits_of(C::max))));
    const I exponent = i_max(i_and(clamped, i_set(0x7F80'0000)), i_set(min_exponent_bits));
    // See Minifloat::encode: the sum rounds to the format's unit in the last place. The magic number has the code's
    // constant part, -min_exponent << mantissa_bits modulo 256, in its own last places; it is even, so ties go where
    // they should.
    constexpr int constant = (256 - (min_exponent_bits >> (23 - C::mantissa_bits)) % 256) % 256;
    const I magic = i_add(exponent, i_set(((23 - C::mantissa_bits) << 23) + constant));
    return {as_bits(f_add(as_float(clamped), as_float(magic))), magic, exponent};
}

// Codes of 16 values in the low bytes of the lanes; the upper bytes are left over from the arithmetic. `scaled` is x
// over the scale; the sign is taken from x, for zeros. MayBeNan is false where the block is known to be finite.
template <class C, bool MayBeNan>
BRECCIA_INLINE I encode(F x, F scaled, float zero_point) {
    if constexpr (C::family == CodecFamily::minifloat) {
        const I magnitude = i_and(as_bits(scaled), i_set(0x7FFF'FFFF));
        const Rounded r = round_minifloat<C>(magnitude);
        // Modulo 256 this is significand + ((exponent - min_exponent) << mantissa_bits).
        I code = i_add(r.sum_i32x16, i_shr<23 - C::mantissa_bits>(r.exponent_i32x16));
        const I sign = i_and(i_shr<32 - C::bits>(as_bits(x)), i_set(C::sign_mask));
        if constexpr (C::has_negative_zero) {
            code = i_add(code, sign);
        } else {
            code = i_and(code, i_set(C::magnitude_mask));
            code = i_select(i_less(i_set(0), code), i_or(code, sign), code);
        }
        if constexpr (MayBeNan) {
            const I nan = C::specials == Specials::nan_zero ? i_set(C::nan_code)
                          : C::has_nan                      ? i_or(i_set(C::nan_code), sign)
                                                            : i_xor(i_set(C::nan_code), sign);
            code = i_select(i_less(i_set(0x7F80'0000), magnitude), nan, code);
        }
        return code;
    } else if constexpr (C::family == CodecFamily::integer) {
        const F clamped = f_min(f_max(scaled, f_set(C::lowest - zero_point)), f_set(C::max - zero_point));
        I code = i_add(as_bits(f_add(clamped, f_set(integer_magic))), i_set(static_cast<int>(zero_point)));
        if constexpr (MayBeNan) {
            const I magnitude = i_and(as_bits(scaled), i_set(0x7FFF'FFFF));
            code = i_select(i_less(i_set(0x7F80'0000), magnitude), i_set(0), code);
        }
        return code;
    } else {
        // E8M0: see Float8E8M0FNU::encode.
        const I bits = as_bits(scaled), nan = i_set(C::nan_code), zero = i_set(0);
        const I magnitude = i_and(bits, i_set(0x7FFF'FFFF));
        I code = i_min(i_shr<23>(i_add(magnitude, i_set(0x0040'0000))), i_set(254));
        code = i_select(i_less(i_set(0x0040'0000), magnitude), code, zero);
        code = i_select(i_less(i_set(0x7F80'0000), magnitude), nan, code);
        return i_select(i_less(bits, zero), i_select(i_less(zero, magnitude), nan, zero), code);
    }
}

// Squared distances of 16 values to what they quantize to.
template <class C>
BRECCIA_INLINE F squared_errors(F x, F scaled, F decoded, float zero_point) {
    F error;
    if constexpr (C::family == CodecFamily::minifloat) {
        const I abs_mask = i_set(0x7FFF'FFFF);
        const Rounded r = round_minifloat<C>(i_and(as_bits(scaled), abs_mask));
        const F magnitude = f_sub(as_float(r.sum_i32x16), as_float(r.magic_i32x16));
        error = f_sub(f_mul(magnitude, decoded), as_float(i_and(as_bits(x), abs_mask)));
    } else {
        const F clamped = f_min(f_max(scaled, f_set(C::lowest - zero_point)), f_set(C::max - zero_point));
        const F rounded = f_sub(f_add(clamped, f_set(integer_magic)), f_set(integer_magic));
        error = f_sub(f_mul(rounded, decoded), x);
    }
    return f_mul(error, error);
}

// What turns values into multiples of the scale: one of three, chosen once per block.
struct Multiply {
    F factor;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_mul(x, factor); }
};
struct Divide {
    F divisor;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_div(x, divisor); }
};
// Correctly rounded x / divisor where choose_scale finds it to be (fast_division): one Newton step on
// x * (1 / divisor) rounds as the division does (Markstein 1990, theorem 8: the reciprocal is correctly rounded and
// the remainder exact). Quotients too small for an exact remainder are below 2^-20 and encode to zero either way.
// The step makes +0 of -0, so the sign of a quotient that is zero means nothing.
struct Newton {
    F divisor, reciprocal;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_divide_newton(x, divisor, reciprocal); }
};

template <class Body>
BRECCIA_INLINE void with_scaler(const BlockScale& s, Body body) {
    if (s.multiply)
        body(Multiply{f_set(s.factor)});
    else if (s.fast_division)
        body(Newton{f_set(s.factor), f_set(1.0F / s.factor)});
    else
        body(Divide{f_set(s.factor)});
}

template <class C, bool MayBeNan, class Scale>
BRECCIA_INLINE void encode_bytes(const float* x, std::int64_t n, Scale scale, float zero_point, std::uint8_t* codes) {
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const F x_f32x16 = f_load(x + i);
        i_store_bytes(codes + i, encode<C, MayBeNan>(x_f32x16, scale(x_f32x16), zero_point));
    }
    if (i < n) {
        const F x_f32x16 = f_load_n(x + i, n - i);
        i_store_bytes_n(codes + i, encode<C, MayBeNan>(x_f32x16, scale(x_f32x16), zero_point), n - i);
    }
    if constexpr (C::bits < 8 && C::family == CodecFamily::integer)
        for (i = 0; i < n; ++i) codes[i] &= C::code_mask;
}

template <class C, bool MayBeNan, class Scale>
BRECCIA_INLINE void encode_nibbles(const float* x, std::int64_t n, Scale scale, float zero_point, std::uint8_t* codes) {
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const F x_f32x16 = f_load(x + i);
        i_store_nibbles(codes + i / 2, encode<C, MayBeNan>(x_f32x16, scale(x_f32x16), zero_point));
    }
    if (i < n) {
        const F x_f32x16 = f_load_n(x + i, n - i);
        alignas(64) std::int32_t tail[lanes];
        i_store(tail, encode<C, MayBeNan>(x_f32x16, scale(x_f32x16), zero_point));
        for (std::int64_t j = 0; i + j < n; j += 2) {
            const int high = i + j + 1 < n ? tail[j + 1] & 15 : 0;  // an unused high nibble is 0
            codes[(i + j) / 2] = static_cast<std::uint8_t>((tail[j] & 15) | high << 4);
        }
    }
}

static inline void fill_zero(std::uint8_t* bytes, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) bytes[i] = 0;
}

template <class C>
static void encode_run(const float* x, std::int64_t n, const BlockScale& s, std::uint8_t* codes, std::int64_t offset,
                       bool packed) {
    if (n <= 0) return;
    if (!packed) {
        codes += offset;
        if (s.poisoned) return fill_zero(codes, n);
        with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
            if (s.all_finite)
                encode_bytes<C, false>(x, n, scale, s.zero_point, codes);
            else
                encode_bytes<C, true>(x, n, scale, s.zero_point, codes);
        });
        return;
    }
    codes += offset / 2;
    if (offset % 2 != 0) {  // the high nibble of a byte whose low nibble is written
        std::uint8_t code = 0;
        if (!s.poisoned)
            with_scaler(
                s, [&](auto scale) BRECCIA_INLINE_LAMBDA { encode_bytes<C, true>(x, 1, scale, s.zero_point, &code); });
        *codes = static_cast<std::uint8_t>((*codes & 0x0FU) | code << 4);
        ++codes, ++x, --n;
    }
    if (s.poisoned) return fill_zero(codes, (n + 1) / 2);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        if (s.all_finite)
            encode_nibbles<C, false>(x, n, scale, s.zero_point, codes);
        else
            encode_nibbles<C, true>(x, n, scale, s.zero_point, codes);
    });
}

// The order of addition is part of the definition: lane i sums elements i, i + 16, …, then halves are added.
template <class C>
static float squared_error(const float* x, std::int64_t n, const BlockScale& s) {
    F sum_f32x16 = f_set(0.0F);
    const F decoded = f_set(s.decoded * s.error_unit), unit = f_set(s.error_unit);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        std::int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            const F x_f32x16 = f_load(x + i);
            sum_f32x16 =
                f_add(sum_f32x16, squared_errors<C>(f_mul(x_f32x16, unit), scale(x_f32x16), decoded, s.zero_point));
        }
        if (i < n) {
            const F x_f32x16 = f_load_n(x + i, n - i);
            sum_f32x16 =
                f_add(sum_f32x16, squared_errors<C>(f_mul(x_f32x16, unit), scale(x_f32x16), decoded, s.zero_point));
        }
    });
    return f_sum(sum_f32x16);
}
