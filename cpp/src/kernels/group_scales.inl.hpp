// SPDX-License-Identifier: Apache-2.0
//
// Scales of up to sixteen blocks at a time, one per lane: the rules as vector code, and the search by squared error
// over data turned so that a lane sees its own block.

// The scales of 16 blocks.
struct GroupScale {
    I stored_i32x16;
    F factor_f32x16, decoded_f32x16;
};

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
