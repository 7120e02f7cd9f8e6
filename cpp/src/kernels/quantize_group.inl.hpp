// SPDX-License-Identifier: Apache-2.0
//
// Up to sixteen blocks at a time, one per lane: the scale rules as vector code, and the search by squared error over
// data turned so that a lane sees its own block. Bytes equal those of one block at a time; groups with anything unusual
// in them (specials, zeros, extreme magnitudes) are left to that.

// The scales of 16 blocks.
struct GroupScale {
    I stored_i32x16;
    F factor_f32x16, decoded_f32x16;
};

static inline bool can_group(const QuantizeRow& row) {
    constexpr std::int64_t longest = 256;  // the turned group stays in the first-level cache
    const ScaleRule rule = row.params.rule;
    if (rule == ScaleRule::asymmetric || rule == ScaleRule::multiply) return false;
    return row.block % lanes == 0 && row.block <= longest;
}

// Whether the rules below need none of the scalar rules' special cases for amaxes between 2^low and 2^high, and
// squared errors stay in range in any unit.
BRECCIA_INLINE bool ordinary(I amax_bits, ScaleType type) {
    const int low = type == ScaleType::float16 ? -9 : -40, high = type == ScaleType::float16 ? 15 : 40;
    const I below = i_set((low + 127) << 23), above = i_set((high + 127) << 23);
    return i_none(i_less(amax_bits, below)) && i_none(i_less(above, amax_bits));
}

