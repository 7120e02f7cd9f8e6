// SPDX-License-Identifier: Apache-2.0
//
// What backends share that multiply rows of 4-bit codes in place as integers: how an activation becomes digits, the way
// along the rows, which kernel takes which scales, and the table. Included after the backend's NibbleSums, its put_lane
// and the few operations on Eight elements.

/// The unit, as a biased exponent, that makes integers below 2^23 - 2^16 of numbers whose largest has these bits.
BRECCIA_INLINE int unit_exponent_of(std::int32_t most) {
    return (most >> 23) - ((most & 0x7F'FFFF) < 0x7E'0000 ? 22 : 21);
}

/// See pack_step of avx512_bf16/digits.inl.hpp, whose digits these are; here a lane is Eight.
static bool pack_nibble_step(const PackDigits& p, const NibbleBytes& of_codes, std::int64_t s, std::int32_t largest) {
    constexpr int lanes_of_step = 16;
    DigitStep& to = p.out->steps[s];
    const float* x = p.x + s * row_step(true);
    const int exponent = (largest >> 23) - 127, offset = p.zero_points ? 1 : of_codes.offset;
    constexpr int fineness = 7;
    const int least = exponent - fineness > -100 ? exponent - fineness : -100;
    const auto at_least = exponent < -100 ? largest : static_cast<std::int32_t>(bits_of(exp2i(least)));
    alignas(32) float left[lanes_of_step][8];
    bool thirds = false, any = false;
    for (int lane = 0; lane < lanes_of_step; ++lane) {
        const Eight value = load_eight(x + 8 * lane);
        const std::int32_t own = largest_of(value), most = own > at_least ? own : at_least;
        float unit = 1, up = 1;
        // Zeros have no largest number to take a unit from. Numbers below 2^-100 leave a rest at unit 1: refused.
        if (exponent >= -100) {
            const int unit_exponent = unit_exponent_of(most);
            unit = float_from_bits(static_cast<std::uint32_t>(unit_exponent) << 23);
            up = float_from_bits(static_cast<std::uint32_t>(254 - unit_exponent) << 23);
        }
        const Eight v = times(value, up);
        if (any_lost(value, v)) return false;
        const EightIntegers integers = nearest(v);
        const Eight rest = rest_of(v, integers);
        any |= any_not_zero(rest);
        store_eight(left[lane], rest);
        thirds |= put_lane(integers, DigitStep::first, to.digits, lane);
        to.offsets[0][lane] = -offset * sum_of(integers);
        to.units[lane] = unit * of_codes.unit;
    }
    int further = 0;
    while (any) {
        if (++further > DigitStep::most - DigitStep::first) return false;
        const float more = exp2i(8 * further - 1);
        any = false;
        for (int lane = 0; lane < lanes_of_step; ++lane) {
            const Eight v = times(load_eight(left[lane]), more);
            const EightIntegers integers = nearest(v);
            any |= any_not_zero(rest_of(v, integers));
            put_lane(integers, further, to.digits + DigitStep::first, lane);
            to.offsets[1][lane] = -offset * sum_of(integers);
        }
    }
    to.smaller = exp2i(1 - 8 * further);
    to.further = static_cast<std::uint8_t>(further);
    to.count = static_cast<std::uint8_t>(!thirds && further == 0 ? 2 : DigitStep::first + further);
    return true;
}

static bool pack_nibble_digits(const PackDigits& p, const NibbleBytes& of_codes) {
    p.out->bias = 1;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        const float* x = p.x + s * row_step(true);
        std::int32_t largest = 0;
        for (int lane = 0; lane < 16; ++lane) {
            const std::int32_t own = largest_of(load_eight(x + 8 * lane));
            largest = own > largest ? own : largest;
        }
        if ((largest >> 23) - 127 > 100) return false;  // infinities and NaN, too
        if (!pack_nibble_step(p, of_codes, s, largest)) return false;
    }
    return true;
}

/// Rows of codes by an activation of digits, two at a time; the last one again where there is no other.
template <bool AreCodes, int PerHalf, bool HasZero>
struct NibbleRows {
    static constexpr int at_once = 2;
    const IntegerGemv& g;
    NibbleSums<AreCodes, PerHalf, HasZero, at_once> sums;

    [[nodiscard]] std::int64_t at(std::int64_t row) const { return row < g.w.rows ? row : g.w.rows - 1; }

    BRECCIA_INLINE_MEMBER void one_step(std::int64_t ahead) {
        switch (sums.step->count) {
            case 2: sums.template by_digits<2>(ahead); break;
            case 3: sums.template by_digits<3>(ahead); break;
            case 4: sums.template by_digits<4>(ahead); break;
            case 5: sums.template by_digits<5>(ahead); break;
            default: sums.template by_digits<6>(ahead);
        }
        ++sums.step;
    }

