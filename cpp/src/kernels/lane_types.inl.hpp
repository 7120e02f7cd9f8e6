// SPDX-License-Identifier: Apache-2.0
//
// Two lane types, so that arithmetic is written once for one block at a time and for sixteen: OneLane computes with
// float and int32, SixteenLanes with the vectors F and I. The functions here are the vocabulary of vec.hpp for one
// lane.

struct OneLane {
    using Float = float;
    using Int = std::int32_t;
    static constexpr bool moderate = false;  ///< whether all amaxes are known to be, see moderate()
    BRECCIA_INLINE Float set(float x) { return x; }
    BRECCIA_INLINE Int set(std::int32_t x) { return x; }
};

struct SixteenLanes {
    using Float = F;
    using Int = I;
    static constexpr bool moderate = true;
    BRECCIA_INLINE Float set(float x) { return f_set(x); }
    BRECCIA_INLINE Int set(std::int32_t x) { return i_set(x); }
};

BRECCIA_INLINE std::int32_t as_bits(float x) { return static_cast<std::int32_t>(bits_of(x)); }
BRECCIA_INLINE float as_float(std::int32_t x) { return float_from_bits(static_cast<std::uint32_t>(x)); }
BRECCIA_INLINE float f_sub(float a, float b) { return a - b; }
BRECCIA_INLINE float f_mul(float a, float b) { return a * b; }
BRECCIA_INLINE float f_div(float a, float b) { return a / b; }
BRECCIA_INLINE float f_min(float a, float b) { return a < b ? a : b; }
BRECCIA_INLINE float f_max(float a, float b) { return a > b ? a : b; }
BRECCIA_INLINE float f_select(bool m, float yes, float no) { return m ? yes : no; }
BRECCIA_INLINE std::int32_t i_add(std::int32_t a, std::int32_t b) { return a + b; }
BRECCIA_INLINE std::int32_t i_sub(std::int32_t a, std::int32_t b) { return a - b; }
BRECCIA_INLINE std::int32_t i_xor(std::int32_t a, std::int32_t b) { return a ^ b; }
BRECCIA_INLINE std::int32_t i_min(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
BRECCIA_INLINE std::int32_t i_max(std::int32_t a, std::int32_t b) { return a > b ? a : b; }
BRECCIA_INLINE bool i_less(std::int32_t a, std::int32_t b) { return a < b; }
BRECCIA_INLINE std::int32_t i_select(bool m, std::int32_t yes, std::int32_t no) { return m ? yes : no; }
template <int Count>
BRECCIA_INLINE std::int32_t i_shr(std::int32_t x) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) >> Count);
}
template <int Count>
BRECCIA_INLINE std::int32_t i_shl(std::int32_t x) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) << Count);
}

// The codes of E4M3 for numbers that are not negative, and the numbers of codes.
BRECCIA_INLINE std::int32_t e4m3_code(float x) { return Float8E4M3FN::encode(x); }
BRECCIA_INLINE I e4m3_code(F x) { return i_and(encode<Float8E4M3FN, false>(x, x, 0.0F), i_set(127)); }
BRECCIA_INLINE float e4m3_value(std::int32_t code) { return Float8E4M3FN::decode(static_cast<std::uint8_t>(code)); }
BRECCIA_INLINE F e4m3_value(I code) { return f_decode<Float8E4M3FN>(code); }

BRECCIA_INLINE void round_to_half(float x, Float16& half) { half = to_float16(x); }
BRECCIA_INLINE void round_to_half(float x, BFloat16& half) { half = to_bfloat16(x); }

// Bits of a number rounded to T, a type of 16 bits, and what such bits stand for.
template <class T>
BRECCIA_INLINE std::int32_t half_bits(float x) {
    T half;
    round_to_half(x, half);
    return half.bits;
}
template <class T>
BRECCIA_INLINE I half_bits(F x) {
    alignas(64) T halves[lanes];
    alignas(64) std::int32_t bits[lanes];
    f_store_as(halves, x);
    for (int i = 0; i < lanes; ++i) bits[i] = halves[i].bits;
    return i_load(bits);
}
template <class T>
BRECCIA_INLINE float half_value(std::int32_t bits) {
    return to_float(T{static_cast<std::uint16_t>(bits)});
}
template <class T>
BRECCIA_INLINE F half_value(I bits) {
    alignas(64) T halves[lanes];
    i_store_words(reinterpret_cast<std::uint16_t*>(halves), bits);
    return f_load_as(halves);
}

// A lane's elements are added in the order of squared_error: elements i, i + 16, … first, then halves.
BRECCIA_INLINE F sum_of_halves(F (&sums_f32x16)[lanes]) {
    for (std::int64_t half = lanes / 2; half > 0; half /= 2)
        for (std::int64_t i = 0; i < half; ++i) sums_f32x16[i] = f_add(sums_f32x16[i], sums_f32x16[i + half]);
    return sums_f32x16[0];
}
