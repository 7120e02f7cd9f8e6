// SPDX-License-Identifier: Apache-2.0
//
// An activation as Digits: of each step of 128 packed elements or 64, integers of three signed bytes times a power of
// two, and where these leave something, up to three bytes more. No bit is lost, or the activation is refused.

/// The bits of the largest magnitude of a step.
template <std::int64_t Step>
static int largest_bits(const float* x) {
    I most = i_set(0);
    for (std::int64_t k = 0; k < Step; k += 16) most = i_max(most, i_and(as_bits(f_load(x + k)), i_set(0x7FFF'FFFF)));
    return i_max_lane(most);
}

/// The exponent of a number that is neither zero nor infinite nor NaN.
constexpr int exponent_of(int bits) { return (bits >> 23) - 127; }

/// Digits of a step's elements: [digit][element].
template <bool Packed>
using ElementDigits = std::int8_t[3][row_step(Packed)];

/// `count` digits of v, which are so many bytes: |v| < 2^(8 count - 1) - 2^(8 count - 8). Returns what they leave;
/// those of 16 elements go to digits[...][at].
template <bool Packed>
BRECCIA_INLINE F f_take_digits(F v, int count, ElementDigits<Packed>& digits, std::int64_t at) {
    I rest = _mm512_cvtps_epi32(v);
    const F left = f_sub(v, _mm512_cvtepi32_ps(rest));
    for (int d = count - 1; d >= 0; --d) {
        const I digit = d == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits[d] + at), _mm512_cvtepi32_epi8(digit));
        rest = _mm512_srai_epi32(i_sub(rest, digit), 8);
    }
    return left;
}

/// A step's digits in the order of the codes' bytes, and minus the sum of the integers that a lane meets. Returns which
/// doublewords of the last digit are not all zeros.
template <bool Packed>
static Mask put_digits(const ElementDigits<Packed>& digits, int count, int times, std::int8_t (*out)[128],
                       std::int32_t* offsets, std::int64_t run, std::int32_t (*runs)[16]) {
    constexpr int vectors = Packed ? 2 : 1;
    I total = i_set(0);
    Mask last = 0;
    for (int d = 0; d < count; ++d) {
        I bytes[vectors];
        bytes[0] = _mm512_loadu_si512(digits[d]);
        if constexpr (vectors == 2) {
            const I low = bytes[0], high = _mm512_loadu_si512(digits[d] + 64);
            const auto join = [](__m256i a, __m256i b)
                                  BRECCIA_INLINE_LAMBDA { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); };
            bytes[0] = join(_mm512_cvtepi16_epi8(low), _mm512_cvtepi16_epi8(high));
            bytes[1] =
                join(_mm512_cvtepi16_epi8(_mm512_srli_epi16(low, 8)), _mm512_cvtepi16_epi8(_mm512_srli_epi16(high, 8)));
        }
        I sum = i_set(0);
        last = 0;
        for (int v = 0; v < vectors; ++v) {
            last = m_or(last, _mm512_test_epi32_mask(bytes[v], bytes[v]));
            _mm512_store_si512(out[d] + v * 64, bytes[v]);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes[v]);
        }
        if (run > 0) {
            alignas(64) std::int32_t doublewords[16];
            i_store(doublewords, _mm512_mullo_epi32(sum, i_set(-times)));
            std::int32_t* of_run = runs[d];
            for (std::int64_t first = 0; first < 16; first += run, ++of_run) {
                *of_run = 0;
                for (std::int64_t j = first; j < first + run; ++j) *of_run += doublewords[j];
            }
        }
        total = i_add(_mm512_slli_epi32(total, 8), sum);
    }
    i_store(offsets, _mm512_mullo_epi32(total, i_set(-times)));
    return last;
}

/// The elements of a step whose products a lane adds up.
template <bool Packed>
inline constexpr int lane_elements = Packed ? 8 : 4;

