// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in plain C++: 16 floats, 16 integers. It defines what every other backend's vec.hpp computes.

struct F {
    float v[16];
};
struct I {
    std::int32_t v[16];
};
struct Mask {
    bool v[16];
};

#define BRECCIA_EACH(expression)                       \
    decltype(f_set(0)) r; /* NOLINT */                 \
    for (int i = 0; i < 16; ++i) r.v[i] = expression; \
    return r
#define BRECCIA_EACH_I(expression)                     \
    I r;                                               \
    for (int i = 0; i < 16; ++i) r.v[i] = expression; \
    return r

BRECCIA_INLINE F f_set(float x) {
    F r;
    for (float& lane : r.v) lane = x;
    return r;
}
BRECCIA_INLINE I i_set(std::int32_t x) { BRECCIA_EACH_I(x); }
BRECCIA_INLINE F f_load(const float* p) { BRECCIA_EACH(p[i]); }
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) { BRECCIA_EACH(i < n ? p[i] : 0.0F); }
BRECCIA_INLINE void f_store(float* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
BRECCIA_INLINE I i_load(const std::int32_t* p) { BRECCIA_EACH_I(p[i]); }
BRECCIA_INLINE void i_store(std::int32_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) { BRECCIA_EACH_I(p[i]); }
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) { BRECCIA_EACH_I(i % 2 != 0 ? p[i / 2] >> 4 : p[i / 2] & 15); }
/// The low bytes of the lanes; what is above them does not matter, here and in the other stores of codes.
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::uint8_t>(x.v[i]);
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = static_cast<std::uint8_t>(x.v[i]);
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    for (int i = 0; i < 8; ++i) p[i] = static_cast<std::uint8_t>((x.v[2 * i] & 15) | (x.v[2 * i + 1] & 15) << 4);
}

BRECCIA_INLINE F f_add(F a, F b) { BRECCIA_EACH(a.v[i] + b.v[i]); }
BRECCIA_INLINE F f_sub(F a, F b) { BRECCIA_EACH(a.v[i] - b.v[i]); }
BRECCIA_INLINE F f_mul(F a, F b) { BRECCIA_EACH(a.v[i] * b.v[i]); }
BRECCIA_INLINE F f_div(F a, F b) { BRECCIA_EACH(a.v[i] / b.v[i]); }
/// See Newton in encode.inl.hpp.
BRECCIA_INLINE F f_divide_newton(F x, F divisor, F /*reciprocal*/) { return f_div(x, divisor); }
/// May round once or twice: for sums whose order is not part of a definition.
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { BRECCIA_EACH(a.v[i] * b.v[i] + c.v[i]); }
/// The second operand where either is a NaN, as x86 has it.
BRECCIA_INLINE F f_min(F a, F b) { BRECCIA_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
BRECCIA_INLINE F f_max(F a, F b) { BRECCIA_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }

BRECCIA_INLINE I as_bits(F x) { BRECCIA_EACH_I(static_cast<std::int32_t>(bits_of(x.v[i]))); }
BRECCIA_INLINE F as_float(I x) { BRECCIA_EACH(float_from_bits(static_cast<std::uint32_t>(x.v[i]))); }
BRECCIA_INLINE I i_add(I a, I b) { BRECCIA_EACH_I(a.v[i] + b.v[i]); }
BRECCIA_INLINE I i_sub(I a, I b) { BRECCIA_EACH_I(a.v[i] - b.v[i]); }
BRECCIA_INLINE I i_and(I a, I b) { BRECCIA_EACH_I(a.v[i] & b.v[i]); }
BRECCIA_INLINE I i_or(I a, I b) { BRECCIA_EACH_I(a.v[i] | b.v[i]); }
BRECCIA_INLINE I i_xor(I a, I b) { BRECCIA_EACH_I(a.v[i] ^ b.v[i]); }
BRECCIA_INLINE I i_min(I a, I b) { BRECCIA_EACH_I(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
BRECCIA_INLINE I i_max(I a, I b) { BRECCIA_EACH_I(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    BRECCIA_EACH_I(static_cast<std::int32_t>(static_cast<std::uint32_t>(x.v[i]) >> Count));
}
BRECCIA_INLINE Mask i_less(I a, I b) {
    Mask r;
    for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] < b.v[i];
    return r;
}
BRECCIA_INLINE Mask f_less(F a, F b) {
    Mask r;
    for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] < b.v[i];
    return r;
}
BRECCIA_INLINE F f_select(Mask m, F yes, F no) { BRECCIA_EACH(m.v[i] ? yes.v[i] : no.v[i]); }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) { BRECCIA_EACH_I(m.v[i] ? yes.v[i] : no.v[i]); }

template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    BRECCIA_EACH_I(static_cast<std::int32_t>(static_cast<std::uint32_t>(x.v[i]) << Count));
}
BRECCIA_INLINE bool i_none(Mask m) {
    bool any = false;
    for (int i = 0; i < 16; ++i) any |= m.v[i];
    return !any;
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) {
    std::int32_t r = x.v[0];
    for (int i = 1; i < 16; ++i) r = x.v[i] > r ? x.v[i] : r;
    return r;
}
BRECCIA_INLINE float f_max_lane(F x) {
    float r = x.v[0];
    for (int i = 1; i < 16; ++i) r = x.v[i] > r ? x.v[i] : r;
    return r;
}
/// Halves are added until one lane is left.
BRECCIA_INLINE float f_sum(F x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}

/// 16 numbers from bytes, codes of a format.
template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    BRECCIA_EACH(decode_table<C>.values[codes.v[i] & ((1 << C::bits) - 1)]);
}

BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE F f_load_as(const Float16* p) { BRECCIA_EACH(to_float(p[i])); }
BRECCIA_INLINE F f_load_as(const BFloat16* p) { BRECCIA_EACH(to_float(p[i])); }
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = to_float16(x.v[i]);
}
BRECCIA_INLINE void f_store_as(BFloat16* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = to_bfloat16(x.v[i]);
}

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 2;
