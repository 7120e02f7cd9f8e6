// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in the compilers' generic vectors, which become whatever the target has: 16 floats, 16
// integers. It defines what every other backend's vec.hpp computes.

using F = float __attribute__((vector_size(64)));
using I = std::int32_t __attribute__((vector_size(64)));
using U = std::uint32_t __attribute__((vector_size(64)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));
using B = std::uint8_t __attribute__((vector_size(64)));
using Mask = I;  // all ones or all zeros per lane

template <class V, class T>
BRECCIA_INLINE V load_as_is(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

BRECCIA_INLINE F f_set(float x) { return x - F{}; }  // 0 + x would turn -0 into 0
BRECCIA_INLINE I i_set(std::int32_t x) { return I{} + x; }
BRECCIA_INLINE F f_load(const float* p) { return load_as_is<F>(p); }
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) {
    F x{};
    __builtin_memcpy(&x, p, static_cast<std::size_t>(n) * sizeof(float));
    return x;
}
BRECCIA_INLINE void f_store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
BRECCIA_INLINE I i_load(const std::int32_t* p) { return load_as_is<I>(p); }
BRECCIA_INLINE void i_store(std::int32_t* p, I x) { __builtin_memcpy(p, &x, sizeof x); }
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) { return __builtin_convertvector(load_as_is<Bytes>(p), I); }
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    Bytes codes;
    for (int i = 0; i < 16; ++i) codes[i] = static_cast<std::uint8_t>(i % 2 != 0 ? p[i / 2] >> 4 : p[i / 2] & 15);
    return __builtin_convertvector(codes, I);
}
/// The low bytes of the lanes; what is above them does not matter, here and in the other stores of codes.
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    const Bytes bytes = __builtin_convertvector(x, Bytes);
    __builtin_memcpy(p, &bytes, sizeof bytes);
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    const Bytes bytes = __builtin_convertvector(x, Bytes);
    __builtin_memcpy(p, &bytes, static_cast<std::size_t>(n));
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    const Bytes bytes = __builtin_convertvector(x, Bytes) & 15;
    for (int i = 0; i < 8; ++i) p[i] = static_cast<std::uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

BRECCIA_INLINE F f_add(F a, F b) { return a + b; }
BRECCIA_INLINE F f_sub(F a, F b) { return a - b; }
BRECCIA_INLINE F f_mul(F a, F b) { return a * b; }
BRECCIA_INLINE F f_div(F a, F b) { return a / b; }
/// (1 - divisor * reciprocal) / divisor with one rounding before the division: what the reciprocal lacks.
BRECCIA_INLINE F f_reciprocal_rest(F /*divisor*/, F /*reciprocal*/) { return F{}; }
/// See FastDivide in encode.inl.hpp.
BRECCIA_INLINE F f_divide_fast(F x, F divisor, F /*high*/, F /*low*/) { return x / divisor; }
/// May round once or twice: for sums whose order is not part of a definition.
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { return a * b + c; }
/// The second operand where either is a NaN, as x86 has it.
BRECCIA_INLINE F f_min(F a, F b) { return a < b ? a : b; }
BRECCIA_INLINE F f_max(F a, F b) { return a > b ? a : b; }
/// The sign of x with the smaller of two magnitudes; the largest magnitude for a NaN.
BRECCIA_INLINE F f_clamp_magnitude(F x, F largest) {
    const I bits = reinterpret_cast<I>(x), sign = bits & static_cast<std::int32_t>(f32_sign_bit);
    const F magnitude = reinterpret_cast<F>(bits ^ sign);
    return reinterpret_cast<F>(reinterpret_cast<I>(magnitude < largest ? magnitude : largest) | sign);
}
/// The power of two in x, at least `least`, with the sign of x.
BRECCIA_INLINE F f_binade(F x, F least) {
    const I bits = reinterpret_cast<I>(x), sign = bits & static_cast<std::int32_t>(f32_sign_bit);
    const I power = bits & 0x7F80'0000, lowest = reinterpret_cast<I>(least);
    return reinterpret_cast<F>((power > lowest ? power : lowest) | sign);
}

