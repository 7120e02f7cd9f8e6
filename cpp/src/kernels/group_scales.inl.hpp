// SPDX-License-Identifier: Apache-2.0
//
// The search by squared error for sixteen blocks at a time, over data transposed so that a lane sees its own block.

using GroupScale = LaneScale<SixteenLanes>;

// Whether all amaxes are such (2^-40 to 2^40; for float16 scales 2^-9 to 2^15) that the rules need none of what they do
// for other ones, and squared errors stay in range in any unit.
BRECCIA_INLINE bool moderate(I amax_bits, ScaleType type) {
    const int low = type == ScaleType::float16 ? -9 : -40, high = type == ScaleType::float16 ? 15 : 40;
    const I below = i_set((low + 127) << 23), above = i_set((high + 127) << 23);
    return i_none(i_less(amax_bits, below)) && i_none(i_less(above, amax_bits));
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

// The errors of a scale and of its negative. The quotients differ in sign alone, and the codes only where a quotient is
// cut off at one of the ends.
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

// No rule that multiplies has groups of integers.
template <class C>
BRECCIA_INLINE F group_error(const float* turned, std::int64_t block, const GroupScale& s,
                             [[maybe_unused]] bool multiply) {
    if constexpr (C::family == CodecFamily::minifloat)
        if (multiply) return error_sum<C>(turned, block, Multiply{s.factor}, s.decoded);
    return error_sum<C>(turned, block, FastDivide(s.factor), s.decoded);
}

// The best of some candidates.
struct GroupChoice {
    F error_f32x16;
    GroupScale scale;
};

BRECCIA_INLINE void choose(GroupChoice& best, const GroupChoice& other) {
    const Mask better = f_less(other.error_f32x16, best.error_f32x16);
    best.error_f32x16 = f_select(better, other.error_f32x16, best.error_f32x16);
    best.scale.stored = i_select(better, other.scale.stored, best.scale.stored);
    best.scale.factor = f_select(better, other.scale.factor, best.scale.factor);
    best.scale.decoded = f_select(better, other.scale.decoded, best.scale.decoded);
}

// The search of an integer format. A negative scale is no better than its twin where no code is cut off.
template <class C>
static GroupScale search_mirrored(const float* turned, std::int64_t block, I amax_bits, const ScaleParams& p) {
    GroupChoice best{}, best_mirrored{};
    for (int candidate = 0; candidate < number_candidates; ++candidate) {
        const GroupScale scale = scale_of_amax<SixteenLanes>(amax_bits, p, scale_format<C>, candidate);
        const FastDivide divide(scale.factor);
        const F largest = f_add(divide(as_float(amax_bits)), f_set(integer_magic));
        F errors[2] = {f_set(0.0F), f_set(f32_max)};
        if (i_none(f_less(f_set(C::max + integer_magic), largest)))
            errors[0] = error_sum<C>(turned, block, divide, scale.decoded);
        else
            mirrored_error_sums<C>(turned, block, divide, scale.decoded, errors);
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
static GroupScale search_group(const float* x, std::int64_t block, I amax_bits, const ScaleParams& p) {
    alignas(64) float turned[256 * lanes];
    for (std::int64_t k = 0; k < block; k += lanes) transpose_16x16(x + k, block, turned + k * lanes, lanes);
    const int count = candidate_count<C>(p);
    if constexpr (C::family == CodecFamily::integer)
        if (count == 2 * number_candidates) return search_mirrored<C>(turned, block, amax_bits, p);
    GroupChoice best{};
    for (int candidate = 0; candidate < count; ++candidate) {
        const GroupScale scale = scale_of_amax<SixteenLanes>(amax_bits, p, scale_format<C>, candidate);
        const GroupChoice choice{group_error<C>(turned, block, scale, multiplies(p.rule)), scale};
        if (candidate == 0)
            best = choice;
        else
            choose(best, choice);
    }
    return best.scale;
}
