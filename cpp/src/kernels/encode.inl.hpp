// SPDX-License-Identifier: Apache-2.0
//
// Encoding with vectors: every minifloat and integer format by the same few instructions, equal to C::encode bit for
// bit. Written over the vocabulary of vec.hpp: F is 16 floats, I is 16 32-bit integers.

inline constexpr std::int64_t lanes = 16;

// Rounded magnitude of a minifloat as float bits, and the constant that was added to round it.
struct Rounded {
    I sum_i32x16, magic_i32x16, exponent_i32x16;
};

template <class C>
BRECCIA_INLINE Rounded round_minifloat(I magnitude_i32x16) {
    constexpr int min_exponent_bits = (C::min_exponent + 127) << 23;
    const I clamped = i_min(magnitude_i32x16, i_set(static_cast<int>(bits_of(C::max))));
    const I exponent = i_max(i_and(clamped, i_set(0x7F80'0000)), i_set(min_exponent_bits));
    // See Minifloat::encode: the sum rounds to the format's unit in the last place.
    const I magic = i_add(exponent, i_set((23 - C::mantissa_bits) << 23));
    return {as_bits(f_add(as_float(clamped), as_float(magic))), magic, exponent};
}

template <class C>
BRECCIA_INLINE F clamp_to_integer_range(F x, float zero_point) {
    return f_min(f_max(x, f_set(C::lowest - zero_point)), f_set(C::max - zero_point));
}

inline constexpr float integer_magic = 12582912.0F;  // 1.5 * 2^23

// Codes of 16 values. MayBeNan is false where the block is known to hold none.
template <class C, bool MayBeNan>
BRECCIA_INLINE I encode(F x, float zero_point) {
    if constexpr (C::family == CodecFamily::minifloat) {
        const I bits = as_bits(x);
        const I magnitude = i_and(bits, i_set(0x7FFF'FFFF));
        const Rounded r = round_minifloat<C>(magnitude);
        constexpr int min_exponent_bits = (C::min_exponent + 127) << 23;
        const I significand = i_sub(r.sum_i32x16, r.magic_i32x16);
        const I binade = i_shr<23 - C::mantissa_bits>(i_sub(r.exponent_i32x16, i_set(min_exponent_bits)));
        I code = i_add(significand, binade);
        const I sign = i_and(i_shr<32 - C::bits>(bits), i_set(C::sign_mask));
        if constexpr (C::has_negative_zero)
            code = i_or(code, sign);
        else
            code = i_select(i_less(i_set(0), code), i_or(code, sign), code);
        if constexpr (MayBeNan) {
            const I nan = C::specials == Specials::nan_zero ? i_set(C::nan_code)
                          : C::has_nan                      ? i_or(i_set(C::nan_code), sign)
                                                            : i_xor(i_set(C::nan_code), sign);
            code = i_select(i_less(i_set(0x7F80'0000), magnitude), nan, code);
        }
        return code;
    } else if constexpr (C::family == CodecFamily::integer) {
        const F rounded = f_add(clamp_to_integer_range<C>(x, zero_point), f_set(integer_magic));
        const int offset = static_cast<int>(bits_of(integer_magic)) - static_cast<int>(zero_point);
        I code = i_and(i_sub(as_bits(rounded), i_set(offset)), i_set(C::code_mask));
        if constexpr (MayBeNan) {
            const I magnitude = i_and(as_bits(x), i_set(0x7FFF'FFFF));
            code = i_select(i_less(i_set(0x7F80'0000), magnitude), i_set(0), code);
        }
        return code;
    } else {
        alignas(64) float values[lanes];
        alignas(64) std::int32_t codes[lanes];
        f_store(values, x);
        for (int i = 0; i < lanes; ++i) codes[i] = C::encode(values[i]);
        return i_load(codes);
    }
}

// Squared distances of 16 values to what they quantize to.
template <class C>
BRECCIA_INLINE F squared_errors(F x, F scaled, const BlockScale& s) {
    F error;
    if constexpr (C::family == CodecFamily::minifloat) {
        const I abs_mask = i_set(0x7FFF'FFFF);
        const Rounded r = round_minifloat<C>(i_and(as_bits(scaled), abs_mask));
        const F magnitude = f_sub(as_float(r.sum_i32x16), as_float(r.magic_i32x16));
        error = f_sub(f_mul(magnitude, f_set(s.decoded)), as_float(i_and(as_bits(x), abs_mask)));
    } else {
        const F rounded = f_add(clamp_to_integer_range<C>(scaled, s.zero_point), f_set(integer_magic));
        error = f_sub(f_mul(f_sub(rounded, f_set(integer_magic)), f_set(s.decoded)), x);
    }
    return f_mul(error, error);
}

// x * factor or x / factor, whichever the block's rule says.
class Scaler {
public:
    BRECCIA_INLINE_MEMBER explicit Scaler(const BlockScale& s)
        : multiply_(s.multiply), divisor_(s.factor, s.all_finite && !s.multiply) {}
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return multiply_ ? f_mul(x, divisor_.value()) : divisor_.divide(x); }

private:
    bool multiply_;
    Divisor divisor_;
};

template <class C, bool MayBeNan>
static void encode_bytes(const float* x, std::int64_t n, const BlockScale& s, std::uint8_t* codes) {
    const Scaler scale(s);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) i_store_bytes(codes + i, encode<C, MayBeNan>(scale(f_load(x + i)), s.zero_point));
    if (i < n) i_store_bytes_n(codes + i, encode<C, MayBeNan>(scale(f_load_n(x + i, n - i)), s.zero_point), n - i);
}

template <class C, bool MayBeNan>
static void encode_nibbles(const float* x, std::int64_t n, const BlockScale& s, std::uint8_t* codes) {
    const Scaler scale(s);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        i_store_nibbles(codes + i / 2, encode<C, MayBeNan>(scale(f_load(x + i)), s.zero_point));
    if (i < n) {
        // Zeros past the end leave an unused high nibble 0 once codes past the end are cleared.
        alignas(64) std::int32_t tail[lanes];
        i_store(tail, encode<C, MayBeNan>(scale(f_load_n(x + i, n - i)), s.zero_point));
        for (std::int64_t j = 0; i + j < n; j += 2)
            codes[(i + j) / 2] = static_cast<std::uint8_t>(tail[j] | (i + j + 1 < n ? tail[j + 1] << 4 : 0));
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
        return s.all_finite ? encode_bytes<C, false>(x, n, s, codes) : encode_bytes<C, true>(x, n, s, codes);
    }
    codes += offset / 2;
    if (offset % 2 != 0) {  // the high nibble of a byte whose low nibble is written
        std::uint8_t code = 0;
        if (!s.poisoned) encode_bytes<C, true>(x, 1, s, &code);
        *codes = static_cast<std::uint8_t>((*codes & 0x0FU) | code << 4);
        ++codes, ++x, --n;
    }
    if (s.poisoned) return fill_zero(codes, (n + 1) / 2);
    s.all_finite ? encode_nibbles<C, false>(x, n, s, codes) : encode_nibbles<C, true>(x, n, s, codes);
}

// The order of addition is part of the definition: lane i sums elements i, i + 16, …, then halves are added.
template <class C>
static float squared_error(const float* x, std::int64_t n, const BlockScale& s) {
    const Scaler scale(s);
    F sum_f32x16 = f_set(0.0F);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const F x_f32x16 = f_load(x + i);
        sum_f32x16 = f_add(sum_f32x16, squared_errors<C>(x_f32x16, scale(x_f32x16), s));
    }
    if (i < n) {
        const F x_f32x16 = f_load_n(x + i, n - i);
        sum_f32x16 = f_add(sum_f32x16, squared_errors<C>(x_f32x16, scale(x_f32x16), s));
    }
    return f_sum(sum_f32x16);
}