BRECCIA_INLINE I as_bits(F x) { return reinterpret_cast<I>(x); }
BRECCIA_INLINE F as_float(I x) { return reinterpret_cast<F>(x); }
BRECCIA_INLINE I i_add(I a, I b) { return reinterpret_cast<I>(reinterpret_cast<U>(a) + reinterpret_cast<U>(b)); }
BRECCIA_INLINE I i_sub(I a, I b) { return reinterpret_cast<I>(reinterpret_cast<U>(a) - reinterpret_cast<U>(b)); }
BRECCIA_INLINE I i_and(I a, I b) { return a & b; }
BRECCIA_INLINE I i_or(I a, I b) { return a | b; }
BRECCIA_INLINE I i_xor(I a, I b) { return a ^ b; }
BRECCIA_INLINE I i_min(I a, I b) { return a < b ? a : b; }
BRECCIA_INLINE I i_max(I a, I b) { return a > b ? a : b; }
template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) << Count);
}
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) >> Count);
}
BRECCIA_INLINE Mask i_less(I a, I b) { return a < b; }
BRECCIA_INLINE Mask f_less(F a, F b) { return a < b; }
BRECCIA_INLINE F f_select(Mask m, F yes, F no) { return m ? yes : no; }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) { return m ? yes : no; }
BRECCIA_INLINE Mask m_or(Mask a, Mask b) { return a | b; }
BRECCIA_INLINE bool i_none(Mask m) {
    std::int32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= m[i];
    return any == 0;
}

/// One byte of each lane of four vectors in turn.
template <int Byte>
BRECCIA_INLINE B b_bytes_of(I a, I b, I c, I d) {
    const I lanes_of[4] = {i_shr<8 * Byte>(a), i_shr<8 * Byte>(b), i_shr<8 * Byte>(c), i_shr<8 * Byte>(d)};
    B bytes;
    for (int i = 0; i < 4; ++i) {
        const Bytes quarter = __builtin_convertvector(lanes_of[i], Bytes);
        __builtin_memcpy(reinterpret_cast<std::uint8_t*>(&bytes) + 16 * i, &quarter, sizeof quarter);
    }
    return bytes;
}
BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) { return b_bytes_of<0>(a, b, c, d); }
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) { return b_bytes_of<3>(a, b, c, d); }
BRECCIA_INLINE B b_set(int x) { return B{} + static_cast<std::uint8_t>(x); }
BRECCIA_INLINE B b_and(B a, B b) { return a & b; }
BRECCIA_INLINE B b_or(B a, B b) { return a | b; }
template <int Count>
BRECCIA_INLINE B b_shr(B x) {
    return x >> Count;
}
BRECCIA_INLINE B b_zero_where_zero(B x, B test) { return x & reinterpret_cast<B>(test != 0); }
BRECCIA_INLINE void b_store(std::uint8_t* p, B x) { __builtin_memcpy(p, &x, sizeof x); }
/// The low nibbles, two to a byte, the first in the low half.
BRECCIA_INLINE void b_store_nibbles(std::uint8_t* p, B x) {
    for (int i = 0; i < 32; ++i) p[i] = static_cast<std::uint8_t>((x[2 * i] & 15) | x[2 * i + 1] << 4);
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) {
    std::int32_t r = x[0];
    for (int i = 1; i < 16; ++i) r = x[i] > r ? x[i] : r;
    return r;
}
/// Lane i: the largest lane of x[i].
BRECCIA_INLINE I i_max_of_each(const I (&x)[16]) {
    I r;
    for (int i = 0; i < 16; ++i) r[i] = i_max_lane(x[i]);
    return r;
}
BRECCIA_INLINE float f_max_lane(F x) {
    float r = x[0];
    for (int i = 1; i < 16; ++i) r = x[i] > r ? x[i] : r;
    return r;
}
/// Halves are added until one lane is left.
BRECCIA_INLINE float f_sum(F x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
}

/// 16 numbers from bytes, codes of a format.
template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    F x;
    for (int i = 0; i < 16; ++i) x[i] = decode_table<C>.values[codes[i] & ((1 << C::bits) - 1)];
    return x;
}

/// Formats a backend decodes 64 codes at a time, and whether it rounds normal numbers to bfloat16 by an instruction.
template <class C>
inline constexpr bool f_decodes_wide = false;
inline constexpr bool f_stores_bf16 = false, b_compares_quarters = false;

template <class T>
BRECCIA_INLINE F f_load_as(const T* p) {
    F x;
    for (int i = 0; i < 16; ++i) x[i] = to_float(p[i]);
    return x;
}
BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = to_float16(x[i]);
}
/// Lanes of at most 0xFFFF.
BRECCIA_INLINE void i_store_words(std::uint16_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::uint16_t>(x[i]);
}

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 2;
inline constexpr std::int64_t wide_gemm_k = 256;