    void run(std::int64_t row, const float* converted, std::int64_t blocks) {
        const CodeRows& w = g.w;
        const std::int64_t bytes = (w.k + 1) / 2, rest = bytes % 64;
        const std::int64_t steps_per_scale = PerHalf > 0 ? 1 : blocks == 1 ? w.k : w.block / row_step(true);
        for (int r = 0; r < at_once; ++r) {
            sums.codes[r] = w.codes + at(row + r) * w.row_stride;
            sums.scales[r] = converted + r * blocks;
            if constexpr (HasZero) sums.zeros[r] = w.zero_points + w.scale_row_of(at(row + r)) * w.zero_row_stride;
            sums.clear(r);
        }
        Rest last;
        std::int64_t left = steps_per_scale, ahead = at_once * w.row_stride;
        for (std::int64_t s = 0; s * 64 < bytes; ++s) {
            if (s * 64 + 64 > bytes) {
                ahead = 0;
                read_rest(last, rest, converted, blocks);
            }
            one_step(ahead);
            const bool next_scale = PerHalf > 0 || --left == 0;
            for (int r = 0; r < at_once; ++r) {
                sums.codes[r] += 64;
                if (next_scale) sums.scales[r] += PerHalf > 0 ? 2 * PerHalf : 1;
                if (HasZero && next_scale) ++sums.zeros[r];
            }
            if (next_scale) left = steps_per_scale;
        }
        for (int r = 0; r < at_once; ++r)
            if (row + r < w.rows) g.out[row + r] = sums.total(r);
    }

    // Less than a step, filled up with codes and scales that meet zeros.
    struct Rest {
        alignas(64) std::uint8_t codes[at_once][64];
        float scales[at_once][8];
    };
    BRECCIA_INLINE_MEMBER void read_rest(Rest& last, std::int64_t rest, const float* converted, std::int64_t blocks) {
        for (int r = 0; r < at_once; ++r) {
            for (std::int64_t i = 0; i < 64; ++i) last.codes[r][i] = i < rest ? sums.codes[r][i] : 0;
            sums.codes[r] = last.codes[r];
            if constexpr (PerHalf == 0) continue;
            const std::int64_t there = converted + (r + 1) * blocks - sums.scales[r];
            for (std::int64_t i = 0; i < 8; ++i) last.scales[r][i] = i < there ? sums.scales[r][i] : 0;
            sums.scales[r] = last.scales[r];
        }
    }
};

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

template <bool AreCodes, int PerHalf, bool HasZero>
static void nibble_rows(const IntegerGemv& g, const NibbleBytes& of_codes) {
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block;
    using Rows = NibbleRows<AreCodes, PerHalf, HasZero>;
    for (std::int64_t row = 0; row < w.rows; row += Rows::at_once) {
        Rows rows{.g = g, .sums = {.of_codes = of_codes, .step = g.x->steps}};
        for (int r = 0; r < Rows::at_once; ++r) {
            const std::byte* from = w.scales + w.scale_row_of(rows.at(row + r)) * w.scale_row_stride;
            convert_scales(from, w.scale_type, blocks, w.scale_scratch + r * blocks);
        }
        rows.run(row, w.scale_scratch, blocks);
    }
}

static void nibble_gemv(const IntegerGemv& g, const NibbleBytes& of_codes) {
    const CodeRows& w = g.w;
    if (w.zero_points != nullptr)  // which come one to so many steps
        return of_codes.are_codes ? nibble_rows<true, 0, true>(g, of_codes) : nibble_rows<false, 0, true>(g, of_codes);
    if (w.block >= row_step(true) || w.block >= w.k) return nibble_rows<false, 0, false>(g, of_codes);
    if (w.block == 64) return nibble_rows<false, 1, false>(g, of_codes);
    if (w.block == 32) return nibble_rows<false, 2, false>(g, of_codes);
    nibble_rows<false, 4, false>(g, of_codes);
}

static consteval IntegerKernels make_integer_kernels() {
    IntegerKernels kernels;
    kernels.pack_digits = Codecs::map([]<Codec C>() -> bool (*)(const PackDigits&) {
        if constexpr (C::bits == 4) return [](const PackDigits& p) { return pack_nibble_digits(p, nibble_bytes<C>); };
        return nullptr;
    });
    kernels.gemv = Codecs::map([]<Codec C>() -> void (*)(const IntegerGemv&) {
        if constexpr (C::bits == 4) return [](const IntegerGemv& g) { nibble_gemv(g, nibble_bytes<C>); };
        return nullptr;
    });
    return kernels;
}
