// SPDX-License-Identifier: Apache-2.0
//
// Encoding with stochastic rounding: a value between two codes becomes the upper one with the probability that makes
// its expected value exact. Plain loops, which compilers turn into the target's vectors.

// The code of a multiple of the scale; `uniform` is in [0, 1). A NaN whose format has none does not get here.
template <class C>
BRECCIA_INLINE std::int32_t stochastic_code(float x, float scaled, float uniform, float zero_point) {
    if constexpr (C::family == CodecFamily::minifloat) {
        constexpr std::int32_t min_exponent_bits = (C::min_exponent + 127) << 23;
        constexpr auto max_bits = static_cast<std::int32_t>(bits_of(C::max));
        const auto magnitude = static_cast<std::int32_t>(bits_of(scaled) & f32_abs_mask);
        const std::int32_t clamped = magnitude < max_bits ? magnitude : max_bits;
        const std::int32_t field = clamped & 0x7F80'0000;
        const std::int32_t exponent = field > min_exponent_bits ? field : min_exponent_bits;
        // Units in the last place: a product with a power of two, exact.
        const std::int32_t per_unit = (254 << 23) - exponent + (C::mantissa_bits << 23);
        const float units = float_from_bits(static_cast<std::uint32_t>(clamped)) *
                            float_from_bits(static_cast<std::uint32_t>(per_unit));
        const auto below = static_cast<std::int32_t>(units);
        std::int32_t code = below + (uniform < units - static_cast<float>(below) ? 1 : 0);
        code += (exponent - min_exponent_bits) >> (23 - C::mantissa_bits);
        // A factor is positive: the sign is that of x, a NaN's and a zero's too.
        const auto sign = static_cast<std::int32_t>(bits_of(x) >> (32 - C::bits)) & C::sign_mask;
        const std::int32_t keeps_sign = C::has_negative_zero ? -1 : -static_cast<std::int32_t>(code != 0);
        const std::int32_t nan = C::specials == Specials::nan_zero ? C::nan_code : C::nan_code | sign;
        // Without branches, which would keep the loop from becoming vectors.
        const std::int32_t is_nan = -static_cast<std::int32_t>(magnitude > 0x7F80'0000);
        return ((code | (sign & keeps_sign)) & ~is_nan) | (nan & is_nan);
    } else {
        const float low = C::lowest - zero_point, high = C::max - zero_point;
        float clamped = scaled > low ? scaled : low;
        clamped = clamped < high ? clamped : high;
        const auto toward_zero = static_cast<std::int32_t>(clamped);
        const std::int32_t below = toward_zero - (static_cast<float>(toward_zero) > clamped ? 1 : 0);
        const std::int32_t up = uniform < clamped - static_cast<float>(below) ? 1 : 0;
        return (below + up + static_cast<std::int32_t>(zero_point)) & C::code_mask;
    }
}

// Codes of 16 values; loops of a known length become vectors without a remainder.
template <class C>
BRECCIA_INLINE void stochastic_codes(const float* x, const BlockScale& s, RandomKey key, std::uint32_t first,
                                     std::uint8_t* codes) {
    float scaled[lanes];
    std::int32_t wide[lanes];
    if (s.multiply)
        for (int i = 0; i < lanes; ++i) scaled[i] = x[i] * s.factor;
    else
        for (int i = 0; i < lanes; ++i) scaled[i] = x[i] / s.factor;
    for (int i = 0; i < lanes; ++i) {
        const auto draw = static_cast<std::int32_t>(key.bits(first + static_cast<std::uint32_t>(i)) >> 8);
        wide[i] = stochastic_code<C>(x[i], scaled[i], static_cast<float>(draw) * 0x1p-24F, s.zero_point);
    }
    for (int i = 0; i < lanes; ++i) codes[i] = static_cast<std::uint8_t>(wide[i]);
}

// Nibbles [offset, offset + n) of packed codes. A low nibble clears the high one, which the element after it writes.
static inline void store_nibbles(const std::uint8_t* run, std::int64_t n, std::uint8_t* codes, std::int64_t offset) {
    codes += offset / 2;
    if (offset % 2 != 0 && n > 0) {
        *codes = static_cast<std::uint8_t>((*codes & 15) | *run << 4);
        ++codes, ++run, --n;
    }
    for (std::int64_t i = 0; i < n / 2; ++i)
        codes[i] = static_cast<std::uint8_t>((run[2 * i] & 15) | run[2 * i + 1] << 4);
    if (n % 2 > 0) codes[n / 2] = run[n - 1] & 15;
}

// As encode_run, for positions first, first + 1, … of the draws.
template <class C>
static void encode_stochastic(const float* x, std::int64_t n, const BlockScale& s, RandomKey key, std::uint32_t first,
                              std::uint8_t* codes, std::int64_t offset, bool packed) {
    std::uint8_t run[lanes];
    float tail[lanes] = {};
    for (std::int64_t begin = 0; begin < n; begin += lanes) {
        const std::int64_t count = n - begin < lanes ? n - begin : lanes;
        const float* from = x + begin;
        if (count < lanes) {
            __builtin_memcpy(tail, from, static_cast<std::size_t>(count) * sizeof(float));
            from = tail;
        }
        if (s.poisoned)
            fill_zero(run, lanes);
        else
            stochastic_codes<C>(from, s, key, first + static_cast<std::uint32_t>(begin), run);
        if (packed)
            store_nibbles(run, count, codes, offset + begin);
        else
            __builtin_memcpy(codes + offset + begin, run, static_cast<std::size_t>(count));
    }
}
