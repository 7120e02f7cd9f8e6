// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in the compilers' generic vectors: 16 floats or 16 integers are four vectors of 16 bytes, which
// every target has. (gcc takes wider ones apart into single elements where they are compared: five times the code.)
// It defines what every other backend's vec.hpp computes.

using F4 = float __attribute__((vector_size(16)));
using I4 = std::int32_t __attribute__((vector_size(16)));
using U4 = std::uint32_t __attribute__((vector_size(16)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));
using Words = std::uint16_t __attribute__((vector_size(16)));

struct F {
    F4 part[4];
};
struct I {
    I4 part[4];
};
struct B {
    Bytes part[4];
};
using Mask = I;  // all ones or all zeros per lane

/// A function of parts over all parts of its operands.
template <class V, class Op, class... Vs>
BRECCIA_INLINE V each(Op op, const Vs&... x) {
    return {{op(x.part[0]...), op(x.part[1]...), op(x.part[2]...), op(x.part[3]...)}};
}
template <class V>
BRECCIA_INLINE V load_as_is(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

/// What each operation does with two parts.
inline constexpr auto plus = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x + y; };
inline constexpr auto difference = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x - y; };
inline constexpr auto times = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x * y; };
inline constexpr auto quotient = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x / y; };
inline constexpr auto bit_and = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x & y; };
inline constexpr auto bit_or = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x | y; };
inline constexpr auto bit_xor = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x ^ y; };
inline constexpr auto is_less = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x < y; };
inline constexpr auto smaller_part = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x < y ? x : y; };
inline constexpr auto larger_part = [](auto x, auto y) BRECCIA_INLINE_LAMBDA { return x > y ? x : y; };

