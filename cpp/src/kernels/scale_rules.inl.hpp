// SPDX-License-Identifier: Apache-2.0
//
// The scale rules: from the amax of a block to its stored scale and the factor its codes are made with. Each rule is
// written once, over a lane type L: OneLane for a block at a time and any amax, SixteenLanes for groups of blocks whose
// amaxes are moderate. Oracles and their arithmetic: docs/numerics.md.
//
// No switch over ScaleRule has a default, and CMake makes a missing case an error: a new rule is decided here and in
// its row of traits_of() (breccia/recipe.hpp), nowhere else. What kernels ask in their loops stays in switches: of rows
// gcc 12 makes a search by squared error an eighth more instructions long.

inline constexpr float f32_max = std::numeric_limits<float>::max();

// What a rule takes of the format that codes have.
struct ScaleFormat {
    CodecFamily family;
    float max, lowest;
    int max_exponent, mantissa_bits;  // of minifloats
    bool has_nan;
};
template <class C>
inline constexpr ScaleFormat scale_format = [] {
    ScaleFormat format{C::family, C::max, C::lowest, 0, 0, C::has_nan};
    if constexpr (C::family == CodecFamily::minifloat) {
        format.max_exponent = C::max_exponent;
        format.mantissa_bits = C::mantissa_bits;
    }
    return format;
}();

// The scales of as many blocks as L has lanes.
template <class L>
struct LaneScale {
    L::Int stored;             // as in memory, in the low bits
    L::Float factor, decoded;  // codes are x times the factor, or x divided by it: see multiplies()
};

/// Whether codes are made by multiplying with the factor rather than by dividing.
constexpr bool multiplies(ScaleRule rule) {
    switch (rule) {
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even:
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao:
        case ScaleRule::multiply: return true;
        case ScaleRule::divide:
        case ScaleRule::asymmetric:
        case ScaleRule::expanded: break;
    }
    return false;
}

// Rules whose scales are chosen sixteen at a time.
constexpr bool has_groups(ScaleRule rule) {
    switch (rule) {
        case ScaleRule::divide:
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even:
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao: return true;
        case ScaleRule::multiply:    // of tensors or rows: its blocks are long
        case ScaleRule::asymmetric:  // takes the range, not the amax
        case ScaleRule::expanded:    // see expansion.inl.hpp
            break;
    }
    return false;
}

// Candidates of the search by squared error. Number 0 is the amax rule's own scale and wins ties.
inline constexpr int e4m3_offsets[] = {0, 1, -1, 2, -2, 3, 4, 5, 6};  // code * 1.5 is 4 or 5 up: "four over six"
inline constexpr int e8m0_offsets[] = {0, 1, -1};
// Scales that are numbers are multiplied by one of these. Larger ones visit, over one binade, every alignment of a
// minifloat's grid, and nothing saturates. Smaller ones saturate the outliers of integers.
inline constexpr int number_candidates = 16;
constexpr float larger(int candidate) { return 1.0F + 0.0625F * static_cast<float>(candidate); }
constexpr float smaller(int candidate) { return 1.0F - 0.02F * static_cast<float>(candidate); }

// A negative scale gives the larger side of the data the extra code of a signed integer: the same candidates again.
template <class C>
inline constexpr bool has_extra_code = C::family == CodecFamily::integer && C::lowest < 0;

template <class C>
static inline int candidate_count(const ScaleParams& p) {
    if (p.search == ScaleSearch::amax) return 1;
    switch (p.rule) {
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even: return static_cast<int>(std::size(e8m0_offsets));
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao: return static_cast<int>(std::size(e4m3_offsets));
        case ScaleRule::divide:
        case ScaleRule::multiply: return has_extra_code<C> ? 2 * number_candidates : number_candidates;
        case ScaleRule::asymmetric:
        case ScaleRule::expanded: break;
    }
    return number_candidates;
}

// ---- Powers of two: the MX rules ----

