// SPDX-License-Identifier: Apache-2.0
//
// Encoding with vectors: every minifloat and integer format by the same few instructions, equal to C::encode bit for
// bit. Written over the vocabulary of vec.hpp: F is 16 floats, I is 16 32-bit integers.

inline constexpr float integer_magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to the nearest integer

// A minifloat's grid around a value: the value's power of two, and the number whose multiple of it has the grid's
// spacing as unit in the last place.
template <class C>
struct Grid {
    static constexpr int dropped_bits = 23 - C::mantissa_bits;
    // In the number's own last places stands what makes `code()` right, -(biased exponent of the smallest normal's
    // sum) << mantissa_bits modulo 256. It is even, so ties go where they should.
    static constexpr int smallest_field = C::min_exponent + 127 + dropped_bits;
    static constexpr int constant = (256 - (smallest_field << C::mantissa_bits) % 256) % 256;
    static constexpr float magic = exp2i(dropped_bits) * (1.0F + static_cast<float>(constant) * 0x1p-23F);
};

// See Minifloat::encode: adding magic * binade rounds to the format's unit in the last place, subnormals included.
// The product is exact, so fused or not is the same. Saturate is false where nothing rounds beyond the largest value.
template <class C, bool Saturate>
struct Rounded {
    F binade_f32x16, sum_f32x16;

    BRECCIA_INLINE_MEMBER explicit Rounded(F scaled) {
        if constexpr (Saturate) scaled = f_clamp_magnitude(scaled, f_set(C::max));
        binade_f32x16 = f_binade(scaled, f_set(exp2i(C::min_exponent)));
        sum_f32x16 = f_multiply_add(binade_f32x16, f_set(Grid<C>::magic), scaled);
    }
    // The magnitude's code in the low byte: significand + ((exponent - min_exponent) << mantissa_bits).
    BRECCIA_INLINE_MEMBER I code() const {
        const I sum = as_bits(sum_f32x16);
        return i_add(sum, i_shr<Grid<C>::dropped_bits>(sum));
    }
    BRECCIA_INLINE_MEMBER F value() const { return f_multiply_add(binade_f32x16, f_set(-Grid<C>::magic), sum_f32x16); }
};

template <class C, bool Saturate>
BRECCIA_INLINE F round_integer(F scaled, float zero_point) {
    if constexpr (Saturate) scaled = f_min(f_max(scaled, f_set(C::lowest - zero_point)), f_set(C::max - zero_point));
    return f_add(scaled, f_set(integer_magic));
}