BRECCIA_INLINE F f_set(float x) {
    const F4 part = x - F4{};  // 0 + x would turn -0 into 0
    return {{part, part, part, part}};
}
BRECCIA_INLINE I i_set(std::int32_t x) {
    const I4 part = I4{} + x;
    return {{part, part, part, part}};
}
BRECCIA_INLINE F f_load(const float* p) { return load_as_is<F>(p); }
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) {
    F x{};
    __builtin_memcpy(&x, p, static_cast<std::size_t>(n) * sizeof(float));
    return x;
}
BRECCIA_INLINE void f_store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
BRECCIA_INLINE I i_load(const std::int32_t* p) { return load_as_is<I>(p); }
BRECCIA_INLINE void i_store(std::int32_t* p, I x) { __builtin_memcpy(p, &x, sizeof x); }
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) {
    I x;
    for (int i = 0; i < 16; ++i) x.part[i / 4][i % 4] = p[i];
    return x;
}
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    I x;
    for (int i = 0; i < 16; ++i) x.part[i / 4][i % 4] = i % 2 != 0 ? p[i / 2] >> 4 : p[i / 2] & 15;
    return x;
}
/// The low bytes of the lanes; what is above them does not matter, here and in the stores of codes.
BRECCIA_INLINE Bytes low_bytes(I x) {
    Bytes bytes;
    if constexpr (std::endian::native == std::endian::little) {
        // Of two vectors the even bytes, which x86 and ARM have an instruction for, twice.
        const auto even = [](auto a, auto b) BRECCIA_INLINE_LAMBDA {
            return __builtin_shufflevector(reinterpret_cast<Bytes>(a), reinterpret_cast<Bytes>(b), 0, 2, 4, 6, 8, 10,
                                           12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        };
        bytes = even(even(x.part[0], x.part[1]), even(x.part[2], x.part[3]));
    } else {
        for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(x.part[i / 4][i % 4]);
    }
    return bytes;
}
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    const Bytes bytes = low_bytes(x);
    __builtin_memcpy(p, &bytes, sizeof bytes);
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    const Bytes bytes = low_bytes(x);
    __builtin_memcpy(p, &bytes, static_cast<std::size_t>(n));
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    const Bytes bytes = low_bytes(x) & 15;
    for (int i = 0; i < 8; ++i) p[i] = static_cast<std::uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

BRECCIA_INLINE I as_bits(F x) {
    return each<I>([](F4 a) BRECCIA_INLINE_LAMBDA { return reinterpret_cast<I4>(a); }, x);
}
BRECCIA_INLINE F as_float(I x) {
    return each<F>([](I4 a) BRECCIA_INLINE_LAMBDA { return reinterpret_cast<F4>(a); }, x);
}

BRECCIA_INLINE F f_add(F a, F b) { return each<F>(plus, a, b); }
BRECCIA_INLINE F f_sub(F a, F b) { return each<F>(difference, a, b); }
BRECCIA_INLINE F f_mul(F a, F b) { return each<F>(times, a, b); }
BRECCIA_INLINE F f_div(F a, F b) { return each<F>(quotient, a, b); }
BRECCIA_INLINE F f_sqrt(F a) {
    return each<F>(
        [](F4 x) BRECCIA_INLINE_LAMBDA {
            return F4{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
        },
        a);
}
/// (1 - divisor * reciprocal) / divisor with one rounding before the division: what the reciprocal lacks.
BRECCIA_INLINE F f_reciprocal_rest(F /*divisor*/, F /*reciprocal*/) { return F{}; }
/// See FastDivide in encode.inl.hpp.
BRECCIA_INLINE F f_divide_fast(F x, F divisor, F /*high*/, F /*low*/) { return f_div(x, divisor); }
/// May round once or twice: for sums whose order is not part of a definition.
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) {
    return each<F>([](F4 x, F4 y, F4 z) BRECCIA_INLINE_LAMBDA { return x * y + z; }, a, b, c);
}
/// The second operand where either is a NaN, as x86 has it.
BRECCIA_INLINE F f_min(F a, F b) { return each<F>(smaller_part, a, b); }
BRECCIA_INLINE F f_max(F a, F b) { return each<F>(larger_part, a, b); }

BRECCIA_INLINE I i_add(I a, I b) {
    return each<I>(
        [](I4 x, I4 y) BRECCIA_INLINE_LAMBDA {
            return reinterpret_cast<I4>(plus(reinterpret_cast<U4>(x), reinterpret_cast<U4>(y)));
        },
        a, b);
}
BRECCIA_INLINE I i_sub(I a, I b) {
    return each<I>(
        [](I4 x, I4 y) BRECCIA_INLINE_LAMBDA {
            return reinterpret_cast<I4>(difference(reinterpret_cast<U4>(x), reinterpret_cast<U4>(y)));
        },
        a, b);
}
BRECCIA_INLINE I i_and(I a, I b) { return each<I>(bit_and, a, b); }
BRECCIA_INLINE I i_or(I a, I b) { return each<I>(bit_or, a, b); }
BRECCIA_INLINE I i_xor(I a, I b) { return each<I>(bit_xor, a, b); }
BRECCIA_INLINE I i_min(I a, I b) { return each<I>(smaller_part, a, b); }
BRECCIA_INLINE I i_max(I a, I b) { return each<I>(larger_part, a, b); }
template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    return each<I>([](I4 a) BRECCIA_INLINE_LAMBDA { return reinterpret_cast<I4>(reinterpret_cast<U4>(a) << Count); },
                   x);
}
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    return each<I>([](I4 a) BRECCIA_INLINE_LAMBDA { return reinterpret_cast<I4>(reinterpret_cast<U4>(a) >> Count); },
                   x);
}
BRECCIA_INLINE Mask i_less(I a, I b) { return each<Mask>(is_less, a, b); }
BRECCIA_INLINE Mask f_less(F a, F b) { return each<Mask>(is_less, a, b); }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) {
    return each<I>([](I4 where, I4 x, I4 y) BRECCIA_INLINE_LAMBDA { return (x & where) | (y & ~where); }, m, yes, no);
}
BRECCIA_INLINE F f_select(Mask m, F yes, F no) { return as_float(i_select(m, as_bits(yes), as_bits(no))); }
BRECCIA_INLINE Mask m_or(Mask a, Mask b) { return i_or(a, b); }
BRECCIA_INLINE bool i_none(Mask m) {
    const I4 any = (m.part[0] | m.part[1]) | (m.part[2] | m.part[3]);
    return (any[0] | any[1] | any[2] | any[3]) == 0;
}

