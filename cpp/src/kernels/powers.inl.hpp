// SPDX-License-Identifier: Apache-2.0
//
// Logarithms and powers of two by additions and products that are each rounded once, so that every backend has the
// same bits; python/breccia/kernels/triton/device/powers.py does the same. Coefficients are minimax in the absolute
// error of log2, 3.0e-7, and in the relative one of 2^x, 9.1e-8.

inline constexpr float log2_terms[] = {0x1.7154c4p+0F, -0x1.71582ep-1F, 0x1.ebff06p-2F, -0x1.6f93b2p-2F,
                                       0x1.30659cp-2F, -0x1.173e24p-2F, 0x1.5d75a4p-3F};
inline constexpr float exp2_terms[] = {0x1.62e42ap-1F, 0x1.ebf9bcp-3F, 0x1.c6b752p-5F, 0x1.3cea88p-7F, 0x1.5bba14p-10F};

// x * terms[0] + x^2 * terms[1] + …, from the last term on.
template <int Count>
BRECCIA_INLINE F polynomial(F x, const float (&terms)[Count]) {
    F sum = f_set(terms[Count - 1]);
#pragma GCC unroll 8
    for (int i = Count - 2; i >= 0; --i) sum = f_add(f_mul(sum, x), f_set(terms[i]));
    return f_mul(sum, x);
}

// log2 of a number above zero as a whole number and a part from -1/2 to 1/2: the differences of two are exact in the
// first. Of zero, infinities and NaNs it is some number. Subnormal: whether x may be a subnormal number.
struct Logarithm {
    F whole, part;
};
template <bool Subnormal>
BRECCIA_INLINE Logarithm logarithm(F x) {
    constexpr std::int32_t root_half = 0x3F35'04F3, bias = 127;
    F offset = f_set(integer_magic + static_cast<float>(bias));
    if constexpr (Subnormal) {
        const Mask small = f_less(x, f_set(0x1p-126F));
        x = f_select(small, f_mul(x, f_set(0x1p24F)), x);
        offset = f_select(small, f_set(integer_magic + static_cast<float>(bias + 24)), offset);
    }
    // The exponent rises where the significand passes the root of two.
    const I bits = i_add(as_bits(x), i_set((bias << 23) - root_half));
    const I exponent = i_add(i_shr<23>(bits), i_set(static_cast<std::int32_t>(bits_of(integer_magic))));
    const F significand = as_float(i_add(i_and(bits, i_set(0x007F'FFFF)), i_set(root_half)));
    return {f_sub(as_float(exponent), offset), polynomial(f_sub(significand, f_set(1.0F)), log2_terms)};
}

// log2(a / b).
BRECCIA_INLINE F log2_ratio(const Logarithm& a, const Logarithm& b) {
    return f_add(f_sub(a.whole, b.whole), f_sub(a.part, b.part));
}

// 2^x for x from -126 to 127.
BRECCIA_INLINE F power_of_two_f(F x) {
    const F sum = f_add(x, f_set(integer_magic));
    const F rest = f_sub(x, f_sub(sum, f_set(integer_magic)));
    const F significand = f_add(polynomial(rest, exp2_terms), f_set(1.0F));
    return as_float(i_add(as_bits(significand), i_shl<23>(as_bits(sum))));
}
