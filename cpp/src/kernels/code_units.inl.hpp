// SPDX-License-Identifier: Apache-2.0
//
// A unit of codes: as many as are decoded at a time to vectors of numbers, its parts. Lanes of all parts side by side
// take elements that follow one another, so that a block of a quarter or half of a unit is a run of lanes. Backends
// specialize UnitsOf for formats that have a quicker way: units of one type do for several formats, which differ in
// the numbers they are told.

inline constexpr std::int64_t part_lanes = 16;

/// What a unit is told of its format.
struct UnitNumbers {
    const float* values;          ///< of every code
    float offset = 0;             ///< what numbers come out too small by
    float factor = 1;             ///< and then what they must be multiplied by
    const void* table = nullptr;  ///< the backend's own
};

/// What units have whose numbers tell a NaN, or whose codes have none.
struct PlainUnit {
    static constexpr bool shifted = false;  ///< whether there may be an offset, or zero points
    BRECCIA_INLINE_MEMBER bool missed_nan() const { return false; }
};

template <class C>
struct CodeUnit : PlainUnit {
    BRECCIA_INLINE_MEMBER explicit CodeUnit(const UnitNumbers& /*unused*/) {}
    static constexpr bool packed = C::bits == 4;
    static constexpr std::int64_t elements = 16, bytes = packed ? 8 : 16;
    static constexpr int parts = 1;
    /// Where among a unit's lanes element k comes out.
    static constexpr std::int64_t place(std::int64_t k) { return k; }

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[parts]) {
        if constexpr (std::is_same_v<C, Int8>)
            out[0] = f_of_signed_bytes(p);
        else
            out[0] = f_decode<C>(packed ? i_load_nibbles(p) : i_load_bytes(p));
    }
};

/// 64 codes, whose numbers come out in order.
template <class C>
struct OrderedUnit : PlainUnit {
    BRECCIA_INLINE_MEMBER explicit OrderedUnit(const UnitNumbers& /*unused*/) {}
    static constexpr bool packed = C::bits == 4;
    static constexpr bool scaled = false;  ///< whether there may be a factor
    static constexpr std::int64_t bytes = packed ? 32 : 64;

    BRECCIA_INLINE_MEMBER void decode(const std::uint8_t* p, F (&out)[4]) {
        if constexpr (std::is_same_v<C, Int8>) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) out[part] = f_of_signed_bytes(p + 16 * part);
        } else {  // takes more instructions: the compiler chooses, and NEON's function for FP8 is half as long
            for (int part = 0; part < 4; ++part)
                out[part] = f_decode<C>(packed ? i_load_nibbles(p + 8 * part) : i_load_bytes(p + 16 * part));
        }
    }
};

/// One of these units for codes with zero points, which it is given.
template <class Unit>
struct ShiftedUnit : Unit {
    static constexpr bool shifted = true;
    BRECCIA_INLINE_MEMBER explicit ShiftedUnit(const UnitNumbers& numbers) : Unit(numbers) {}
};

/// The units of a format: for products and for panels, and those with zero points.
template <class C>
struct UnitsOf {
    using Product = CodeUnit<C>;
    using ShiftedProduct = ShiftedUnit<Product>;
    using Panel = OrderedUnit<C>;
    using ShiftedPanel = ShiftedUnit<Panel>;
    static constexpr UnitNumbers numbers{.values = decode_table<C>.values};
};