// Codes of 16 values in the low bytes of the lanes; the upper bytes are left over from the arithmetic. `scaled` is x
// over the scale; the sign is taken from x, for zeros. MayBeNan is false where the block is known to be finite.
template <class C, bool MayBeNan>
BRECCIA_INLINE I encode(F x, F scaled, float zero_point) {
    const I magnitude = i_and(as_bits(scaled), i_set(0x7FFF'FFFF));
    const I infinity = i_set(0x7F80'0000);
    if constexpr (C::family == CodecFamily::minifloat) {
        I code = Rounded<C, true>(scaled).code();
        const I sign = i_and(i_shr<32 - C::bits>(as_bits(x)), i_set(C::sign_mask));
        if constexpr (C::has_negative_zero) {
            code = i_or(code, sign);
        } else {
            code = i_and(code, i_set(C::magnitude_mask));
            code = i_select(i_less(i_set(0), code), i_or(code, sign), code);
        }
        if constexpr (MayBeNan) {
            const I nan = C::specials == Specials::nan_zero ? i_set(C::nan_code)
                          : C::has_nan                      ? i_or(i_set(C::nan_code), sign)
                                                            : i_xor(i_set(C::nan_code), sign);
            code = i_select(i_less(infinity, magnitude), nan, code);
        }
        return code;
    } else if constexpr (C::family == CodecFamily::integer) {
        const F sum = round_integer<C, true>(scaled, zero_point);
        const I code = i_add(as_bits(sum), i_set(static_cast<int>(zero_point)));
        if constexpr (MayBeNan) return i_select(i_less(infinity, magnitude), i_set(0), code);
        return code;
    } else {
        // E8M0: see Float8E8M0FNU::encode.
        const I nan = i_set(C::nan_code), zero = i_set(0);
        I code = i_min(i_shr<23>(i_add(magnitude, i_set(0x0040'0000))), i_set(254));
        code = i_select(i_less(i_set(0x0040'0000), magnitude), code, zero);
        code = i_select(i_less(infinity, magnitude), nan, code);
        const Mask negative = i_less(as_bits(scaled), zero);
        return i_select(negative, i_select(i_less(zero, magnitude), nan, zero), code);
    }
}

// Codes of 64 finite values, four scales. Signs are put in bytes at a time.
template <class C, bool Saturate, class Scale>
BRECCIA_INLINE B encode_wide(const float* x, const Scale& s0, const Scale& s1, const Scale& s2, const Scale& s3,
                             float zero_point) {
    const F x_f32x16[4] = {f_load(x), f_load(x + lanes), f_load(x + 2 * lanes), f_load(x + 3 * lanes)};
    const F scaled[4] = {s0(x_f32x16[0]), s1(x_f32x16[1]), s2(x_f32x16[2]), s3(x_f32x16[3])};
    if constexpr (C::family == CodecFamily::minifloat) {
        const B code = b_low_bytes(Rounded<C, Saturate>(scaled[0]).code(), Rounded<C, Saturate>(scaled[1]).code(),
                                   Rounded<C, Saturate>(scaled[2]).code(), Rounded<C, Saturate>(scaled[3]).code());
        const B high =
            b_high_bytes(as_bits(x_f32x16[0]), as_bits(x_f32x16[1]), as_bits(x_f32x16[2]), as_bits(x_f32x16[3]));
        B sign = b_and(b_shr<8 - C::bits>(high), b_set(C::sign_mask));
        if constexpr (!C::has_negative_zero) sign = b_zero_where_zero(sign, code);
        return b_or(code, sign);
    } else {
        const I zero = i_set(static_cast<int>(zero_point));
        const B code = b_low_bytes(i_add(as_bits(round_integer<C, Saturate>(scaled[0], zero_point)), zero),
                                   i_add(as_bits(round_integer<C, Saturate>(scaled[1], zero_point)), zero),
                                   i_add(as_bits(round_integer<C, Saturate>(scaled[2], zero_point)), zero),
                                   i_add(as_bits(round_integer<C, Saturate>(scaled[3], zero_point)), zero));
        if constexpr (C::bits == 8) return code;
        return b_and(code, b_set((1 << C::bits) - 1));
    }
}

// What 16 values quantize to. The sign of a zero means nothing.
template <class C>
BRECCIA_INLINE F quantized(F scaled, F decoded, float zero_point) {
    if constexpr (C::family == CodecFamily::minifloat)
        return f_mul(Rounded<C, true>(scaled).value(), decoded);
    else
        return f_mul(f_sub(round_integer<C, true>(scaled, zero_point), f_set(integer_magic)), decoded);
}

template <class C>
BRECCIA_INLINE F squared_errors(F x, F scaled, F decoded, float zero_point) {
    const F error = f_sub(quantized<C>(scaled, decoded, zero_point), x);
    return f_mul(error, error);
}

// What turns values into multiples of the scale: one of three, chosen once per block.
struct Multiply {
    static constexpr float unit = 1;  ///< the factor of the codes, over this factor
    F factor;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_mul(x, factor); }
};
struct Divide {
    F divisor;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_div(x, divisor); }
};
// x / divisor as x * high + x * low, high + low being the reciprocal in twice the precision, where choose_scale finds
// the division to be well inside the exponent range (fast_division). The sum is within 2^-47 of the quotient, and no
// quotient of two floats comes that near to a point where the codes change unless both round alike: the finitely many
// that come within 2^-46 are enumerated in test_division.cpp. A product that underflows belongs to a quotient
// below 2^-20, which encodes to zero. +0 may become of -0, so the sign of a quotient that is zero means nothing.
struct FastDivide {
    F divisor, high, low;

    BRECCIA_INLINE_MEMBER explicit FastDivide(F d) : divisor(d) {
        high = f_div(f_set(1.0F), d);
        low = f_reciprocal_rest(d, high);
    }
    BRECCIA_INLINE_MEMBER FastDivide(F d, F h, F l) : divisor(d), high(h), low(l) {}
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_divide_fast(x, divisor, high, low); }
};

template <class Body>
BRECCIA_INLINE void with_scaler(const BlockScale& s, Body body) {
    if (s.multiply)
        body(Multiply{f_set(s.factor)});
    else if (s.fast_division)
        body(FastDivide(f_set(s.factor), f_set(s.high), f_set(s.low)));
    else
        body(Divide{f_set(s.factor)});
}

// The first n of 16 codes. Of an odd number of packed ones the last byte's high nibble is 0.
[[maybe_unused]] BRECCIA_OUT_OF_LINE void store_codes_n(std::uint8_t* codes, I code, std::int64_t n, bool packed) {
    if (!packed) return i_store_bytes_n(codes, code, n);
    alignas(64) std::int32_t tail[lanes];
    i_store(tail, code);
    for (std::int64_t j = 0; j < n; j += 2) {
        const int high = j + 1 < n ? tail[j + 1] & 15 : 0;
        codes[j / 2] = static_cast<std::uint8_t>((tail[j] & 15) | high << 4);
    }
}

// Codes of n values by 16 at a time; packed ones begin with a low nibble.
template <class C, bool MayBeNan, class Scale>
BRECCIA_INLINE void encode_lanes(const float* x, std::int64_t n, const Scale& scale, float zero_point,
                                 std::uint8_t* codes, bool packed) {
    for (std::int64_t i = 0; i < n; i += lanes) {
        const bool whole = n - i >= lanes;
        const F x_f32x16 = whole ? f_load(x + i) : f_load_n(x + i, n - i);
        I code = encode<C, MayBeNan>(x_f32x16, scale(x_f32x16), zero_point);
        if constexpr (C::bits < 8 && C::family == CodecFamily::integer) code = i_and(code, i_set(C::code_mask));
        std::uint8_t* to = codes + (packed ? i / 2 : i);
        if (!whole)
            store_codes_n(to, code, n - i, packed);
        else if (packed)
            i_store_nibbles(to, code);
        else
            i_store_bytes(to, code);
    }
}

// The same of finite values by 64 at a time. Returns how many it encoded.
template <class C, class Scale>
BRECCIA_INLINE std::int64_t encode_wides(const float* x, std::int64_t n, const Scale& scale, float zero_point,
                                         std::uint8_t* codes, bool packed) {
    std::int64_t i = 0;
    for (; i + wide <= n; i += wide) {
        const B code = encode_wide<C, true>(x + i, scale, scale, scale, scale, zero_point);
        if constexpr (C::bits == 4)
            if (packed) {
                b_store_nibbles(codes + i / 2, code);
                continue;
            }
        b_store(codes + i, code);
    }
    return i;
}

static inline void fill_zero(std::uint8_t* bytes, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) bytes[i] = 0;
}

// Codes from a byte's beginning. What FastDivide takes is finite; a block whose scale it does not take is so rare that
// the one loop that also knows NaNs does for it.
template <class C>
static void encode_from_byte(const float* x, std::int64_t n, const BlockScale& s, std::uint8_t* codes, bool packed) {
    if constexpr (C::bits != 4) packed = false;
    if (s.poisoned) return fill_zero(codes, packed ? (n + 1) / 2 : n);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        std::int64_t done = 0;
        if constexpr (!std::is_same_v<decltype(scale), Divide>)
            if (s.all_finite) done = encode_wides<C>(x, n, scale, s.zero_point, codes, packed);
        constexpr bool finite = std::is_same_v<decltype(scale), FastDivide>;
        encode_lanes<C, !finite>(x + done, n - done, scale, s.zero_point, codes + (packed ? done / 2 : done), packed);
    });
}

template <class C>
static void encode_run(const float* x, std::int64_t n, const BlockScale& s, std::uint8_t* codes, std::int64_t offset,
                       bool packed) {
    if (n <= 0) return;
    if (C::bits != 4 || !packed) return encode_from_byte<C>(x, n, s, codes + offset, false);
    codes += offset / 2;
    if (offset % 2 != 0) {  // the high nibble of a byte whose low nibble is written
        std::uint8_t code = 0;
        encode_from_byte<C>(x, 1, s, &code, false);
        *codes = static_cast<std::uint8_t>((*codes & 0x0FU) | code << 4);
        ++codes, ++x, --n;
    }
    encode_from_byte<C>(x, n, s, codes, true);
}

// The codes of numbers as they are.
template <class C>
static void encode_unscaled(const float* x, std::int64_t n, std::uint8_t* codes) {
    const auto one = [](F value) BRECCIA_INLINE_LAMBDA { return value; };
    encode_lanes<C, true>(x, n, one, 0.0F, codes, false);
}

// The order of addition is part of the definition: lane i sums elements i, i + 16, …, then halves are added.
template <class C>
static float squared_error(const float* x, std::int64_t n, const BlockScale& s) {
    F sum_f32x16 = f_set(0.0F);
    const F decoded = f_set(s.decoded * s.error_unit), unit = f_set(s.error_unit);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        for (std::int64_t i = 0; i < n; i += lanes) {
            const F x_f32x16 = n - i >= lanes ? f_load(x + i) : f_load_n(x + i, n - i);
            sum_f32x16 =
                f_add(sum_f32x16, squared_errors<C>(f_mul(x_f32x16, unit), scale(x_f32x16), decoded, s.zero_point));
        }
    });
    return f_sum(sum_f32x16);
}

// The lanes of 16 values that are not what their codes stand for. A format of one zero has no sign for it to lose.
template <class C>
BRECCIA_INLINE Mask differing(F x, F scaled, F decoded, float zero_point) {
    const F value = quantized<C>(scaled, decoded, zero_point);
    return m_or(f_less(value, x), f_less(x, value));
}

template <class C>
static bool keeps(const float* x, std::int64_t n, const BlockScale& s) {
    bool kept = true;
    const F decoded = f_set(s.decoded);
    with_scaler(s, [&](auto scale) BRECCIA_INLINE_LAMBDA {
        const auto at = [&](std::int64_t i) BRECCIA_INLINE_LAMBDA {
            return differing<C>(f_load(x + i), scale(f_load(x + i)), decoded, s.zero_point);
        };
        std::int64_t i = 0;
        for (; kept && i + 2 * lanes <= n; i += 2 * lanes) kept = i_none(m_or(at(i), at(i + lanes)));
        for (; kept && i < n; i += lanes) {
            const F x_f32x16 = n - i >= lanes ? f_load(x + i) : f_load_n(x + i, n - i);
            kept = i_none(differing<C>(x_f32x16, scale(x_f32x16), decoded, s.zero_point));
        }
    });
    return kept;
}
