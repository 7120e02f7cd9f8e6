// SPDX-License-Identifier: Apache-2.0

// See to_bfloat16; above the low half-words of the lanes stands nothing.
BRECCIA_INLINE I bfloat16_bits(F x) {
    const I bits = as_bits(x);
    const I odd = i_and(i_shr<16>(bits), i_set(1));
    const I rounded = i_shr<16>(i_add(bits, i_add(odd, i_set(0x7FFF))));
    const I quiet = i_or(i_shr<16>(bits), i_set(0x40));
    const Mask nan = i_less(i_set(0x7F80'0000), i_and(bits, i_set(0x7FFF'FFFF)));
    return i_select(nan, quiet, rounded);
}

BRECCIA_INLINE void f_store_as(BFloat16* p, F x) {
    i_store_words(reinterpret_cast<std::uint16_t*>(p), bfloat16_bits(x));
}
