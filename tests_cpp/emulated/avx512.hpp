// SPDX-License-Identifier: Apache-2.0
//
// Instructions of AVX-512 in plain code (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace breccia::emulated {

/// A vector register as an array of T; Vector is one of the intrinsics' types.
template <class T, class Vector>
struct Lanes {
    static constexpr int count = sizeof(Vector) / sizeof(T);
    T lane[count] = {};

    Lanes() = default;
    explicit Lanes(const Vector& v) { std::memcpy(lane, &v, sizeof lane); }
    operator Vector() const {
        Vector v;
        std::memcpy(&v, lane, sizeof v);
        return v;
    }
};

inline bool in(std::uint64_t mask, int i) { return (mask >> i & 1U) != 0; }

/// Lanes outside the mask are not read.
template <class T, class Vector>
Vector load(Vector otherwise, std::uint64_t mask, const void* memory) {
    Lanes<T, Vector> to(otherwise);
    for (int i = 0; i < to.count; ++i)
        if (in(mask, i)) std::memcpy(&to.lane[i], static_cast<const T*>(memory) + i, sizeof(T));
    return to;
}

/// Lanes outside the mask are not written.
template <class T, class Vector>
void store(void* memory, std::uint64_t mask, Vector v) {
    const Lanes<T, Vector> from(v);
    for (int i = 0; i < from.count; ++i)
        if (in(mask, i)) std::memcpy(static_cast<T*>(memory) + i, &from.lane[i], sizeof(T));
}

/// f(each T of v) as the lanes of a vector To; those that v has none for are zeros.
template <class To, class Vector, class T, class From, class F>
Vector map(From v, F f) {
    const Lanes<T, From> from(v);
    Lanes<To, Vector> to;
    for (int i = 0; i < to.count && i < from.count; ++i) to.lane[i] = static_cast<To>(f(from.lane[i]));
    return to;
}

template <class To, class Vector, class T, class From>
Vector convert(From v) {
    return map<To, Vector, T>(v, [](T x) { return x; });
}

template <class T, class Vector, class F>
std::uint64_t compare(Vector a, Vector b, F holds) {
    const Lanes<T, Vector> left(a), right(b);
    std::uint64_t mask = 0;
    for (int i = 0; i < left.count; ++i) mask |= static_cast<std::uint64_t>(holds(left.lane[i], right.lane[i])) << i;
    return mask;
}

inline constexpr auto disjoint = [](auto a, auto b) { return (a & b) == 0; };

template <class T, class Vector>
T largest(Vector v) {
    const Lanes<T, Vector> from(v);
    T most = from.lane[0];
    for (const T x : from.lane) most = x > most ? x : most;
    return most;
}

/// Indefinite where the number is none an int32 can hold.
inline std::int32_t to_int32(float rounded) {
    return rounded >= -0x1p31F && rounded < 0x1p31F ? static_cast<std::int32_t>(rounded) : INT32_MIN;
}

inline std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

