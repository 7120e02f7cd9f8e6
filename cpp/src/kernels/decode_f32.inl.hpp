// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes to float32 panels: (code - zero point) * scale, as dequantize has it.

template <class Unit>
static void decode_row_f32(const DecodeF32& d, const UnitNumbers& numbers, std::int64_t row) {
    const std::uint8_t* codes = d.codes + row * d.row_stride;
    const float* scales = d.scales + row * d.scale_stride;
    const float* zeros = Unit::shifted && d.zero_points != nullptr ? d.zero_points + row * d.scale_stride : nullptr;
    float* out = d.out + row * d.out_stride;
    const std::int64_t bytes = Unit::packed ? (d.k + 1) / 2 : d.k;
    Unit unit{numbers};
    const auto put = [&](const std::uint8_t* from, std::int64_t k) BRECCIA_INLINE_LAMBDA {
        F x_f32x16[4];
        unit.decode(from, x_f32x16);
        // The next columns of a row are asked for: short runs so far apart are beyond what hardware prefetches.
        prefetch(from + bytes);
        const auto scaled = [&](int part, std::int64_t block) BRECCIA_INLINE_LAMBDA {
            F x = x_f32x16[part];
            if constexpr (Unit::shifted) x = f_sub(x, f_set((zeros != nullptr ? zeros[block] : 0.0F) - numbers.offset));
            if constexpr (Unit::scaled) x = f_mul(x, f_set(numbers.factor));
            f_store(out + k + part * 16, f_mul(x, f_set(scales[block])));
        };
        if (d.block == 16) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) scaled(part, k / 16 + part);
        } else if (d.block == 32) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) scaled(part, k / 32 + part / 2);
        } else {
            const std::int64_t block = (d.skip + k) / d.block;
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) scaled(part, block);
        }
    };
    std::int64_t at = 0, k = 0;
    for (; at + Unit::bytes <= bytes; at += Unit::bytes, k += 64) put(codes + at, k);
    if (at < bytes) {
        alignas(64) std::uint8_t last[Unit::bytes];
        for (std::int64_t i = 0; i < Unit::bytes; ++i) last[i] = at + i < bytes ? codes[at + i] : 0;
        put(last, k);
    }
    if constexpr (!Unit::packed)
        if (unit.missed_nan()) [[unlikely]]
            for (std::int64_t i = 0; i < d.k; ++i)
                if (const float value = numbers.values[codes[i]]; value != value) out[i] = value;
}

template <class C>
static void decode_f32(const DecodeF32& d) {
    using Units = UnitsOf<C>;
    for (std::int64_t row = 0; row < d.rows; ++row) {
        if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
            if (d.zero_points != nullptr) {
                decode_row_f32<typename Units::ShiftedPanel>(d, Units::numbers, row);
                continue;
            }
        decode_row_f32<typename Units::Panel>(d, Units::numbers, row);
    }
}
