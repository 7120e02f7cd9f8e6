// SPDX-License-Identifier: Apache-2.0
//
// Units of codes to numbers, see kernels/code_units.inl.hpp, by way of float16, whose conversion takes subnormal
// numbers without delay: a code's fields are moved to float16's, and what the exponents' biases differ by is left to
// the scale. Of AVX-512, too: a vector of float16 numbers is 256 bits.

/// Formats whose exponents and fractions fit float16's, infinities too, which have its largest exponent alone; 4-bit
/// codes are looked up.
template <class C>
inline constexpr bool through_halves = [] {
    if constexpr (C::bits != 4 && C::family == CodecFamily::minifloat)
        return C::specials == Specials::ieee ? C::exponent_bits == 5 : C::exponent_bits < 5;
    else
        return false;
}();

/// High bytes of the float16 numbers that 4-bit codes stand for, unsigned ones less 8: their low bytes are zero.
template <class C>
inline constexpr float table_offset = C::lowest < 0 ? 0.0F : 8.0F;
struct HighBytes {
    alignas(16) std::uint8_t byte[16];
};
template <class C>
inline constexpr HighBytes high_bytes = [] {
    HighBytes of{};
    for (int i = 0; i < 16; ++i)
        of.byte[i] =
            static_cast<std::uint8_t>(to_float16(C::decode(static_cast<std::uint8_t>(i)) - table_offset<C>).bits >> 8);
    return of;
}();

/// 64 packed codes of any format.
struct Nibbles : PlainUnit {
    static constexpr bool packed = true;
    static constexpr std::int64_t bytes = 32;
    const HighBytes* table;

    BRECCIA_INLINE_MEMBER explicit Nibbles(const UnitNumbers& numbers)
        : table(static_cast<const HighBytes*>(numbers.table)) {}
    /// High bytes of their float16 numbers: those of even k, those of odd k.
    BRECCIA_INLINE_MEMBER void look_up(const std::uint8_t* p, __m256i& even, __m256i& odd) const {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), nibble = _mm256_set1_epi8(15);
        const __m256i of_codes =
            _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table->byte)));
        even = _mm256_shuffle_epi8(of_codes, _mm256_and_si256(codes, nibble));
        odd = _mm256_shuffle_epi8(of_codes, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    }
};

struct NibbleUnit : Nibbles {
    BRECCIA_INLINE_MEMBER explicit NibbleUnit(const UnitNumbers& numbers) : Nibbles(numbers) {}
    static constexpr std::int64_t elements = 64;
    static constexpr int parts = 4;
    /// Lane i of a part: every fourth element.
    static constexpr std::int64_t place(std::int64_t k) { return k % 4 * 16 + k / 4; }

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[parts]) const {
        const __m256i high_byte = _mm256_set1_epi16(-256);
        __m256i even, odd;
        look_up(p, even, odd);
        out[0] = f_of_halves(_mm256_slli_epi16(even, 8));
        out[1] = f_of_halves(_mm256_slli_epi16(odd, 8));
        out[2] = f_of_halves(_mm256_and_si256(even, high_byte));
        out[3] = f_of_halves(_mm256_and_si256(odd, high_byte));
    }
};

struct OrderedNibbles : Nibbles {
    BRECCIA_INLINE_MEMBER explicit OrderedNibbles(const UnitNumbers& numbers) : Nibbles(numbers) {}
    static constexpr bool scaled = false;
    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[4]) const {
        __m256i even, odd;
        look_up(p, even, odd);
        // Unpacking works within 128-bit halves: the upper ones are elements from 32 up.
        const __m256i zero = _mm256_setzero_si256();
        const __m256i first = _mm256_unpacklo_epi8(even, odd), second = _mm256_unpackhi_epi8(even, odd);
        const __m256i a = _mm256_unpacklo_epi8(zero, first), b = _mm256_unpackhi_epi8(zero, first);
        const __m256i c = _mm256_unpacklo_epi8(zero, second), d = _mm256_unpackhi_epi8(zero, second);
        out[0] = f_of_halves(_mm256_permute2x128_si256(a, b, 0x20));
        out[1] = f_of_halves(_mm256_permute2x128_si256(c, d, 0x20));
        out[2] = f_of_halves(_mm256_permute2x128_si256(a, b, 0x31));
        out[3] = f_of_halves(_mm256_permute2x128_si256(c, d, 0x31));
    }
};

