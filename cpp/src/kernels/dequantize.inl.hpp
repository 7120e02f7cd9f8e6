// SPDX-License-Identifier: Apache-2.0
//
// (decode(code) - zero_point) * scale, rounded once more where the output is narrower than float32.

template <class C>
BRECCIA_INLINE F decode_lanes(const std::uint8_t* codes, std::int64_t i, bool packed) {
    if constexpr (C::bits == 4)
        if (packed) return f_decode<C>(i_load_nibbles(codes + i / 2));
    return f_decode<C>(i_load_bytes(codes + i));
}

template <class C>
BRECCIA_INLINE void decode_wide(const std::uint8_t* codes, std::int64_t i, bool packed, F (&x)[4]) {
    if constexpr (f_decodes_wide<C>)
        f_decode_wide<C>(codes + i, x);
    else
        for (int j = 0; j < 4; ++j) x[j] = decode_lanes<C>(codes, i + j * lanes, packed);
}

// Whether no product with a scale is a subnormal number, which bfloat16 instructions would flush: no code less a zero
// point is below 2^-36 but zero.
static bool stays_normal(const DequantizeRow& row) {
    constexpr float least = exp2i(-90);
    const std::int64_t count = (row.begin % row.block + row.count + row.block - 1) / row.block;
    const I mask = i_set(0x7FFF'FFFF), bound = i_set(static_cast<int>(bits_of(least)));
    Mask small = i_less(bound, bound);
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
        small = m_or(small, i_less(i_and(as_bits(f_load(row.scales + i)), mask), bound));
    for (; i < count; ++i)
        if ((bits_of(row.scales[i]) & f32_abs_mask) < bits_of(least)) return false;
    return i_none(small);
}

template <class T>
BRECCIA_INLINE void store_wide(T* out, const F (&x)[4], [[maybe_unused]] bool normal) {
    if constexpr (std::is_same_v<T, BFloat16> && f_stores_bf16)
        if (normal) return f_store_normal(out, x);
    for (int j = 0; j < 4; ++j) f_store_as(out + j * lanes, x[j]);
}

// At most 64 elements [at, at + n) of a row under one scale, as float32.
template <class C>
BRECCIA_OUT_OF_LINE void dequantize_some(const DequantizeRow& row, std::int64_t at, std::int64_t n, float scale,
                                         float zero_point, float* out) {
    const float* table = decode_table<C>.values;
    const auto value = [&](std::int64_t i) {
        unsigned code = row.codes[row.packed ? i / 2 : i];
        if (row.packed && i % 2 != 0) code >>= 4U;
        return (table[code & ((1U << C::bits) - 1U)] - zero_point) * scale;
    };
    const F scale_f32x16 = f_set(scale), zero_f32x16 = f_set(zero_point);
    std::int64_t i = 0;
    if (row.packed && at % 2 != 0 && n > 0) out[i++] = value(at);
    for (; i + lanes <= n; i += lanes) {
        const F x_f32x16 = decode_lanes<C>(row.codes, at + i, row.packed);
        f_store(out + i, f_mul(f_sub(x_f32x16, zero_f32x16), scale_f32x16));
    }
    for (; i < n; ++i) out[i] = value(at + i);
}

template <class C, class T>
BRECCIA_INLINE void dequantize_some_to(const DequantizeRow& row, std::int64_t at, std::int64_t n, float scale,
                                       float zero_point, T* out) {
    if constexpr (std::is_same_v<T, float>) {
        dequantize_some<C>(row, at, n, scale, zero_point, out);
    } else {
        alignas(64) float numbers[wide];
        dequantize_some<C>(row, at, n, scale, zero_point, numbers);
        store_run<T>(numbers, n, out);
    }
}

template <class C, class T>
static void dequantize_row(const DequantizeRow& row) {
    T* out = static_cast<T*>(row.out);
    constexpr bool may_flush = std::is_same_v<T, BFloat16> && f_stores_bf16;
    const bool normal = may_flush && C::family != CodecFamily::exponent && stays_normal(row);
    // Blocks of 16 or 32 elements, four or two to 64 of them; of others a run of blocks is one.
    const bool short_blocks =
        (row.block == lanes || row.block == 2 * lanes) && row.begin % row.block == 0 && row.zero_points == nullptr;
    for (std::int64_t done = 0, block = 0; done < row.count;) {
        const std::int64_t at = row.begin + done, left = row.count - done;
        const float* scale = row.scales + block;
        float zero_point = 0;
        std::int64_t n = 0, blocks = 1, per_step = 0;
        if (short_blocks && left >= wide) {
            n = left / wide * wide;
            blocks = n / row.block;
            per_step = wide / row.block;
        } else {
            const std::int64_t rest_of_block = row.block - at % row.block;
            n = rest_of_block < left ? rest_of_block : left;
            if (row.zero_points != nullptr) zero_point = row.zero_points[block];
        }
        std::int64_t i = 0;
        if (row.packed && at % 2 != 0) {
            dequantize_some_to<C>(row, at, 1, *scale, zero_point, out + done);
            i = 1;
        }
        const std::int64_t second = per_step / 4, third = per_step / 2, fourth = per_step * 3 / 4;
        for (; i + wide <= n; i += wide, scale += per_step) {
            F x[4];
            decode_wide<C>(row.codes, at + i, row.packed, x);
            if constexpr (C::family == CodecFamily::integer)
                if (zero_point != 0.0F)
                    for (F& x_f32x16 : x) x_f32x16 = f_sub(x_f32x16, f_set(zero_point));
            x[0] = f_mul(x[0], f_set(scale[0]));
            x[1] = f_mul(x[1], f_set(scale[second]));
            x[2] = f_mul(x[2], f_set(scale[third]));
            x[3] = f_mul(x[3], f_set(scale[fourth]));
            store_wide(out + done + i, x, normal);
        }
        if (i < n) dequantize_some_to<C>(row, at + i, n - i, *scale, zero_point, out + done + i);
        done += n;
        block += blocks;
    }
}
