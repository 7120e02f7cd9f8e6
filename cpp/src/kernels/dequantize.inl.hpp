// SPDX-License-Identifier: Apache-2.0
//
// What makes numbers of codes: (decode(code) - zero_point) * scale, rounded once more where the output is narrower than
// float32. Included as quantize_kernels.inl.hpp is, and after it.

// ---- Between float32 and the other high-precision types, nearest even ----

template <class T>
static void load_run(const void* x, std::int64_t n, float* out) {
    const T* from = static_cast<const T*>(x);
    std::int64_t i = 0;
    if constexpr (!std::is_same_v<T, double>)
        for (; i + lanes <= n; i += lanes) f_store(out + i, f_load_as(from + i));
    for (; i < n; ++i) {
        if constexpr (std::is_floating_point_v<T>)
            out[i] = static_cast<float>(from[i]);
        else
            out[i] = to_float(from[i]);
    }
}

template <class T>
static void store_run(const float* x, std::int64_t n, void* out) {
    T* to = static_cast<T*>(out);
    std::int64_t i = 0;
    if constexpr (!std::is_same_v<T, double>)
        for (; i + lanes <= n; i += lanes) f_store_as(to + i, f_load(x + i));
    for (; i < n; ++i) {
        if constexpr (std::is_floating_point_v<T>)
            to[i] = static_cast<T>(x[i]);
        else if constexpr (std::is_same_v<T, Float16>)
            to[i] = to_float16(x[i]);
        else
            to[i] = to_bfloat16(x[i]);
    }
}

// ---- Codes ----

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

// Elements [at, at + n) of a row under one scale.
template <class C, class T>
BRECCIA_INLINE void dequantize_run(const DequantizeRow& row, std::int64_t at, std::int64_t n, float scale,
                                   float zero_point, bool normal, T* out) {
    const F scale_f32x16 = f_set(scale), zero_f32x16 = f_set(zero_point);
    std::int64_t i = 0;
    if (row.packed && at % 2 != 0 && n > 0) {
        dequantize_some_to<C>(row, at, 1, scale, zero_point, out);
        i = 1;
    }
    for (; i + wide <= n; i += wide) {
        F x[4];
        decode_wide<C>(row.codes, at + i, row.packed, x);
        if constexpr (C::family == CodecFamily::integer)
            if (zero_point != 0.0F)
                for (F& x_f32x16 : x) x_f32x16 = f_sub(x_f32x16, zero_f32x16);
        for (F& x_f32x16 : x) x_f32x16 = f_mul(x_f32x16, scale_f32x16);
        store_wide(out + i, x, normal);
    }
    if (i < n) dequantize_some_to<C>(row, at + i, n - i, scale, zero_point, out + i);
}

// Blocks of 16 or 32 elements, four or two to a step. Returns how many elements it wrote.
template <class C, class T>
BRECCIA_INLINE std::int64_t dequantize_short_blocks(const DequantizeRow& row, bool normal, T* out) {
    const int per_step = row.block == lanes ? 4 : 2;
    std::int64_t i = 0;
    const float* scale = row.scales;
    for (; i + wide <= row.count; i += wide, scale += per_step) {
        F x[4];
        decode_wide<C>(row.codes, row.begin + i, row.packed, x);
        for (int j = 0; j < 4; ++j) x[j] = f_mul(x[j], f_set(scale[per_step == 4 ? j : j / 2]));
        store_wide(out + i, x, normal);
    }
    return i;
}

template <class C, class T>
static void dequantize_row(const DequantizeRow& row) {
    T* out = static_cast<T*>(row.out);
    constexpr bool may_flush = std::is_same_v<T, BFloat16> && f_stores_bf16;
    const bool normal = may_flush && C::family != CodecFamily::exponent && stays_normal(row);
    std::int64_t done = 0;
    if ((row.block == lanes || row.block == 2 * lanes) && row.begin % row.block == 0 && row.zero_points == nullptr)
        done = dequantize_short_blocks<C>(row, normal, out);
    for (std::int64_t block = done / row.block; done < row.count; ++block) {
        const std::int64_t at = row.begin + done;
        const std::int64_t rest_of_block = row.block - at % row.block;
        const std::int64_t n = rest_of_block < row.count - done ? rest_of_block : row.count - done;
        const float zero_point = row.zero_points != nullptr ? row.zero_points[block] : 0.0F;
        dequantize_run<C>(row, at, n, row.scales[block], zero_point, normal, out + done);
        done += n;
    }
}

static consteval DequantizeKernels make_dequantize_kernels() {
    return {.load = {load_run<float>, load_run<double>, load_run<Float16>, load_run<BFloat16>},
            .store = {store_run<float>, store_run<double>, store_run<Float16>, store_run<BFloat16>},
            .contract = contract_row,
            .rows = Codecs::map([]<Codec C>() {
                return std::array{dequantize_row<C, float>, DequantizeKernel{nullptr}, dequantize_row<C, Float16>,
                                  dequantize_row<C, BFloat16>};
            })};
}
