// SPDX-License-Identifier: Apache-2.0
//
// What backends share that multiply rows of codes in place as integers: how an activation becomes digits, the way along
// the rows, which kernel takes which scales, and the table. Included after the backend's NibbleSums, its ByteSums, its
// put_lane and the few operations on Eight elements.

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
    p.out->one_unit = false;
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

/// Rows of codes by an activation of digits, some at a time; the last one again where there is no other. Where `Sums`
/// takes one digit, every step has one and all have one unit, which the sums do not take.
template <class Sums>
struct NibbleRows {
    static constexpr int at_once = Sums::rows, per_half = Sums::per_half;
    using Scale = typename Sums::Scale;
    const IntegerGemv& g;
    Sums sums;

    [[nodiscard]] std::int64_t at(std::int64_t row) const { return row < g.w.rows ? row : g.w.rows - 1; }

    BRECCIA_INLINE_MEMBER void one_step(std::int64_t ahead) {
        if constexpr (Sums::one_digit) {
            sums.by_one_digit(ahead);
        } else {
            switch (sums.step->count) {
                case 1: sums.template by_digits<1>(ahead); break;
                case 2: sums.template by_digits<2>(ahead); break;
                case 3: sums.template by_digits<3>(ahead); break;
                case 4: sums.template by_digits<4>(ahead); break;
                case 5: sums.template by_digits<5>(ahead); break;
                default: sums.template by_digits<6>(ahead);
            }
        }
        ++sums.step;
        for (int r = 0; r < at_once; ++r) sums.codes[r] += 64;
    }
    BRECCIA_INLINE_MEMBER void next_scales() {
        for (int r = 0; r < at_once; ++r) {
            sums.scales[r] += per_half > 0 ? 2 * per_half : 1;
            if constexpr (Sums::has_zero) ++sums.zeros[r];
        }
    }

    /// `scales`: a row's `blocks`, those of the next row behind them. The sums take `unit`.
    void run(std::int64_t row, const Scale* scales, std::int64_t blocks, float unit) {
        const CodeRows& w = g.w;
        const std::int64_t bytes = (w.k + 1) / 2, whole = bytes / 64, ahead = at_once * w.row_stride;
        for (int r = 0; r < at_once; ++r) {
            sums.codes[r] = w.codes + at(row + r) * w.row_stride;
            sums.scales[r] = scales + r * blocks;
            if constexpr (Sums::has_zero)
                sums.zeros[r] = w.zero_points + w.scale_row_of(at(row + r)) * w.zero_row_stride;
            sums.clear(r);
        }
        const std::int64_t steps_per_scale = per_half > 0 ? 1 : blocks == 1 ? w.k : w.block / row_step(true);
        if (Sums::one_digit && steps_per_scale == 1) {
            for (std::int64_t s = whole; s > 0; --s) {
                one_step(ahead);
                next_scales();
            }
        } else {
            std::int64_t left = steps_per_scale;
            for (std::int64_t s = whole; s > 0; --s) {
                one_step(ahead);
                if (--left > 0) continue;
                left = steps_per_scale;
                next_scales();
            }
        }
        Rest last;
        if (bytes > whole * 64) {
            read_rest(last, bytes - whole * 64, scales, blocks);
            one_step(0);
        }
        for (int r = 0; r < at_once; ++r)
            if (row + r < w.rows) g.out[row + r] = sums.total(r) * unit;
    }

    // Less than a step, filled up with codes and scales that meet zeros.
    struct Rest {
        alignas(64) std::uint8_t codes[at_once][64];
        Scale scales[at_once][8];
    };
    BRECCIA_INLINE_MEMBER void read_rest(Rest& last, std::int64_t rest, const Scale* scales, std::int64_t blocks) {
        for (int r = 0; r < at_once; ++r) {
            for (std::int64_t i = 0; i < 64; ++i) last.codes[r][i] = i < rest ? sums.codes[r][i] : 0;
            sums.codes[r] = last.codes[r];
            if constexpr (per_half == 0) continue;
            const std::int64_t there = scales + (r + 1) * blocks - sums.scales[r];
            for (std::int64_t i = 0; i < 8; ++i) last.scales[r][i] = i < there ? sums.scales[r][i] : Scale{};
            sums.scales[r] = last.scales[r];
        }
    }
};