/// The sign of x with the smaller of two magnitudes; the largest magnitude for a NaN.
BRECCIA_INLINE F f_clamp_magnitude(F x, F largest) {
    const I sign = i_and(as_bits(x), i_set(static_cast<std::int32_t>(f32_sign_bit)));
    return as_float(i_or(as_bits(f_min(as_float(i_xor(as_bits(x), sign)), largest)), sign));
}
/// The power of two in x, at least `least`, with the sign of x.
BRECCIA_INLINE F f_binade(F x, F least) {
    const I sign = i_and(as_bits(x), i_set(static_cast<std::int32_t>(f32_sign_bit)));
    return as_float(i_or(i_max(i_and(as_bits(x), i_set(0x7F80'0000)), as_bits(least)), sign));
}

/// One byte of each lane of four vectors in turn.
BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) { return {{low_bytes(a), low_bytes(b), low_bytes(c), low_bytes(d)}}; }
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) {
    return b_low_bytes(i_shr<24>(a), i_shr<24>(b), i_shr<24>(c), i_shr<24>(d));
}
BRECCIA_INLINE B b_set(int x) {
    const Bytes part = Bytes{} + static_cast<std::uint8_t>(x);
    return {{part, part, part, part}};
}
BRECCIA_INLINE B b_and(B a, B b) { return each<B>(bit_and, a, b); }
BRECCIA_INLINE B b_or(B a, B b) { return each<B>(bit_or, a, b); }
template <int Count>
BRECCIA_INLINE B b_shr(B x) {
    return each<B>(
        [](Bytes a) BRECCIA_INLINE_LAMBDA {
            return reinterpret_cast<Bytes>(reinterpret_cast<Words>(a) >> Count) &
                   static_cast<std::uint8_t>(255 >> Count);
        },
        x);
}
BRECCIA_INLINE B b_zero_where_zero(B x, B test) {
    return each<B>([](Bytes a, Bytes b) BRECCIA_INLINE_LAMBDA { return a & reinterpret_cast<Bytes>(b != 0); }, x, test);
}
BRECCIA_INLINE void b_store(std::uint8_t* p, B x) { __builtin_memcpy(p, &x, sizeof x); }
/// The low nibbles, two to a byte, the first in the low half.
BRECCIA_INLINE void b_store_nibbles(std::uint8_t* p, B x) {
    const auto code = [&](int i) BRECCIA_INLINE_LAMBDA { return x.part[i / 16][i % 16] & 15; };
    for (int i = 0; i < 32; ++i) p[i] = static_cast<std::uint8_t>(code(2 * i) | code(2 * i + 1) << 4);
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) {
    const I4 most = larger_part(larger_part(x.part[0], x.part[1]), larger_part(x.part[2], x.part[3]));
    std::int32_t r = most[0];
    for (int i = 1; i < 4; ++i) r = most[i] > r ? most[i] : r;
    return r;
}
/// Lane i: the largest lane of x[i].
BRECCIA_INLINE I i_max_of_each(const I (&x)[16]) {
    I r;
    for (int i = 0; i < 16; ++i) r.part[i / 4][i % 4] = i_max_lane(x[i]);
    return r;
}
BRECCIA_INLINE float f_max_lane(F x) {
    float r = x.part[0][0];
    for (int i = 1; i < 16; ++i) r = x.part[i / 4][i % 4] > r ? x.part[i / 4][i % 4] : r;
    return r;
}
/// Halves are added until one lane is left.
BRECCIA_INLINE float f_sum(F x) {
    const F4 sum = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/// 16 numbers from bytes, codes of a format.
template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    F x;
    for (int i = 0; i < 16; ++i)
        x.part[i / 4][i % 4] = decode_table<C>.values[codes.part[i / 4][i % 4] & ((1 << C::bits) - 1)];
    return x;
}

/// Formats a backend decodes 64 codes at a time, and whether it rounds normal numbers to bfloat16 by an instruction.
template <class C>
inline constexpr bool f_decodes_wide = false;
inline constexpr bool f_stores_bf16 = false, b_compares_quarters = false;

template <class T>
BRECCIA_INLINE F f_load_as(const T* p) {
    F x;
    for (int i = 0; i < 16; ++i) x.part[i / 4][i % 4] = to_float(p[i]);
    return x;
}
BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = to_float16(x.part[i / 4][i % 4]);
}
/// Lanes of at most 0xFFFF.
BRECCIA_INLINE void i_store_words(std::uint16_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::uint16_t>(x.part[i / 4][i % 4]);
}

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 2;
inline constexpr std::int64_t wide_gemm_k = 256;

/// Of sums in float64. multiply_add is a b + c, rounded once or twice.
using Doubles = double __attribute__((vector_size(16)));
BRECCIA_INLINE Doubles d_multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
BRECCIA_INLINE Doubles d_larger(Doubles a, Doubles b) { return a > b ? a : b; }

#include "kernels/transpose.inl.hpp"