template <class C>
BRECCIA_INLINE I mx_exponents(I amax_bits, ScaleRule rule) {
    if constexpr (C::family == CodecFamily::minifloat) {
        const I almost_one = i_set(0x007F'FFFF);
        if (rule == ScaleRule::mx_rceil)
            return i_shr<23>(i_add(as_bits(f_div(as_float(amax_bits), f_set(C::max))), almost_one));
        if (rule == ScaleRule::mx_even) amax_bits = i_add(amax_bits, i_set(1 << (22 - C::mantissa_bits)));
        if (rule == ScaleRule::mx_ceil) amax_bits = i_add(amax_bits, almost_one);
        return i_sub(i_shr<23>(amax_bits), i_set(C::max_exponent));
    } else {
        return i_set(0);
    }
}

// A block's scale before it is rounded to E4M3.
BRECCIA_INLINE F nvfp4_ratio(F amax, const ScaleParams& p) {
    if (!p.two_level) return f_div(amax, f_set(6.0F));
    if (p.rule == ScaleRule::nvfp4_torchao) return f_div(f_div(amax, f_set(6.0F)), f_set(p.global_scale));
    return f_mul(amax, f_set(p.global_encode * (1.0F / 6.0F)));
}

BRECCIA_INLINE F nvfp4_factor(F value, const ScaleParams& p) {
    if (!p.two_level) return f_div(f_set(1.0F), value);
    if (p.rule == ScaleRule::nvfp4_torchao) return f_div(f_set(1.0F / p.global_scale), value);
    return f_div(f_set(1.0F), f_mul(value, f_set(1.0F / p.global_encode)));
}

BRECCIA_INLINE GroupScale nvfp4_scales(F amax, const ScaleParams& p, int offset) {
    const bool torchao = p.rule == ScaleRule::nvfp4_torchao;
    F b = nvfp4_ratio(amax, p);
    if (torchao) b = f_max(b, f_set(Float8E4M3FN::smallest_normal));
    const I code = i_and(encode<Float8E4M3FN, false>(b, b, 0.0F), i_set(127));
    const I moved = i_add(code, i_set(offset));
    const Mask outside = i_less(moved, i_set(torchao ? 8 : 1));
    const Mask above = i_less(i_set(Float8E4M3FN::max_code), moved);
    GroupScale s;
    s.stored_i32x16 = i_select(outside, code, i_select(above, code, moved));
    const F value = f_decode<Float8E4M3FN>(s.stored_i32x16);
    s.factor_f32x16 = f_min(nvfp4_factor(value, p), f_set(f32_max));
    s.decoded_f32x16 = f_mul(value, f_set(p.global_scale));
    return s;
}

template <class T>
BRECCIA_INLINE GroupScale stored_as(F scale) {
    alignas(64) T halves[lanes];
    alignas(64) std::int32_t bits[lanes];
    f_store_as(halves, scale);
    for (int i = 0; i < lanes; ++i) bits[i] = halves[i].bits;
    const F decoded = f_load_as(halves);
    return {i_load(bits), decoded, decoded};
}

// See scale_of_rule: the same arithmetic for the same candidates.
template <class C>
BRECCIA_INLINE GroupScale float_scales(I amax_bits, const ScaleParams& p, float shrink) {
    const F s = f_mul(f_mul(f_div(as_float(amax_bits), f_set(C::max)), f_set(p.margin_factor)), f_set(shrink));
    if (p.type == ScaleType::float16) return stored_as<Float16>(s);
    if (p.type == ScaleType::bfloat16) return stored_as<BFloat16>(s);
    return {as_bits(s), s, s};
}

// Of an integer format's candidate below integer_candidates, after which the same follow with a minus.
constexpr int integer_candidates = 16;
constexpr float integer_shrink(int candidate) { return 1.0F - 0.02F * static_cast<float>(candidate); }

BRECCIA_INLINE GroupScale minus(const GroupScale& s, ScaleType type) {
    const I sign = i_set(type == ScaleType::float32 ? std::numeric_limits<std::int32_t>::min() : 0x8000);
    const F zero = f_set(0.0F);
    return {i_xor(s.stored_i32x16, sign), f_sub(zero, s.factor_f32x16), f_sub(zero, s.decoded_f32x16)};
}

template <class C>
BRECCIA_INLINE GroupScale group_scales(I amax_bits, const ScaleParams& p, int candidate) {
    if (p.type == ScaleType::e4m3) return nvfp4_scales(as_float(amax_bits), p, e4m3_offsets[candidate]);
    if (p.type == ScaleType::e8m0) {
        const I code = i_add(mx_exponents<C>(amax_bits, p.rule), i_set(e8m0_offsets[candidate]));
        return {code, as_float(i_shl<23>(i_sub(i_set(254), code))), as_float(i_shl<23>(code))};
    }
    const bool integer = C::family == CodecFamily::integer;
    return float_scales<C>(amax_bits, p,
                           integer ? integer_shrink(candidate) : 1.0F + 0.0625F * static_cast<float>(candidate));
}

// A lane's elements are added in the order of squared_error: elements i, i + 16, … first, then halves.
BRECCIA_INLINE F sum_of_halves(F (&sums_f32x16)[lanes]) {
    for (std::int64_t half = lanes / 2; half > 0; half /= 2)
        for (std::int64_t i = 0; i < half; ++i) sums_f32x16[i] = f_add(sums_f32x16[i], sums_f32x16[i + half]);
    return sums_f32x16[0];
}

template <class C, class Scale>
BRECCIA_INLINE F error_sum(const float* turned, std::int64_t block, const Scale& scale, F decoded) {
    F sums_f32x16[lanes];
    for (std::int64_t i = 0; i < lanes; ++i) {
        F sum = f_set(0.0F);
        for (std::int64_t k = i; k < block; k += lanes) {
            const F x = f_load(turned + k * lanes);
            sum = f_add(sum, squared_errors<C>(x, scale(x), decoded, 0.0F));
        }
        sums_f32x16[i] = sum;
    }
    return sum_of_halves(sums_f32x16);
}

// The errors of a scale and of minus that: quotients differ in sign only, codes where they are cut off.
template <class C, class Scale>
BRECCIA_INLINE void mirrored_error_sums(const float* turned, std::int64_t block, const Scale& scale, F decoded,
                                        F (&errors)[2]) {
    const F magic = f_set(integer_magic), low = f_set(C::lowest), high = f_set(C::max);
    const F minus_high = f_set(-C::max), minus_low = f_set(-C::lowest);
    F sums_f32x16[2][lanes];
    for (std::int64_t i = 0; i < lanes; ++i) {
        F sum = f_set(0.0F), mirrored_sum = f_set(0.0F);
        for (std::int64_t k = i; k < block; k += lanes) {
            const F x = f_load(turned + k * lanes);
            const F code = f_sub(f_add(scale(x), magic), magic);
            const F error = f_sub(f_mul(f_min(f_max(code, low), high), decoded), x);
            const F mirrored = f_sub(f_mul(f_min(f_max(code, minus_high), minus_low), decoded), x);
            sum = f_add(sum, f_mul(error, error));
            mirrored_sum = f_add(mirrored_sum, f_mul(mirrored, mirrored));
        }
        sums_f32x16[0][i] = sum;
        sums_f32x16[1][i] = mirrored_sum;
    }
    errors[0] = sum_of_halves(sums_f32x16[0]);
    errors[1] = sum_of_halves(sums_f32x16[1]);
}

template <class C>
static F group_error(const float* turned, std::int64_t block, const GroupScale& s, bool multiply) {
    if (multiply) return error_sum<C>(turned, block, Multiply{s.factor_f32x16}, s.decoded_f32x16);
    return error_sum<C>(turned, block, FastDivide(s.factor_f32x16), s.decoded_f32x16);
}

// The best of some candidates.
struct GroupChoice {
    F error_f32x16;
    GroupScale scale;
};

BRECCIA_INLINE void choose(GroupChoice& best, const GroupChoice& other) {
    const Mask better = f_less(other.error_f32x16, best.error_f32x16);
    best.error_f32x16 = f_select(better, other.error_f32x16, best.error_f32x16);
    best.scale.stored_i32x16 = i_select(better, other.scale.stored_i32x16, best.scale.stored_i32x16);
    best.scale.factor_f32x16 = f_select(better, other.scale.factor_f32x16, best.scale.factor_f32x16);
    best.scale.decoded_f32x16 = f_select(better, other.scale.decoded_f32x16, best.scale.decoded_f32x16);
}

// The search of an integer format. A negative scale is no better than its twin where no code is cut off.
template <class C>
static GroupScale search_mirrored(const float* turned, std::int64_t block, I amax_bits, const ScaleParams& p) {
    GroupChoice best{}, best_mirrored{};
    for (int candidate = 0; candidate < integer_candidates; ++candidate) {
        const GroupScale scale = float_scales<C>(amax_bits, p, integer_shrink(candidate));
        const FastDivide divide(scale.factor_f32x16);
        const F largest = f_add(divide(as_float(amax_bits)), f_set(integer_magic));
        F errors[2] = {f_set(0.0F), f_set(f32_max)};
        if (i_none(f_less(f_set(C::max + integer_magic), largest)))
            errors[0] = error_sum<C>(turned, block, divide, scale.decoded_f32x16);
        else
            mirrored_error_sums<C>(turned, block, divide, scale.decoded_f32x16, errors);
        const GroupChoice choice{errors[0], scale}, mirrored{errors[1], minus(scale, p.type)};
        if (candidate == 0) {
            best = choice;
            best_mirrored = mirrored;
        } else {
            choose(best, choice);
            choose(best_mirrored, mirrored);
        }
    }
    choose(best, best_mirrored);
    return best.scale;
}

template <class C>
static GroupScale search_group(const float* x, std::int64_t block, I amax_bits, const ScaleParams& p, bool multiply) {
    alignas(64) float turned[256 * lanes];
    for (std::int64_t k = 0; k < block; k += lanes) transpose_16x16(x + k, block, turned + k * lanes, lanes);
    const int count = candidate_count<C>(p);
    if constexpr (C::family == CodecFamily::integer)
        if (count == 2 * integer_candidates) return search_mirrored<C>(turned, block, amax_bits, p);
    const auto choice = [&](int candidate) {
        const GroupScale scale = group_scales<C>(amax_bits, p, candidate);
        return GroupChoice{group_error<C>(turned, block, scale, multiply), scale};
    };
    GroupChoice best = choice(0);
    for (int candidate = 1; candidate < count; ++candidate) choose(best, choice(candidate));
    return best.scale;
}

BRECCIA_INLINE void write_scales(void* scales, std::int64_t first, std::int64_t count, I stored, ScaleType type) {
    if (is_coded(type)) {
        auto* bytes = static_cast<std::uint8_t*>(scales) + first;
        return count == lanes ? i_store_bytes(bytes, stored) : i_store_bytes_n(bytes, stored, count);
    }
    alignas(64) std::int32_t bits[lanes];
    i_store(bits, stored);
    for (std::int64_t i = 0; i < count; ++i) {
        if (type == ScaleType::float32)
            static_cast<std::int32_t*>(scales)[first + i] = bits[i];
        else
            static_cast<std::uint16_t*>(scales)[first + i] = static_cast<std::uint16_t>(bits[i]);
    }
}

// What the blocks of a group are multiplied or divided by, spread out from memory a block at a time.
struct GroupMultiply {
    const float* factor;
    BRECCIA_INLINE_MEMBER Multiply operator[](std::int64_t block) const { return {f_set(factor[block])}; }
    BRECCIA_INLINE_MEMBER Multiply unit(std::int64_t block) const { return (*this)[block]; }
};
struct GroupDivide {
    alignas(64) float divisor[lanes], high[lanes], low[lanes];
    BRECCIA_INLINE_MEMBER explicit GroupDivide(F d) {
        const FastDivide divide(d);
        f_store(divisor, divide.divisor);
        f_store(high, divide.high);
        f_store(low, divide.low);
    }
    BRECCIA_INLINE_MEMBER FastDivide operator[](std::int64_t block) const {
        return {f_set(divisor[block]), f_set(high[block]), f_set(low[block])};
    }
    BRECCIA_INLINE_MEMBER FastDivide unit(std::int64_t block) const { return (*this)[block]; }
};

// What comes next is fetched while codes are computed: the pass for amax would wait for memory.
BRECCIA_INLINE void prefetch_ahead(const float* x) {
    constexpr std::int64_t distance = 16384, line = 64;
    const auto* p = reinterpret_cast<const std::uint8_t*>(x) + distance;
    for (std::int64_t at = 0; at < wide * static_cast<std::int64_t>(sizeof(float)); at += line)
        __builtin_prefetch(p + at);
}

// Four times the factor: see b_store_quarters.
struct Quarters {
    F factor;
    BRECCIA_INLINE_MEMBER F operator()(F x) const { return f_mul(x, factor); }
};
struct GroupQuarters {
    const float* factor;
    BRECCIA_INLINE_MEMBER Quarters operator[](std::int64_t block) const { return {f_set(factor[block])}; }
    BRECCIA_INLINE_MEMBER Multiply unit(std::int64_t block) const { return {f_set(factor[block] * 0.25F)}; }
};

template <class C, bool Saturate, class Scale>
BRECCIA_INLINE void encode_wide_to(std::uint8_t* codes, const float* x, const Scale& s0, const Scale& s1,
                                   const Scale& s2, const Scale& s3) {
    prefetch_ahead(x);
    if constexpr (std::is_same_v<Scale, Quarters>) {
        b_store_quarters<C>(codes, s0(f_load(x)), s1(f_load(x + lanes)), s2(f_load(x + 2 * lanes)),
                            s3(f_load(x + 3 * lanes)));
    } else {
        const B code = encode_wide<C, Saturate>(x, s0, s1, s2, s3, 0.0F);
        if constexpr (C::bits == 4)
            b_store_nibbles(codes, code);
        else
            b_store(codes, code);
    }
}

template <class C, class Scale>
BRECCIA_INLINE void encode_block(const float* x, std::int64_t block, std::uint8_t* codes, const Scale& scale) {
    if constexpr (C::bits == 4)
        encode_nibbles<C, false>(x, block, scale, 0.0F, codes);
    else
        encode_bytes<C, false>(x, block, scale, 0.0F, codes);
}

// The codes of up to 16 blocks.
template <class C, bool Saturate, class Scales>
static void encode_group(const float* x, std::int64_t block, std::int64_t count, std::uint8_t* codes,
                         const Scales& scales) {
    constexpr std::int64_t wide_bytes = C::bits == 4 ? wide / 2 : wide;
    std::int64_t b = 0;
    if (block % wide == 0) {
        for (; b < count; ++b) {
            const auto s = scales[b];
            for (std::int64_t k = 0; k < block; k += wide, x += wide, codes += wide_bytes)
                encode_wide_to<C, Saturate>(codes, x, s, s, s, s);
        }
    } else if (block == wide / 2) {
        for (; b + 2 <= count; b += 2, x += wide, codes += wide_bytes) {
            const auto s = scales[b], t = scales[b + 1];
            encode_wide_to<C, Saturate>(codes, x, s, s, t, t);
        }
    } else if (block == wide / 4) {
        for (; b + 4 <= count; b += 4, x += wide, codes += wide_bytes)
            encode_wide_to<C, Saturate>(codes, x, scales[b], scales[b + 1], scales[b + 2], scales[b + 3]);
    }
    for (; b < count; ++b, x += block, codes += block * wide_bytes / wide)
        encode_block<C>(x, block, codes, scales.unit(b));
}

// Whether x / scale may round beyond the format's largest value. It cannot where the scale is amax over that value,
// rounded to no fewer bits than decide it, or rounded up. An NVFP4 scale that is a normal number of E4M3 is within 1/16
// of that, where 7/6 would matter. Unsigned codes cut off negative values.
template <class C>
BRECCIA_INLINE bool may_saturate(I stored, const ScaleParams& p) {
    if (p.search != ScaleSearch::amax || C::lowest >= 0) return true;
    if (p.type == ScaleType::e4m3) {
        const int largest = p.two_level ? Float8E4M3FN::max_code : Float8E4M3FN::max_code - 1;
        return !i_none(m_or(i_less(stored, i_set(8)), i_less(i_set(largest), stored)));
    }
    if (p.rule == ScaleRule::mx_rceil) return false;
    return p.rule != ScaleRule::divide || p.margin_factor < 1.0F;
}

// Bits of the largest magnitude in each lane of a block.
BRECCIA_INLINE I block_magnitude(const float* x, std::int64_t block) {
    const I abs_mask = i_set(0x7FFF'FFFF);
    I amax_i32x16 = i_and(as_bits(f_load(x)), abs_mask);
    for (std::int64_t k = lanes; k < block; k += lanes)
        amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load(x + k)), abs_mask));
    return amax_i32x16;
}