/// The bits of the largest magnitude among those that a lane adds up, in the place of each.
template <bool Packed>
BRECCIA_INLINE I lane_magnitudes(F x) {
    I most = i_and(as_bits(x), i_set(0x7FFF'FFFF));
    most = i_max(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB));
    most = i_max(most, _mm512_shuffle_epi32(most, _MM_PERM_BADC));
    if constexpr (lane_elements<Packed> == 8) most = i_max(most, _mm512_shuffle_i32x4(most, most, 0b10'11'00'01));
    return most;
}

/// Powers of two that make integers of numbers whose largest magnitude has the bits `most`, and of these numbers
/// again: as large as three bytes hold, so that the third is seldom needed, below 2^23 - 2^16. Bytes of codes are
/// larger than packed ones, and for the sums of a lane to fit in 32 bits theirs are below 2^21.
template <bool Packed>
BRECCIA_INLINE void digit_units(I most, F& up, F& unit) {
    I top = i_set(Packed ? 22 : 20);
    if constexpr (Packed)
        top = i_sub(top, i_select(i_less(i_and(most, i_set(0x7F'FFFF)), i_set(0x7E'0000)), i_set(0), i_set(1)));
    const I unit_exponent = i_sub(_mm512_srli_epi32(most, 23), top);
    unit = as_float(_mm512_slli_epi32(unit_exponent, 23));
    up = as_float(_mm512_slli_epi32(i_sub(i_set(254), unit_exponent), 23));
}

template <bool Packed>
static bool pack_step(const PackDigits& p, const CodeBytes& of_codes, std::int64_t s) {
    constexpr std::int64_t step = row_step(Packed);
    DigitStep& to = p.out->steps[s];
    const float* x = p.x + s * step;
    const int largest = largest_bits<step>(x), exponent = exponent_of(largest);
    // Of a weight in rows, lanes whose elements are smaller have a smaller unit, and so fewer third digits.
    constexpr int fineness = 7;
    const bool one_unit = p.run > 0 || exponent < -100;
    const int least = exponent - fineness > -100 ? exponent - fineness : -100;
    const I at_least = i_set(one_unit ? largest : static_cast<int>(bits_of(exp2i(least))));
    const F zero = f_set(0.0F);
    alignas(64) float left[step], units[step];
    ElementDigits<Packed> digits;
    Mask lost = 0, any = 0;
    for (std::int64_t k = 0; k < step; k += 16) {
        const F value = f_load(x + k);
        const I most = i_max(lane_magnitudes<Packed>(value), at_least);
        F up_f32x16 = f_set(1.0F), unit_f32x16 = up_f32x16;
        // Zeros have no largest number to take a unit from. Numbers below 2^-100 leave a rest at unit 1: refused.
        if (exponent >= -100) digit_units<Packed>(most, up_f32x16, unit_f32x16);
        const F v = f_mul(value, up_f32x16);
        const F rest = f_take_digits<Packed>(v, DigitStep::first, digits, k);
        f_store(left + k, rest);
        f_store(units + k, unit_f32x16);
        any = m_or(any, _mm512_cmp_ps_mask(rest, zero, _CMP_NEQ_UQ));
        lost = m_or(lost, _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, zero, _CMP_EQ_OQ), value, zero, _CMP_NEQ_UQ));
    }
    if (lost != 0) return false;
    const int times = p.zero_points ? 1 : of_codes.offset;
    to.thirds = static_cast<std::uint16_t>(
        put_digits<Packed>(digits, DigitStep::first, times, to.digits, to.offsets[0], p.run, to.runs));
    for (int lane = 0; lane < 16; ++lane)
        to.units[lane] = units[lane * lane_elements<Packed>] * (of_codes.unit * p.out->bias);
    int further = 0;
    while (any != 0) {
        if (++further > DigitStep::most - DigitStep::first) return false;
        const F more_f32x16 = f_set(exp2i(8 * further - 1));
        any = 0;
        for (std::int64_t k = 0; k < step; k += 16) {
            const F rest = f_take_digits<Packed>(f_mul(f_load(left + k), more_f32x16), further, digits, k);
            any = m_or(any, _mm512_cmp_ps_mask(rest, zero, _CMP_NEQ_UQ));
        }
    }
    to.further = static_cast<std::uint8_t>(further);
    to.count = static_cast<std::uint8_t>(to.thirds == 0 && further == 0 ? 2 : DigitStep::first + further);
    if (further > 0) {
        put_digits<Packed>(digits, further, times, to.digits + DigitStep::first, to.offsets[1], p.run,
                           to.runs + DigitStep::first);
        to.smaller = exp2i(1 - 8 * further);
    }
    return true;
}

/// Digits::bias where E4M3 scales are read without theirs.
constexpr float lifted_bias = exp2i(73);

template <bool Packed>
static bool pack_digits(const PackDigits& p, const CodeBytes& of_codes) {
    constexpr std::int64_t step = row_step(Packed);
    int least = 0, most = 0;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        const int exponent = exponent_of(largest_bits<step>(p.x + s * step));
        if (exponent > 100) return false;  // infinities and NaN, too
        if (exponent < -126) continue;
        least = exponent < least ? exponent : least;
        most = exponent > most ? exponent : most;
    }
    // Sums times E4M3 scales, without the scales' bias or with it, stay within float32's range: the least digit there
    // is, 2^-51 of its step's largest, by the least scale that is not subnormal; and the largest by 2^20 codes of 127.
    p.out->bias = p.scale_type == ScaleType::e4m3 && least >= -20 && most <= 17 ? lifted_bias : 1.0F;
    for (std::int64_t s = 0; s < p.steps; ++s)
        if (!pack_step<Packed>(p, of_codes, s)) return false;
    return true;
}

template <class C>
static bool pack_digits_of(const PackDigits& p) {
    return pack_digits<is_packed(byte_reading<C>)>(p, code_bytes<C>);
}
