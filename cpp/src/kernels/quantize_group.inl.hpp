// SPDX-License-Identifier: Apache-2.0
//
// Sixteen blocks at a time, one per lane: the scale rules as vector code, and the search by squared error over data
// turned so that a lane sees its own block. Bytes equal those of one block at a time; groups with anything unusual in
// them (specials, zeros, extreme magnitudes) are left to that.

// The scales of 16 blocks.
struct GroupScale {
    I stored_i32x16;
    F factor_f32x16, decoded_f32x16;
};

template <class C>
static inline bool can_group(const QuantizeRow& row) {
    constexpr std::int64_t longest = 256;  // the turned group stays in the first-level cache
    const ScaleRule rule = row.params.rule;
    if (rule == ScaleRule::asymmetric || rule == ScaleRule::multiply || C::family == CodecFamily::exponent)
        return false;
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
BRECCIA_INLINE GroupScale group_scales(I amax_bits, const ScaleParams& p, int candidate) {
    const F amax = as_float(amax_bits);
    if (p.type == ScaleType::e4m3) return nvfp4_scales(amax, p, e4m3_offsets[candidate]);
    if (p.type == ScaleType::e8m0) {
        const I code = i_add(mx_exponents<C>(amax_bits, p.rule), i_set(e8m0_offsets[candidate]));
        return {code, as_float(i_shl<23>(i_sub(i_set(254), code))), as_float(i_shl<23>(code))};
    }
    F s = f_mul(f_div(amax, f_set(C::max)), f_set(p.margin_factor));
    if constexpr (C::family == CodecFamily::minifloat) {
        s = f_mul(s, f_set(1.0F + 0.0625F * static_cast<float>(candidate)));
    } else {
        const float shrink = 1.0F - 0.02F * static_cast<float>(candidate & 15);
        s = f_mul(s, f_set(candidate >= 16 ? -shrink : shrink));
    }
    if (p.type == ScaleType::float16) return stored_as<Float16>(s);
    if (p.type == ScaleType::bfloat16) return stored_as<BFloat16>(s);
    return {as_bits(s), s, s};
}

// Sums of a lane's elements in the order squared_error adds them: elements i, i + 16, … first, then halves.
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
    for (std::int64_t half = lanes / 2; half > 0; half /= 2)
        for (std::int64_t i = 0; i < half; ++i) sums_f32x16[i] = f_add(sums_f32x16[i], sums_f32x16[i + half]);
    return sums_f32x16[0];
}

template <class C>
static F group_error(const float* turned, std::int64_t block, const GroupScale& s, bool multiply) {
    if (multiply) return error_sum<C>(turned, block, Multiply{s.factor_f32x16}, s.decoded_f32x16);
    const F reciprocal = f_div(f_set(1.0F), s.factor_f32x16);
    return error_sum<C>(turned, block, Newton{s.factor_f32x16, reciprocal}, s.decoded_f32x16);
}

template <class C>
static GroupScale search_group(const float* x, std::int64_t block, I amax_bits, const ScaleParams& p, bool multiply) {
    alignas(64) float turned[256 * lanes];
    for (std::int64_t b = 0; b < lanes; ++b)
        for (std::int64_t k = 0; k < block; ++k) turned[k * lanes + b] = x[b * block + k];
    GroupScale best = group_scales<C>(amax_bits, p, 0);
    F best_error = group_error<C>(turned, block, best, multiply);
    const int count = candidate_count<C>(p);
    for (int candidate = 1; candidate < count; ++candidate) {
        const GroupScale other = group_scales<C>(amax_bits, p, candidate);
        const F error = group_error<C>(turned, block, other, multiply);
        const Mask better = f_less(error, best_error);
        best_error = f_select(better, error, best_error);
        best.stored_i32x16 = i_select(better, other.stored_i32x16, best.stored_i32x16);
        best.factor_f32x16 = f_select(better, other.factor_f32x16, best.factor_f32x16);
        best.decoded_f32x16 = f_select(better, other.decoded_f32x16, best.decoded_f32x16);
    }
    return best;
}

BRECCIA_INLINE void write_scales(void* scales, std::int64_t first, I stored, ScaleType type) {
    if (is_coded(type)) return i_store_bytes(static_cast<std::uint8_t*>(scales) + first, stored);
    alignas(64) std::int32_t bits[lanes];
    i_store(bits, stored);
    for (int i = 0; i < lanes; ++i) {
        if (type == ScaleType::float32)
            static_cast<std::int32_t*>(scales)[first + i] = bits[i];
        else
            static_cast<std::uint16_t*>(scales)[first + i] = static_cast<std::uint16_t>(bits[i]);
    }
}

template <class C, class Scale>
BRECCIA_INLINE void encode_block(const QuantizeRow& row, std::int64_t i, Scale scale) {
    const float* x = row.x + i * row.block;
    if constexpr (C::bits == 4)
        encode_nibbles<C, false>(x, row.block, scale, 0.0F, row.codes + i * row.block / 2);
    else
        encode_bytes<C, false>(x, row.block, scale, 0.0F, row.codes + i * row.block);
}

// Blocks [first, first + 16) of a row; false, with nothing written, if they are not ordinary.
template <class C>
static bool quantize_group(const QuantizeRow& row, std::int64_t first) {
    const float* x = row.x + first * row.block;
    alignas(64) std::int32_t amax[lanes];
    const I abs_mask = i_set(0x7FFF'FFFF);
    for (std::int64_t b = 0; b < lanes; ++b) {
        I amax_i32x16 = i_set(0);
        for (std::int64_t k = 0; k < row.block; k += lanes)
            amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load(x + b * row.block + k)), abs_mask));
        amax[b] = i_max_lane(amax_i32x16);
    }
    const I amax_bits = i_load(amax);
    if (!ordinary(amax_bits, row.params.type)) return false;
    const bool multiply = is_coded(row.params.type);
    const GroupScale s = row.params.search == ScaleSearch::amax
                             ? group_scales<C>(amax_bits, row.params, 0)
                             : search_group<C>(x, row.block, amax_bits, row.params, multiply);
    write_scales(row.scales, first, s.stored_i32x16, row.params.type);
    alignas(64) float factor[lanes], reciprocal[lanes];
    f_store(factor, s.factor_f32x16);
    if (multiply) {
        for (std::int64_t b = 0; b < lanes; ++b) encode_block<C>(row, first + b, Multiply{f_set(factor[b])});
    } else {
        f_store(reciprocal, f_div(f_set(1.0F), s.factor_f32x16));
        for (std::int64_t b = 0; b < lanes; ++b)
            encode_block<C>(row, first + b, Newton{f_set(factor[b]), f_set(reciprocal[b])});
    }
    return true;
}