// Bits of the largest magnitude of each of up to 16 blocks, and of 1 in the lanes of those that are not there.
BRECCIA_INLINE I group_amax(const float* x, std::int64_t block, std::int64_t count) {
    I amax_i32x16[lanes];
    for (std::int64_t b = count; b < lanes; ++b) amax_i32x16[b] = i_set(0x3F80'0000);
    for (std::int64_t b = 0; b < count; ++b) amax_i32x16[b] = block_magnitude(x + b * block, block);
    return i_max_of_each(amax_i32x16);
}

static std::int32_t block_amax(const float* x, std::int64_t blocks, std::int64_t block, std::int32_t* amax_bits) {
    I most_i32x16 = i_set(0);
    std::int64_t b = 0;
    for (; b + lanes <= blocks; b += lanes, x += lanes * block) {
        const I bits = group_amax(x, block, lanes);
        i_store(amax_bits + b, bits);
        most_i32x16 = i_max(most_i32x16, bits);
    }
    std::int32_t most = i_max_lane(most_i32x16);
    for (; b < blocks; ++b, x += block) {
        amax_bits[b] = i_max_lane(block_magnitude(x, block));
        most = amax_bits[b] > most ? amax_bits[b] : most;
    }
    return most;
}

// What the codes of a group need besides their values.
struct GroupFactors {
    alignas(64) std::int32_t amax_bits[lanes];
    alignas(64) float factor[lanes];
    bool ordinary, saturate;
};

// Up to 16 blocks of a row.
struct Group {
    std::int64_t first, count;
};

BRECCIA_INLINE void measure_group(const QuantizeRow& row, Group g, GroupFactors& group) {
    if (row.amax_bits != nullptr && g.count == lanes) return i_store(group.amax_bits, i_load(row.amax_bits + g.first));
    const float* x = row.x + g.first * row.block;
    i_store(group.amax_bits, g.count == lanes ? group_amax(x, row.block, lanes) : group_amax(x, row.block, g.count));
}

// Scales of a group, whose amax_bits are known; nothing is written if they are not ordinary.
template <class C>
BRECCIA_INLINE void choose_group(const QuantizeRow& row, Group g, GroupFactors& group) {
    const I amax_bits = i_load(group.amax_bits);
    group.ordinary = ordinary(amax_bits, row.params.type);
    if (!group.ordinary) return;
    const GroupScale s =
        row.params.search == ScaleSearch::amax
            ? group_scales<C>(amax_bits, row.params, 0)
            : search_group<C>(row.x + g.first * row.block, row.block, amax_bits, row.params, is_coded(row.params.type));
    group.saturate = may_saturate<C>(s.stored_i32x16, row.params);
    write_scales(row.scales, g.first, g.count, s.stored_i32x16, row.params.type);
    f_store(group.factor, s.factor_f32x16);
}

template <class C, class Scales>
static void encode_group(const QuantizeRow& row, Group g, bool saturate, const Scales& scales) {
    const float* x = row.x + g.first * row.block;
    std::uint8_t* codes = row.codes + g.first * row.block * (C::bits == 4 ? 1 : 2) / 2;
    if constexpr (!std::is_same_v<Scales, GroupQuarters>)
        if (saturate) return encode_group<C, true>(x, row.block, g.count, codes, scales);
    encode_group<C, false>(x, row.block, g.count, codes, scales);
}

// The same of scales that codes are multiplied by.
template <class C>
BRECCIA_INLINE void encode_products(const QuantizeRow& row, Group g, GroupFactors& group) {
    if constexpr (b_compares_quarters && std::is_same_v<C, Float4E2M1FN>) {
        if (!group.saturate) {
            f_store(group.factor, f_mul(f_load(group.factor), f_set(4.0F)));
            return encode_group<C>(row, g, false, GroupQuarters{group.factor});
        }
    }
    encode_group<C>(row, g, group.saturate, GroupMultiply{group.factor});
}

// The scales of a few groups before their codes: one group's scales are a long chain of dependent instructions, and
// several run side by side. Together they stay in the first-level cache. Returns how many blocks were quantized.
template <class C>
static std::int64_t quantize_groups(const QuantizeRow& row) {
    constexpr std::int64_t most = 16, cached = 4096;
    const std::int64_t fitting = cached / (lanes * row.block);
    const std::int64_t batch = lanes * (fitting < 1 ? 1 : (fitting > most ? most : fitting));
    // A search reads all of its sixteen blocks.
    const std::int64_t blocks = row.params.search == ScaleSearch::amax ? row.blocks : row.blocks / lanes * lanes;
    for (std::int64_t done = 0; done < blocks; done += batch) {
        const std::int64_t end = batch < blocks - done ? done + batch : blocks;
        GroupFactors factors[most];
        const auto each = [&](auto body) BRECCIA_INLINE_LAMBDA {
            GroupFactors* f = factors;
            for (std::int64_t b = done; b < end; b += lanes) body(Group{b, lanes < end - b ? lanes : end - b}, *f++);
        };
        each([&](Group g, GroupFactors& f) BRECCIA_INLINE_LAMBDA { measure_group(row, g, f); });
        each([&](Group g, GroupFactors& f) BRECCIA_INLINE_LAMBDA { choose_group<C>(row, g, f); });
        each([&](Group g, GroupFactors& f) BRECCIA_INLINE_LAMBDA {
            if (!f.ordinary)
                for (std::int64_t b = g.first; b < g.first + g.count; ++b) quantize_block<C>(row, b);
            else if (is_coded(row.params.type))
                encode_products<C>(row, g, f);
            else
                encode_group<C>(row, g, f.saturate, GroupDivide(f_load(f.factor)));
        });
    }
    return blocks;
}

template <class C>
static void quantize_row(const QuantizeRow& row) {
    std::int64_t i = 0;
    if constexpr (C::family != CodecFamily::exponent)
        if (can_group(row)) i = quantize_groups<C>(row);
    for (; i < row.blocks; ++i) quantize_block<C>(row, i);
}