/// Unsigned codes always come out too small by 8.
template <class C>
requires(C::bits == 4)
struct UnitsOf<C> {
    using ShiftedProduct = ShiftedUnit<NibbleUnit>;
    using ShiftedPanel = ShiftedUnit<OrderedNibbles>;
    using Product = std::conditional_t<table_offset<C> == 0, NibbleUnit, ShiftedProduct>;
    using Panel = std::conditional_t<table_offset<C> == 0, OrderedNibbles, ShiftedPanel>;
    static constexpr UnitNumbers numbers{
        .values = decode_table<C>.values, .offset = table_offset<C>, .table = &high_bytes<C>};
};

/// Byte codes at the tops of words to float16 numbers. The sign goes to the top, and from there with the rest to the
/// right: its copies are masked out.
template <class C>
BRECCIA_INLINE __m256i halves_of(__m256i words) {
    constexpr int to_top = 8 - C::bits, right = to_top + C::mantissa_bits - 2;
    const __m256i fields = _mm256_set1_epi16(static_cast<short>(0x8000 | C::magnitude_mask << (10 - C::mantissa_bits)));
    if constexpr (to_top > 0) words = _mm256_slli_epi16(words, to_top);
    if constexpr (right > 0) words = _mm256_srai_epi16(words, right);
    return _mm256_and_si256(words, fields);
}

/// A unit of byte codes that notices those of NaNs that float16 numbers would not tell.
template <class C>
struct WatchedUnit {
    static constexpr bool packed = false, shifted = false;
    __m256i seen = _mm256_setzero_si256();

    BRECCIA_INLINE_MEMBER explicit WatchedUnit(const UnitNumbers& /*unused*/) {}
    BRECCIA_INLINE_MEMBER void look_at(__m256i codes) {
        if constexpr (C::bits == 8 && C::specials == Specials::nan_ones)
            seen = _mm256_max_epu8(seen, _mm256_and_si256(codes, _mm256_set1_epi8(C::magnitude_mask)));
        if constexpr (C::bits == 8 && C::specials == Specials::nan_zero)
            seen = _mm256_or_si256(seen, _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(static_cast<char>(C::nan_code))));
    }
    BRECCIA_INLINE_MEMBER bool missed_nan() const {
        __m256i nan = seen;
        if constexpr (C::bits == 8 && C::specials == Specials::nan_ones)
            nan = _mm256_cmpeq_epi8(seen, _mm256_set1_epi8(C::magnitude_mask));
        return _mm256_testz_si256(nan, nan) == 0;
    }
};

template <class C>
struct HalfUnit : WatchedUnit<C> {
    BRECCIA_INLINE_MEMBER explicit HalfUnit(const UnitNumbers& numbers) : WatchedUnit<C>(numbers) {}
    static constexpr std::int64_t bytes = 32, elements = 32;
    static constexpr int parts = 2;
    /// Lane i of a part: every second element.
    static constexpr std::int64_t place(std::int64_t k) { return k % 2 * 16 + k / 2; }

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[parts]) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        out[0] = f_of_halves(halves_of<C>(_mm256_slli_epi16(codes, 8)));
        out[1] = f_of_halves(halves_of<C>(codes));
        this->look_at(codes);
    }
};

template <class C>
struct OrderedHalves : WatchedUnit<C> {
    BRECCIA_INLINE_MEMBER explicit OrderedHalves(const UnitNumbers& numbers) : WatchedUnit<C>(numbers) {}
    static constexpr bool scaled = true;
    static constexpr std::int64_t bytes = 64;

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[4]) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * part));
            out[part] = f_of_halves(halves_of<C>(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8)));
        }
        this->look_at(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        this->look_at(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
    }
};

template <class C>
requires through_halves<C>
struct UnitsOf<C> {
    using Product = HalfUnit<C>;
    using Panel = OrderedHalves<C>;
    static constexpr UnitNumbers numbers{.values = decode_table<C>.values, .factor = exp2i(15 - C::bias)};
};