/// The float of these bits; a subnormal number counts as zero.
inline float flushed(std::uint32_t bits) {
    if ((bits & 0x7F80'0000U) == 0) bits &= 0x8000'0000U;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline std::uint16_t to_bfloat16(float x) {
    const std::uint32_t bits = bits_of(x);
    if (std::isnan(x)) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    const std::uint32_t finite = bits_of(flushed(bits));
    return static_cast<std::uint16_t>((finite + 0x7FFFU + (finite >> 16 & 1U)) >> 16);
}

}  // namespace breccia::emulated

#define _MM_FROUND_NO_EXC 0x08
enum { _MM_CMPINT_EQ, _MM_CMPINT_LT, _MM_CMPINT_LE, _MM_CMPINT_NE = 4, _MM_CMPINT_NLT, _MM_CMPINT_NLE };
enum { _MM_PERM_BADC = 0x4E, _MM_PERM_CDAB = 0xB1 };
using __mmask8 = simde__mmask8;
using __mmask16 = simde__mmask16;
using __mmask32 = simde__mmask32;
using __mmask64 = simde__mmask64;

#define BRECCIA_EMULATED [[maybe_unused, gnu::noinline]] static
#define BRECCIA_LANES ::breccia::emulated

// ---- masked loads and stores

BRECCIA_EMULATED __m512i _mm512_mask_loadu_epi8(__m512i otherwise, __mmask64 m, const void* p) {
    return BRECCIA_LANES::load<std::uint8_t>(otherwise, m, p);
}
BRECCIA_EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 m, const void* p) {
    return BRECCIA_LANES::load<std::uint8_t>(_mm512_setzero_si512(), m, p);
}
BRECCIA_EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 m, const void* p) {
    return BRECCIA_LANES::load<std::uint16_t>(_mm512_setzero_si512(), m, p);
}
BRECCIA_EMULATED __m512i _mm512_maskz_loadu_epi32(__mmask16 m, const void* p) {
    return BRECCIA_LANES::load<std::uint32_t>(_mm512_setzero_si512(), m, p);
}
BRECCIA_EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void* p) {
    return BRECCIA_LANES::load<float>(_mm512_setzero_ps(), m, p);
}
BRECCIA_EMULATED __m512d _mm512_maskz_loadu_pd(__mmask8 m, const void* p) {
    return BRECCIA_LANES::load<double>(_mm512_setzero_pd(), m, p);
}
BRECCIA_EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 m, const void* p) {
    return BRECCIA_LANES::load<std::uint8_t>(_mm_setzero_si128(), m, p);
}
BRECCIA_EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 m, const void* p) {
    return BRECCIA_LANES::load<std::uint16_t>(_mm256_setzero_si256(), m, p);
}
BRECCIA_EMULATED void _mm512_mask_storeu_ps(void* p, __mmask16 m, __m512 v) { BRECCIA_LANES::store<float>(p, m, v); }
BRECCIA_EMULATED void _mm512_mask_storeu_epi32(void* p, __mmask16 m, __m512i v) {
    BRECCIA_LANES::store<std::uint32_t>(p, m, v);
}
BRECCIA_EMULATED __m512 _mm512_mask_i32gather_ps(__m512 otherwise, __mmask16 m, __m512i at, const void* p, int scale) {
    BRECCIA_LANES::Lanes<float, __m512> to(otherwise);
    const BRECCIA_LANES::Lanes<std::int32_t, __m512i> from(at);
    for (int i = 0; i < 16; ++i)
        if (BRECCIA_LANES::in(m, i))
            std::memcpy(&to.lane[i], static_cast<const char*>(p) + std::ptrdiff_t{from.lane[i]} * scale, sizeof(float));
    return to;
}

// ---- conversions

BRECCIA_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i v) {
    return BRECCIA_LANES::convert<std::uint32_t, __m512i, std::uint8_t>(v);
}
BRECCIA_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i v) {
    return BRECCIA_LANES::convert<std::int32_t, __m512i, std::int8_t>(v);
}
BRECCIA_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
    return BRECCIA_LANES::convert<std::uint32_t, __m512i, std::uint16_t>(v);
}
BRECCIA_EMULATED __m128i _mm512_cvtepi32_epi8(__m512i v) {
    return BRECCIA_LANES::convert<std::uint8_t, __m128i, std::uint32_t>(v);
}
BRECCIA_EMULATED __m256i _mm512_cvtepi32_epi16(__m512i v) {
    return BRECCIA_LANES::convert<std::uint16_t, __m256i, std::uint32_t>(v);
}
BRECCIA_EMULATED __m128i _mm512_cvtepi64_epi8(__m512i v) {
    return BRECCIA_LANES::convert<std::uint8_t, __m128i, std::uint64_t>(v);
}
BRECCIA_EMULATED void _mm512_mask_cvtepi32_storeu_epi8(void* p, __mmask16 m, __m512i v) {
    BRECCIA_LANES::store<std::uint8_t>(p, m, _mm512_cvtepi32_epi8(v));
}
BRECCIA_EMULATED __m512 _mm512_cvtepi32_ps(__m512i v) { return BRECCIA_LANES::convert<float, __m512, std::int32_t>(v); }
BRECCIA_EMULATED __m512i _mm512_cvtps_epi32(__m512 v) {
    return BRECCIA_LANES::map<std::int32_t, __m512i, float>(
        v, [](float x) { return BRECCIA_LANES::to_int32(std::nearbyint(x)); });
}
BRECCIA_EMULATED __m512i _mm512_cvt_roundps_epi32(__m512 v, int rounding) {
    const bool down = (rounding & 3) == _MM_FROUND_TO_NEG_INF;
    return BRECCIA_LANES::map<std::int32_t, __m512i, float>(
        v, [=](float x) { return BRECCIA_LANES::to_int32(down ? std::floor(x) : std::ceil(x)); });
}
BRECCIA_EMULATED __m256 _mm512_cvtpd_ps(__m512d v) { return BRECCIA_LANES::convert<float, __m256, double>(v); }
BRECCIA_EMULATED __m512 _mm512_cvtph_ps(__m256i v) { return BRECCIA_LANES::convert<float, __m512, _Float16>(v); }
BRECCIA_EMULATED __m256i _mm512_cvtps_ph(__m512 v, int) { return BRECCIA_LANES::convert<_Float16, __m256i, float>(v); }

