// SPDX-License-Identifier: Apache-2.0
//
// What backends share that multiply rows of 4-bit codes in place as integers: which kernel takes which scales, and the
// table. Included after the backend's NibbleRows and pack_nibble_digits.

/// `n` scales as floats.
template <class T>
static void scales_as(const std::byte* from, std::int64_t n, float* out) {
    for (std::int64_t i = 0; i < n; ++i) {
        T scale;
        __builtin_memcpy(&scale, from + i * static_cast<std::int64_t>(sizeof scale), sizeof scale);
        if constexpr (std::is_floating_point_v<T>)
            out[i] = static_cast<float>(scale);
        else
            out[i] = to_float(scale);
    }
}
template <class C>
static void scale_codes_as(const std::uint8_t* from, std::int64_t n, float* out) {
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) f_store(out + i, f_decode<C>(i_load_bytes(from + i)));
    for (; i < n; ++i) out[i] = decode_table<C>.values[from[i]];
}
static void convert_scales(const std::byte* from, ScaleType type, std::int64_t n, float* out) {
    switch (type) {
        case ScaleType::e8m0: return scale_codes_as<Float8E8M0FNU>(reinterpret_cast<const std::uint8_t*>(from), n, out);
        case ScaleType::e4m3: return scale_codes_as<Float8E4M3FN>(reinterpret_cast<const std::uint8_t*>(from), n, out);
        case ScaleType::float16: return scales_as<Float16>(from, n, out);
        case ScaleType::bfloat16: return scales_as<BFloat16>(from, n, out);
        case ScaleType::float64: return scales_as<double>(from, n, out);
        default: return scales_as<float>(from, n, out);
    }
}

template <class C, int PerHalf, bool HasZero>
static void nibble_rows(const IntegerGemv& g) {
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block;
    const auto some = [&]<int Rows>(std::int64_t row) BRECCIA_INLINE_LAMBDA {
        for (int r = 0; r < Rows; ++r) {
            const std::int64_t from = NibbleRows<C, PerHalf, HasZero, 1>::scale_row_of(w, row + r);
            convert_scales(w.scales + from * w.scale_row_stride, w.scale_type, blocks, w.scale_scratch + r * blocks);
        }
        NibbleRows<C, PerHalf, HasZero, Rows>{.g = g, .step = g.x->steps}.run(row, w.scale_scratch, blocks);
    };
    std::int64_t row = 0;
    for (; row + 2 <= w.rows; row += 2) some.template operator()<2>(row);
    for (; row < w.rows; ++row) some.template operator()<1>(row);
}

template <class C, bool HasZero>
static void nibble_gemv(const IntegerGemv& g) {
    const CodeRows& w = g.w;
    if (w.block >= row_step(true) || w.block >= w.k) return nibble_rows<C, 0, HasZero>(g);
    if constexpr (!HasZero) {  // zero points come one to so many steps
        if (w.block == 64) return nibble_rows<C, 1, false>(g);
        if (w.block == 32) return nibble_rows<C, 2, false>(g);
        nibble_rows<C, 4, false>(g);
    }
}

template <class C>
static void integer_rows(const IntegerGemv& g) {
    if constexpr (C::family == CodecFamily::integer)
        if (g.w.zero_points != nullptr) return nibble_gemv<C, true>(g);
    nibble_gemv<C, false>(g);
}

static consteval BF16Kernels make_integer_kernels() {
    BF16Kernels kernels;
    kernels.pack_digits = Codecs::map([]<Codec C>() -> bool (*)(const PackDigits&) {
        if constexpr (C::bits == 4) return pack_nibble_digits<C>;
        return nullptr;
    });
    kernels.gemv_integers = Codecs::map([]<Codec C>() -> void (*)(const IntegerGemv&) {
        if constexpr (C::bits == 4) return integer_rows<C>;
        return nullptr;
    });
    return kernels;
}