/// `n` scales as floats, times the unit of an activation that has one.
template <class T>
static void scales_as(const std::byte* from, std::int64_t n, float unit, float* out) {
    std::int64_t i = 0;
    if constexpr (!std::is_same_v<T, double>)
        for (; i + 16 <= n; i += 16)
            f_store(out + i, f_mul(f_load_as(reinterpret_cast<const T*>(from) + i), f_set(unit)));
    for (; i < n; ++i) {
        T scale;
        __builtin_memcpy(&scale, from + i * static_cast<std::int64_t>(sizeof scale), sizeof scale);
        if constexpr (std::is_floating_point_v<T>)
            out[i] = static_cast<float>(scale) * unit;
        else
            out[i] = to_float(scale) * unit;
    }
}
template <class C>
static void scale_codes_as(const std::uint8_t* from, std::int64_t n, float unit, float* out) {
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) f_store(out + i, f_mul(f_decode<C>(i_load_bytes(from + i)), f_set(unit)));
    for (; i < n; ++i) out[i] = decode_table<C>.values[from[i]] * unit;
}
static void convert_scales(const std::byte* from, ScaleType type, std::int64_t n, float unit, float* out) {
    switch (type) {
        case ScaleType::e8m0:
            return scale_codes_as<Float8E8M0FNU>(reinterpret_cast<const std::uint8_t*>(from), n, unit, out);
        case ScaleType::e4m3:
            return scale_codes_as<Float8E4M3FN>(reinterpret_cast<const std::uint8_t*>(from), n, unit, out);
        case ScaleType::float16: return scales_as<Float16>(from, n, unit, out);
        case ScaleType::bfloat16: return scales_as<BFloat16>(from, n, unit, out);
        case ScaleType::float64: return scales_as<double>(from, n, unit, out);
        default: return scales_as<float>(from, n, unit, out);
    }
}

template <bool AreCodes, int PerHalf, bool HasZero, bool OneDigit>
static void nibble_rows(const IntegerGemv& g, const NibbleBytes& of_codes) {
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block;
    const float unit = OneDigit ? g.x->steps->units[0] : 1.0F;
    using Rows = NibbleRows<NibbleSums<AreCodes, PerHalf, HasZero, OneDigit, float>>;
    using Codes = ScaleCodes<OneDigit ? PerHalf : 0>;  // which a row's scales are read as, where they are plain
    for (std::int64_t row = 0; row < w.rows; row += Rows::at_once) {
        if constexpr (Codes::there) {
            static_assert(Rows::at_once == 1);
            const std::byte* from = w.scales + w.scale_row_of(row) * w.scale_row_stride;
            const auto* codes = reinterpret_cast<const std::uint8_t*>(from);
            if (w.scale_type == Codes::type && Codes::all_plain(codes, blocks)) {
                using CodedRows = NibbleRows<NibbleSums<AreCodes, PerHalf, HasZero, true, std::uint8_t>>;
                CodedRows rows{.g = g, .sums = {.of_codes = of_codes, .step = g.x->steps}};
                rows.run(row, codes, blocks, unit);
                continue;
            }
        }
        Rows rows{.g = g, .sums = {.of_codes = of_codes, .step = g.x->steps}};
        for (int r = 0; r < Rows::at_once; ++r) {
            const std::byte* from = w.scales + w.scale_row_of(rows.at(row + r)) * w.scale_row_stride;
            convert_scales(from, w.scale_type, blocks, unit, w.scale_scratch + r * blocks);
        }
        rows.run(row, w.scale_scratch, blocks, 1.0F);
    }
}

template <int PerHalf, bool HasZero>
static void nibble_rows(const IntegerGemv& g, const NibbleBytes& of_codes) {
    if constexpr (HasZero)
        if (!g.x->one_unit && of_codes.are_codes) return nibble_rows<true, PerHalf, HasZero, false>(g, of_codes);
    if (!g.x->one_unit) return nibble_rows<false, PerHalf, HasZero, false>(g, of_codes);
    if (of_codes.are_codes) return nibble_rows<true, PerHalf, HasZero, true>(g, of_codes);
    nibble_rows<false, PerHalf, HasZero, true>(g, of_codes);
}

static void nibble_gemv(const IntegerGemv& g, const NibbleBytes& of_codes) {
    const CodeRows& w = g.w;
    if (w.zero_points != nullptr) return nibble_rows<0, true>(g, of_codes);  // which come one to so many steps
    if (w.block >= row_step(true) || w.block >= w.k) return nibble_rows<0, false>(g, of_codes);
    if (w.block == 64) return nibble_rows<1, false>(g, of_codes);
    if (w.block == 32) return nibble_rows<2, false>(g, of_codes);
    nibble_rows<4, false>(g, of_codes);
}

