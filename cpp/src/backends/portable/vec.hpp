// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in the compilers' generic vectors, which become whatever the target has: 16 floats, 16
// integers. It defines what every other backend's vec.hpp computes.

using F = float __attribute__((vector_size(64)));
using I = std::int32_t __attribute__((vector_size(64)));
using U = std::uint32_t __attribute__((vector_size(64)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));
using Mask = I;  // all ones or all zeros per lane

template <class V, class T>
BRECCIA_INLINE V load_as_is(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

BRECCIA_INLINE F f_set(float x) { return F{} + x; }
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
/// See Newton in encode.inl.hpp.
BRECCIA_INLINE F f_divide_newton(F x, F divisor, F /*reciprocal*/) { return x / divisor; }
/// May round once or twice: for sums whose order is not part of a definition.
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { return a * b + c; }
/// The second operand where either is a NaN, as x86 has it.
BRECCIA_INLINE F f_min(F a, F b) { return a < b ? a : b; }
BRECCIA_INLINE F f_max(F a, F b) { return a > b ? a : b; }

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
BRECCIA_INLINE bool i_none(Mask m) {
    std::int32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= m[i];
    return any == 0;
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) {
    std::int32_t r = x[0];
    for (int i = 1; i < 16; ++i) r = x[i] > r ? x[i] : r;
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
BRECCIA_INLINE void f_store_as(BFloat16* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = to_bfloat16(x[i]);
}

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 2;
