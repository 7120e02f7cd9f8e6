// SPDX-License-Identifier: Apache-2.0
//
// A unit of codes: as many as are decoded at a time to vectors of numbers, its parts. Lanes of all parts side by side
// take elements that follow one another, so that a block of a quarter or half of a unit is a run of lanes. Backends
// specialize this for formats that have a quicker way.

inline constexpr std::int64_t part_lanes = 16;

template <class C>
struct CodeUnit {
    static constexpr bool packed = C::bits == 4;
    static constexpr std::int64_t elements = 16, bytes = packed ? 8 : 16;
    static constexpr int parts = 1;
    static constexpr float offset = 0;  ///< what numbers come out too small by
    static constexpr float factor = 1;  ///< and then what they must be multiplied by
    /// Where among a unit's lanes element k comes out.
    static constexpr std::int64_t place(std::int64_t k) { return k; }

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[parts]) {
        if constexpr (packed)
            out[0] = f_decode<C>(i_load_nibbles(p));
        else
            out[0] = f_decode<C>(i_load_bytes(p));
    }
    BRECCIA_INLINE_MEMBER bool missed_nan() { return false; }
};

/// 64 codes, whose numbers come out in order. Backends specialize this, too.
template <class C>
struct OrderedUnit {
    static constexpr bool packed = C::bits == 4;
    static constexpr std::int64_t bytes = packed ? 32 : 64;
    static constexpr float offset = 0, factor = 1;  ///< as in CodeUnit

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[4]) {
        for (int part = 0; part < 4; ++part)
            if constexpr (packed)
                out[part] = f_decode<C>(i_load_nibbles(p + 8 * part));
            else
                out[part] = f_decode<C>(i_load_bytes(p + 16 * part));
    }
    BRECCIA_INLINE_MEMBER bool missed_nan() { return false; }
};