/// Rows of INT8 codes by an activation that is such codes, one at a time. `PerStep`: the scales of a step; with 0 there
/// is one to a step or to several. `OneUnit`: the activation has one, and the scales have it.
template <bool Symmetric, bool OneUnit, int PerStep>
static void byte_rows(const IntegerGemv& g) {
    const CodeRows& w = g.w;
    const std::int64_t step_codes = row_step(false), blocks = (w.k + w.block - 1) / w.block;
    const std::int64_t steps_per_scale = PerStep > 0 ? 1 : blocks == 1 ? w.k : w.block / step_codes;
    for (std::int64_t row = 0; row < w.rows; ++row) {
        const std::byte* from = w.scales + w.scale_row_of(row) * w.scale_row_stride;
        convert_scales(from, w.scale_type, blocks, OneUnit ? g.x->steps->units[0] : 1.0F, w.scale_scratch);
        const std::uint8_t* codes = w.codes + row * w.row_stride;
        const float* scales = w.scale_scratch;
        const DigitStep* step = g.x->steps;
        ByteSums<Symmetric> sums;
        std::int64_t left_of_scale = steps_per_scale, left = w.k;
        for (; left >= step_codes; left -= step_codes, codes += step_codes, ++step) {
            prefetch(codes + w.row_stride);
            sums.template add<OneUnit, PerStep>(codes, *step, scales);
            if (--left_of_scale == 0) {
                left_of_scale = steps_per_scale;
                scales += PerStep > 0 ? PerStep : 1;
            }
        }
        if (left > 0) {  // less than a step, filled up with codes and scales that meet zeros
            std::uint8_t last_codes[64];
            float last_scales[4];
            const std::int64_t scales_left = w.scale_scratch + blocks - scales;
            for (std::int64_t i = 0; i < step_codes; ++i) last_codes[i] = i < left ? codes[i] : 0;
            for (std::int64_t i = 0; i < 4; ++i) last_scales[i] = i < scales_left ? scales[i] : 0;
            sums.template add<OneUnit, PerStep>(last_codes, *step, last_scales);
        }
        g.out[row] = sums.total();
    }
}

template <bool Symmetric, int PerStep>
static void byte_rows(const IntegerGemv& g) {
    if (g.x->one_unit) return byte_rows<Symmetric, true, PerStep>(g);
    byte_rows<Symmetric, false, PerStep>(g);
}

template <bool Symmetric>
static void byte_rows(const IntegerGemv& g) {
    const CodeRows& w = g.w;
    if (w.block >= row_step(false) || w.block >= w.k) return byte_rows<Symmetric, 0>(g);
    if (w.block == 32) return byte_rows<Symmetric, 2>(g);
    byte_rows<Symmetric, 4>(g);
}

static void byte_gemv(const IntegerGemv& g) {
    if constexpr (byte_sums_know_symmetric)
        if (g.x->symmetric) return byte_rows<true>(g);
    byte_rows<false>(g);
}

static bool digits_of_packed_codes(const DigitsOfCodes& p, const NibbleBytes& of_codes) {
    if (!digits_of_codes<true>(p, of_codes.unit, of_codes.offset, 1.0F)) return false;
    for (std::int64_t s = 0; s < p.steps; ++s) prepare_nibble_step(p.out->steps[s]);
    return true;
}

static bool digits_of_byte_codes(const DigitsOfCodes& p) {
    if (!digits_of_codes<false>(p, 1.0F, byte_sums_offset, 1.0F)) return false;
    for (std::int64_t s = 0; s < p.steps; ++s) prepare_byte_step(p.out->steps[s]);
    return true;
}

static consteval IntegerKernels make_integer_kernels() {
    IntegerKernels kernels;
    kernels.pack_digits = Codecs::map([]<Codec C>() -> bool (*)(const PackDigits&) {
        if constexpr (C::bits == 4) return [](const PackDigits& p) { return pack_nibble_digits(p, nibble_bytes<C>); };
        return nullptr;
    });
    kernels.gemv = Codecs::map([]<Codec C>() -> void (*)(const IntegerGemv&) {
        if constexpr (C::bits == 4) return [](const IntegerGemv& g) { nibble_gemv(g, nibble_bytes<C>); };
        if constexpr (std::is_same_v<C, Int8>) return byte_gemv;
        return nullptr;
    });
    kernels.digits_of_codes = Codecs::map([]<Codec C>() -> bool (*)(const DigitsOfCodes&) {
        if constexpr (C::bits == 4)
            return [](const DigitsOfCodes& p) { return digits_of_packed_codes(p, nibble_bytes<C>); };
        if constexpr (std::is_same_v<C, Int8>) return digits_of_byte_codes;
        return nullptr;
    });
    add_integer_panels(kernels);
    return kernels;
}
