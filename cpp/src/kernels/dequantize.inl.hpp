// SPDX-License-Identifier: Apache-2.0
//
// (decode(code) - zero_point) * scale.

template <class C>
static void dequantize_run(const std::uint8_t* codes, std::int64_t offset, std::int64_t n, bool packed, float scale,
                           float zero_point, float* out) {
    const float* table = decode_table<C>.values;
    constexpr unsigned mask = (1U << C::bits) - 1U;
    const auto value = [&](unsigned code) { return (table[code & mask] - zero_point) * scale; };
    std::int64_t i = 0;
    if (!packed) {
        const F scale_f32x16 = f_set(scale), zero_f32x16 = f_set(zero_point);
        for (; i + lanes <= n; i += lanes) {
            const I code = i_load_bytes(codes + offset + i);
            f_store(out + i, f_mul(f_sub(f_decode<C>(code), zero_f32x16), scale_f32x16));
        }
        for (; i < n; ++i) out[i] = value(codes[offset + i]);
        return;
    }
    if (offset % 2 != 0 && n > 0) {
        *out++ = value(codes[offset / 2] >> 4U);
        ++offset, --n;
    }
    const std::uint8_t* bytes = codes + offset / 2;
    const F scale_f32x16 = f_set(scale), zero_f32x16 = f_set(zero_point);
    for (; i + lanes <= n; i += lanes) {
        const I code = i_load_nibbles(bytes + i / 2);
        f_store(out + i, f_mul(f_sub(f_decode<C>(code), zero_f32x16), scale_f32x16));
    }
    for (; i < n; ++i) out[i] = value(i % 2 != 0 ? bytes[i / 2] >> 4U : bytes[i / 2]);
}

template <class C>
static void dequantize_row(const DequantizeRow& row) {
    std::int64_t block = 0;
    for (std::int64_t done = 0; done < row.count; ++block) {
        const std::int64_t at = row.begin + done;
        const std::int64_t rest_of_block = row.block - at % row.block;
        const std::int64_t n = rest_of_block < row.count - done ? rest_of_block : row.count - done;
        const float zero_point = row.zero_points != nullptr ? row.zero_points[block] : 0.0F;
        dequantize_run<C>(row.codes, at, n, row.packed, row.scales[block], zero_point, row.out + done);
        done += n;
    }
}