// E8M0 of the amax over the format's largest number, or over the power of two in that.
template <class L>
BRECCIA_INLINE L::Int mx_code(typename L::Int amax_bits, ScaleRule rule, const ScaleFormat& format) {
    if (format.family != CodecFamily::minifloat) return L::set(0);
    // Added to a float's bits, this makes the exponent that of the next power of two.
    const auto almost_one = L::set(0x007F'FFFF);
    auto bits = amax_bits;
    switch (rule) {
        case ScaleRule::mx_rceil: {
            // As PTX cvt.rp.satfinite.ue8m0x2.f32: 2^-127 and less give 0.
            const auto ratio = as_bits(f_div(as_float(amax_bits), L::set(format.max)));
            auto code = i_shr<23>(i_add(ratio, almost_one));
            if constexpr (!L::moderate)
                code = i_select(i_less(L::set(0x0040'0000), ratio), i_min(code, L::set(254)), L::set(0));
            return code;
        }
        case ScaleRule::mx_ceil: bits = i_add(bits, almost_one); break;
        case ScaleRule::mx_even: bits = i_add(bits, L::set(1 << (22 - format.mantissa_bits))); break;
        case ScaleRule::mx_floor: break;
        case ScaleRule::divide:
        case ScaleRule::multiply:
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao:
        case ScaleRule::asymmetric:
        case ScaleRule::expanded: return L::set(0);  // no powers of two
    }
    auto code = i_sub(i_shr<23>(bits), L::set(format.max_exponent));
    if constexpr (!L::moderate) code = i_min(i_max(code, L::set(0)), L::set(254));
    return code;
}

// 2^(code - 127). Of code 0 that is a subnormal float.
template <class L>
BRECCIA_INLINE L::Float power_of_two(typename L::Int code) {
    const auto power = as_float(i_shl<23>(code));
    if constexpr (L::moderate)
        return power;
    else
        return f_select(i_less(code, L::set(1)), L::set(exp2i(-127)), power);
}

template <class L>
BRECCIA_INLINE LaneScale<L> mx_scale(typename L::Int amax_bits, const ScaleParams& p, const ScaleFormat& format,
                                     int candidate) {
    const auto own = mx_code<L>(amax_bits, p.rule, format);
    auto code = i_add(own, L::set(e8m0_offsets[candidate]));
    if constexpr (!L::moderate)
        code = i_select(i_less(code, L::set(1)), own, i_select(i_less(L::set(254), code), own, code));
    LaneScale<L> s{code, power_of_two<L>(i_sub(L::set(254), code)), power_of_two<L>(code)};
    // At code 0 the oracles part from 2^127: torchao and TransformerEngine multiply by 1 where they round up, and
    // torchao divides by 2^-126 in its other modes.
    if constexpr (!L::moderate) {
        const float at_zero = p.rule == ScaleRule::mx_rceil ? 1.0F : exp2i(126);
        s.factor = f_select(i_less(code, L::set(1)), L::set(at_zero), s.factor);
    }
    return s;
}

// ---- E4M3 scales, under a global scale or without: the NVFP4 rules ----

// A block's scale before it is rounded to E4M3.
template <class L>
BRECCIA_INLINE L::Float nvfp4_ratio(typename L::Float amax, const ScaleParams& p) {
    if (!p.two_level) return f_div(amax, L::set(6.0F));
    if (p.rule == ScaleRule::nvfp4_torchao) return f_div(f_div(amax, L::set(6.0F)), L::set(p.global_scale));
    return f_mul(amax, L::set(p.global_encode * (1.0F / 6.0F)));
}

template <class L>
BRECCIA_INLINE L::Float nvfp4_factor(typename L::Float value, const ScaleParams& p) {
    if (!p.two_level) return f_div(L::set(1.0F), value);
    if (p.rule == ScaleRule::nvfp4_torchao) return f_div(L::set(1.0F / p.global_scale), value);
    return f_div(L::set(1.0F), f_mul(value, L::set(1.0F / p.global_encode)));
}

template <class L>
BRECCIA_INLINE LaneScale<L> nvfp4_scale(typename L::Int amax_bits, const ScaleParams& p, int candidate) {
    const bool torchao = p.rule == ScaleRule::nvfp4_torchao;
    auto ratio = nvfp4_ratio<L>(as_float(amax_bits), p);
    if (torchao) ratio = f_max(L::set(Float8E4M3FN::smallest_normal), ratio);
    const auto own = e4m3_code(ratio);
    const auto moved = i_add(own, L::set(e4m3_offsets[candidate]));
    const auto lowest = L::set(torchao ? 8 : 1), highest = L::set(std::int32_t{Float8E4M3FN::max_code});
    LaneScale<L> s;
    s.stored = i_select(i_less(moved, lowest), own, i_select(i_less(highest, moved), own, moved));
    const auto value = e4m3_value(s.stored);
    s.factor = f_min(nvfp4_factor<L>(value, p), L::set(f32_max));
    s.decoded = f_mul(value, L::set(p.global_scale));
    return s;
}

// ---- Scales that are numbers ----

// A scale rounded to 16 bits: never zero, and never above the number with the bits `largest`.
template <class T, class L>
BRECCIA_INLINE LaneScale<L> stored_as_half(typename L::Float scale, std::int32_t largest) {
    auto bits = half_bits<T>(scale);
    if constexpr (!L::moderate) bits = i_max(i_min(bits, L::set(largest)), L::set(1));
    const auto decoded = half_value<T>(bits);
    return {bits, decoded, decoded};
}

// A positive scale rounded to its type, kept finite and above zero.
template <class L>
BRECCIA_INLINE LaneScale<L> stored_as(typename L::Float scale, ScaleType type) {
    if constexpr (!L::moderate) scale = f_min(scale, L::set(f32_max));
    switch (type) {
        case ScaleType::float16: return stored_as_half<Float16, L>(scale, 0x7BFF);
        case ScaleType::bfloat16: return stored_as_half<BFloat16, L>(scale, 0x7F7F);
        case ScaleType::float32:
        case ScaleType::float64:  // no recipe has these three
        case ScaleType::e8m0:
        case ScaleType::e4m3: break;
    }
    auto bits = as_bits(scale);
    if constexpr (!L::moderate) bits = i_max(bits, L::set(1));
    return {bits, as_float(bits), as_float(bits)};
}

template <class L>
BRECCIA_INLINE LaneScale<L> minus(const LaneScale<L>& s, ScaleType type) {
    const auto sign = L::set(type == ScaleType::float32 ? std::numeric_limits<std::int32_t>::min() : 0x8000);
    const auto zero = L::set(0.0F);
    return {i_xor(s.stored, sign), f_sub(zero, s.factor), f_sub(zero, s.decoded)};
}

// The scale of a block of zeros is 1; of other blocks it is x.
template <class L>
BRECCIA_INLINE L::Float one_of_zero(typename L::Int amax_bits, typename L::Float x) {
    if constexpr (L::moderate)
        return x;
    else
        return f_select(i_less(amax_bits, L::set(1)), L::set(1.0F), x);
}

template <class L>
BRECCIA_INLINE LaneScale<L> divide_scale(typename L::Int amax_bits, const ScaleParams& p, const ScaleFormat& format,
                                         int candidate) {
    const int step = candidate % number_candidates;
    const float moved = format.family == CodecFamily::minifloat ? larger(step) : smaller(step);
    auto scale = f_mul(f_div(as_float(amax_bits), L::set(format.max)), L::set(p.margin_factor));
    scale = one_of_zero<L>(amax_bits, f_mul(scale, L::set(moved)));
    const LaneScale<L> s = stored_as<L>(scale, p.type);
    return candidate < number_candidates ? s : minus(s, p.type);
}

template <class L>
BRECCIA_INLINE LaneScale<L> multiply_scale(typename L::Int amax_bits, const ScaleParams& p, const ScaleFormat& format,
                                           int candidate) {
    const auto most = L::set(f32_max);
    const auto ratio = f_min(f_div(L::set(format.max), as_float(amax_bits)), most);
    const auto factor =
        one_of_zero<L>(amax_bits, f_min(f_div(ratio, L::set(p.margin_factor * larger(candidate))), most));
    LaneScale<L> s = stored_as<L>(f_div(L::set(1.0F), factor), p.type);
    s.factor = factor;
    return s;
}

// Every rule that an amax decides. One function of a lane type does for all formats.
template <class L>
BRECCIA_OUT_OF_LINE LaneScale<L> scale_of_amax(typename L::Int amax_bits, const ScaleParams& p,
                                               const ScaleFormat& format, int candidate) {
    switch (p.rule) {
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even: return mx_scale<L>(amax_bits, p, format, candidate);
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao: return nvfp4_scale<L>(amax_bits, p, candidate);
        case ScaleRule::divide:
        case ScaleRule::expanded: return divide_scale<L>(amax_bits, p, format, candidate);
        case ScaleRule::multiply: return multiply_scale<L>(amax_bits, p, format, candidate);
        case ScaleRule::asymmetric: break;  // takes the range, see asymmetric_scale
    }
    return {L::set(0), L::set(1.0F), L::set(1.0F)};
}

// Whether x / scale may round beyond the format's largest value. It cannot where the scale is amax over that value,
// rounded to no fewer bits than decide it, or rounded up. An NVFP4 scale that is a normal number of E4M3 is within 1/16
// of that, where 7/6 would matter; the largest may stand for what is larger, where the amax came from outside and was
// too small. Unsigned codes cut off negative values.
BRECCIA_INLINE bool may_saturate(I stored, const ScaleParams& p, const ScaleFormat& format) {
    if (p.search != ScaleSearch::amax || format.lowest >= 0) return true;
    switch (p.rule) {
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao:
            return !i_none(m_or(i_less(stored, i_set(8)), i_less(i_set(Float8E4M3FN::max_code - 1), stored)));
        case ScaleRule::mx_rceil: return false;
        case ScaleRule::divide: return p.margin_factor < 1.0F;
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even:
        case ScaleRule::multiply:
        case ScaleRule::asymmetric:
        case ScaleRule::expanded: break;
    }
    return true;
}

// ---- One block ----

static inline float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

static inline BlockScale block_scale(const LaneScale<OneLane>& s) {
    BlockScale result;
    result.stored = static_cast<std::uint32_t>(s.stored);
    result.factor = s.factor;
    result.decoded = s.decoded;
    return result;
}

// s = (max - min) / levels over a range that contains zero, and the code zero maps to.
static inline BlockScale asymmetric_scale(float min, float max, const ScaleParams& p, const ScaleFormat& format) {
    // Halved first: the range of two finite floats can be infinite.
    const float levels = format.max - format.lowest;
    const float s = (max * 0.5F - min * 0.5F) / levels * 2.0F;
    BlockScale result = block_scale(stored_as<OneLane>(min < max ? s : 1.0F, p.type));
    const float zero = format.lowest - min / result.decoded;
    result.zero_point = (clamp(zero, format.lowest, format.max) + integer_magic) - integer_magic;
    return result;
}

static inline BlockScale poisoned_scale(ScaleType type) {
    BlockScale result;
    result.poisoned = true;
    result.decoded = std::numeric_limits<float>::quiet_NaN();
    result.factor = result.decoded;
    switch (type) {
        case ScaleType::e8m0: result.stored = Float8E8M0FNU::nan_code; break;
        case ScaleType::e4m3: result.stored = Float8E4M3FN::nan_code; break;
        case ScaleType::float16: result.stored = 0x7E00U; break;
        case ScaleType::bfloat16: result.stored = 0x7FC0U; break;
        default: result.stored = 0x7FC0'0000U;
    }
    return result;
}

static inline BlockScale scale_of_rule(const BlockStats& stats, const ScaleParams& p, const ScaleFormat& format,
                                       int candidate) {
    if (p.needs_range())  // values beyond a shrunken range saturate
        return asymmetric_scale(stats.min * smaller(candidate), stats.max * smaller(candidate), p, format);
    BlockScale result =
        block_scale(scale_of_amax<OneLane>(static_cast<std::int32_t>(stats.amax_bits), p, format, candidate));
    result.multiply = multiplies(p.rule);
    return result;
}

[[maybe_unused]] BRECCIA_OUT_OF_LINE BlockScale scale_for_format(const BlockStats& stats, const ScaleParams& p,
                                                                 const ScaleFormat& format, int candidate) {
    if (!format.has_nan && stats.has_nan) return poisoned_scale(p.type);
    BlockScale result = scale_of_rule(stats, p, format, candidate);
    result.all_finite = !stats.has_nan && !stats.has_infinity;
    allow_fast_division(result, stats.amax_bits);
    const int exponent = static_cast<int>(stats.amax_bits >> 23) - 127;
    result.error_unit = exp2i(exponent < -126 ? 126 : (exponent > 126 ? -126 : -exponent));
    return result;
}

template <class C>
static inline BlockScale choose_scale(const BlockStats& stats, const ScaleParams& p, int candidate) {
    return scale_for_format(stats, p, scale_format<C>, candidate);
}