// ---- comparisons

BRECCIA_EMULATED __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
    return static_cast<__mmask16>(
        BRECCIA_LANES::compare<std::int32_t>(a, b, [](std::int32_t x, std::int32_t y) { return x < y; }));
}
BRECCIA_EMULATED __mmask16 _mm512_cmpgt_epu32_mask(__m512i a, __m512i b) {
    return static_cast<__mmask16>(
        BRECCIA_LANES::compare<std::uint32_t>(a, b, [](std::uint32_t x, std::uint32_t y) { return x > y; }));
}
BRECCIA_EMULATED __mmask32 _mm512_cmpgt_epu16_mask(__m512i a, __m512i b) {
    return static_cast<__mmask32>(
        BRECCIA_LANES::compare<std::uint16_t>(a, b, [](std::uint16_t x, std::uint16_t y) { return x > y; }));
}
BRECCIA_EMULATED __mmask32 _mm512_cmplt_epu16_mask(__m512i a, __m512i b) { return _mm512_cmpgt_epu16_mask(b, a); }
BRECCIA_EMULATED __mmask64 _mm512_cmp_epu8_mask(__m512i a, __m512i b, int predicate) {
    return BRECCIA_LANES::compare<std::uint8_t>(a, b, [=](std::uint8_t x, std::uint8_t y) {
        const bool holds[] = {x == y, x<y, x <= y, false, x != y, x >= y, x> y, true};
        return holds[predicate];
    });
}
BRECCIA_EMULATED __mmask64 _mm512_mask_cmp_epu8_mask(__mmask64 m, __m512i a, __m512i b, int predicate) {
    return m & _mm512_cmp_epu8_mask(a, b, predicate);
}
BRECCIA_EMULATED __mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) {
    return BRECCIA_LANES::compare<std::uint8_t>(a, b, BRECCIA_LANES::disjoint);
}
BRECCIA_EMULATED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
    return static_cast<__mmask32>(BRECCIA_LANES::compare<std::uint16_t>(a, b, BRECCIA_LANES::disjoint));
}
BRECCIA_EMULATED __mmask16 _mm512_testn_epi32_mask(__m512i a, __m512i b) {
    return static_cast<__mmask16>(BRECCIA_LANES::compare<std::uint32_t>(a, b, BRECCIA_LANES::disjoint));
}
#define _mm512_mask_cmp_ps_mask(m, a, b, predicate) \
    static_cast<__mmask16>((m) & static_cast<__mmask16>(_mm512_cmp_ps_mask(a, b, predicate)))

// ---- arithmetic

BRECCIA_EMULATED __m512i _mm512_srai_epi32(__m512i v, unsigned by) {
    return BRECCIA_LANES::map<std::int32_t, __m512i, std::int32_t>(
        v, [=](std::int32_t x) { return x >> (by < 31 ? by : 31); });
}
BRECCIA_EMULATED float _mm512_reduce_max_ps(__m512 v) { return BRECCIA_LANES::largest<float>(v); }
BRECCIA_EMULATED std::int32_t _mm512_reduce_max_epi32(__m512i v) { return BRECCIA_LANES::largest<std::int32_t>(v); }
BRECCIA_EMULATED __m256 _mm512_extractf32x8_ps(__m512 v, int which) {
    __m256 half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32 * which, sizeof half);
    return half;
}
BRECCIA_EMULATED __m512i _mm512_shuffle_epi32(__m512i v, int order) {
    const BRECCIA_LANES::Lanes<std::int32_t, __m512i> from(v);
    BRECCIA_LANES::Lanes<std::int32_t, __m512i> to;
    for (int i = 0; i < 16; ++i) to.lane[i] = from.lane[(i & ~3) + (order >> 2 * (i & 3) & 3)];
    return to;
}

// SIMDe rounds products, too.
#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
BRECCIA_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const BRECCIA_LANES::Lanes<float, __m512> x(a), y(b);
    BRECCIA_LANES::Lanes<float, __m512> to(c);
    for (int i = 0; i < 16; ++i) to.lane[i] = std::fma(x.lane[i], y.lane[i], to.lane[i]);
    return to;
}
BRECCIA_EMULATED __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return _mm512_fmadd_ps(_mm512_sub_ps(_mm512_set1_ps(-0.0F), a), b, c);
}

// A product of float16 numbers is exact in float32, so that converting it rounds once.
using __m512h = __m512i;
BRECCIA_EMULATED __m512h _mm512_castsi512_ph(__m512i v) { return v; }
BRECCIA_EMULATED __m512i _mm512_castph_si512(__m512h v) { return v; }
BRECCIA_EMULATED __m512h _mm512_mul_ph(__m512h a, __m512h b) {
    const BRECCIA_LANES::Lanes<_Float16, __m512i> left(a), right(b);
    BRECCIA_LANES::Lanes<_Float16, __m512i> to;
    for (int i = 0; i < 32; ++i)
        to.lane[i] = static_cast<_Float16>(static_cast<float>(left.lane[i]) * static_cast<float>(right.lane[i]));
    return to;
}

// VCVTNE2PS2BF16 and VDPBF16PS round to nearest even and take subnormal numbers, results too, for zeros. The second
// product of a pair is added first, and each sum rounds once: products of bfloat16 numbers are exact.
#undef _mm512_cvtne2ps_pbh
#undef _mm512_dpbf16_ps
BRECCIA_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    const BRECCIA_LANES::Lanes<float, __m512> first(low), second(high);
    BRECCIA_LANES::Lanes<std::uint16_t, __m512bh> to;
    for (int i = 0; i < 16; ++i) {
        to.lane[i] = BRECCIA_LANES::to_bfloat16(first.lane[i]);
        to.lane[16 + i] = BRECCIA_LANES::to_bfloat16(second.lane[i]);
    }
    return to;
}
BRECCIA_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    using BRECCIA_LANES::bits_of, BRECCIA_LANES::flushed;
    const BRECCIA_LANES::Lanes<std::uint32_t, __m512bh> left(a), right(b);
    BRECCIA_LANES::Lanes<float, __m512> to(sum);
    for (int i = 0; i < 16; ++i) {
        const std::uint32_t x = left.lane[i], y = right.lane[i];
        float total = flushed(bits_of(to.lane[i]));
        total = flushed(bits_of(total + flushed(x & 0xFFFF'0000U) * flushed(y & 0xFFFF'0000U)));
        to.lane[i] = flushed(bits_of(total + flushed(x << 16) * flushed(y << 16)));
    }
    return to;
}

// AVX-VNNI's spelling of the same instruction.
BRECCIA_EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i bytes, __m256i signed_bytes) {
    return simde_mm256_dpbusd_epi32(sum, bytes, signed_bytes);
}

#undef BRECCIA_EMULATED
#undef BRECCIA_LANES
