// SPDX-License-Identifier: Apache-2.0
//
// The scale rules: from a block's statistics to its stored scale and the factor its codes are made with. Plain scalar
// code, visited once per block. Oracles and their arithmetic: docs/numerics.md.
//
// Included inside a backend's namespace, so that no symbol is shared between targets.

inline constexpr float f32_max = std::numeric_limits<float>::max();

static inline float minimum(float a, float b) { return a < b ? a : b; }
static inline float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

// A positive or negative scale rounded to its storage type, kept finite and non-zero.
static inline BlockScale store_scale(float s, ScaleType type) {
    const std::uint32_t sign = bits_of(s) & f32_sign_bit;
    const float magnitude = minimum(abs(s), f32_max);
    BlockScale result;
    switch (type) {
        case ScaleType::float16: {
            std::uint32_t bits = to_float16(magnitude).bits;
            if (bits >= 0x7C00U) bits = 0x7BFFU;
            if (bits == 0) bits = 1;
            result.stored = bits | sign >> 16;
            result.decoded = to_float(Float16{static_cast<std::uint16_t>(result.stored)});
            break;
        }
        case ScaleType::bfloat16: {
            std::uint32_t bits = to_bfloat16(magnitude).bits;
            if (bits >= 0x7F80U) bits = 0x7F7FU;
            if (bits == 0) bits = 1;
            result.stored = bits | sign >> 16;
            result.decoded = to_float(BFloat16{static_cast<std::uint16_t>(result.stored)});
            break;
        }
        default: {
            const std::uint32_t bits = bits_of(magnitude) == 0 ? 1U : bits_of(magnitude);
            result.stored = bits | sign;
            result.decoded = float_from_bits(result.stored);
        }
    }
    result.factor = result.decoded;
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

// E8M0 of a positive float rounded up, as PTX cvt.rp.satfinite.ue8m0x2.f32: 2^-127 and less give 0.
static inline std::uint32_t e8m0_round_up(float x) {
    const std::uint32_t b = bits_of(x);
    if (b <= 0x0040'0000U) return 0;
    const std::uint32_t code = (b + 0x007F'FFFFU) >> 23;
    return code > 254 ? 254 : code;
}

template <class C>
static inline std::uint32_t mx_exponent(float amax, ScaleRule rule) {
    if constexpr (C::family == CodecFamily::minifloat) {
        if (rule == ScaleRule::mx_rceil) return e8m0_round_up(amax / C::max);
        std::uint32_t b = bits_of(amax);
        if (rule == ScaleRule::mx_even) b += 1U << (22 - C::mantissa_bits);
        int exponent = static_cast<int>(b >> 23);
        if (rule == ScaleRule::mx_ceil && (b & 0x007F'FFFFU) != 0) ++exponent;
        exponent -= C::max_exponent;
        return exponent < 0 ? 0U : static_cast<std::uint32_t>(exponent);
    }
    return 0;
}

static inline BlockScale mx_scale(std::uint32_t code, ScaleRule rule) {
    BlockScale result;
    result.stored = code;
    result.decoded = exp2i(static_cast<int>(code) - 127);
    result.multiply = true;
    // At code 0 the oracles part from 2^127: torchao and TransformerEngine multiply by 1 where they round up, and
    // torchao divides by 2^-126 in its other modes.
    result.factor = code == 0 ? (rule == ScaleRule::mx_rceil ? 1.0F : exp2i(126)) : exp2i(127 - static_cast<int>(code));
    return result;
}

static inline BlockScale nvfp4_scale(std::uint32_t code, const ScaleParams& p) {
    BlockScale result;
    result.stored = code;
    const float b = Float8E4M3FN::decode(static_cast<std::uint8_t>(code));
    result.multiply = true;
    if (!p.two_level)
        result.factor = minimum(1.0F / b, f32_max);
    else if (p.rule == ScaleRule::nvfp4_torchao)
        result.factor = minimum((1.0F / p.global_scale) / b, f32_max);
    else
        result.factor = minimum(1.0F / (b * (1.0F / p.global_encode)), f32_max);
    result.decoded = b * p.global_scale;
    return result;
}

static inline std::uint32_t nvfp4_code(float amax, const ScaleParams& p) {
    float b = 0;
    if (!p.two_level)
        b = amax / 6.0F;
    else if (p.rule == ScaleRule::nvfp4_torchao)
        b = (amax / 6.0F) / p.global_scale;
    else
        b = amax * (p.global_encode * (1.0F / 6.0F));
    const float lowest = p.rule == ScaleRule::nvfp4_torchao ? Float8E4M3FN::smallest_normal : 0.0F;
    return Float8E4M3FN::encode(clamp(b, lowest, 448.0F));
}

// s = (max - min) / levels over a range that contains zero, and the code zero maps to.
template <class C>
static inline BlockScale asymmetric_scale(float min, float max, const ScaleParams& p) {
    // Halved first: the range of two finite floats can be infinite.
    const float levels = C::max - C::lowest;
    const float s = (max * 0.5F - min * 0.5F) / levels * 2.0F;
    BlockScale result = store_scale(s == 0 ? 1.0F : s, p.type);
    const float zero = C::lowest - min / result.decoded;
    constexpr float magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to the nearest integer
    result.zero_point = (clamp(zero, C::lowest, C::max) + magic) - magic;
    return result;
}

// Candidates of the search by squared error. Number 0 is the amax rule's own scale and wins ties.
inline constexpr int e4m3_offsets[] = {0, 1, -1, 2, -2, 3, 4, 5, 6};  // code * 1.5 is 4 or 5 up: "four over six"
inline constexpr int e8m0_offsets[] = {0, 1, -1};

template <class C>
static inline int candidate_count(const ScaleParams& p) {
    if (p.search == ScaleSearch::amax) return 1;
    if (p.type == ScaleType::e4m3) return static_cast<int>(std::size(e4m3_offsets));
    if (p.type == ScaleType::e8m0) return static_cast<int>(std::size(e8m0_offsets));
    const bool symmetric_integer =
        C::family == CodecFamily::integer && C::lowest < 0 && p.rule != ScaleRule::asymmetric;
    return symmetric_integer ? 32 : 16;
}

template <class C>
static inline BlockScale scale_of_rule(const BlockStats& stats, const ScaleParams& p, int candidate) {
    const float amax = float_from_bits(stats.amax_bits);
    switch (p.rule) {
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even: {
            const std::uint32_t code = mx_exponent<C>(amax, p.rule);
            const int moved = static_cast<int>(code) + e8m0_offsets[candidate];
            return mx_scale(moved < 1 || moved > 254 ? code : static_cast<std::uint32_t>(moved), p.rule);
        }
        case ScaleRule::nvfp4_te:
        case ScaleRule::nvfp4_torchao: {
            const std::uint32_t code = nvfp4_code(amax, p);
            const int moved = static_cast<int>(code) + e4m3_offsets[candidate];
            const int lowest = p.rule == ScaleRule::nvfp4_torchao ? 8 : 1;
            const bool outside = moved < lowest || moved > Float8E4M3FN::max_code;
            return nvfp4_scale(outside ? code : static_cast<std::uint32_t>(moved), p);
        }
        case ScaleRule::asymmetric: {
            // Values beyond a shrunken range saturate.
            const float shrink = 1.0F - 0.02F * static_cast<float>(candidate);
            return asymmetric_scale<C>(stats.min * shrink, stats.max * shrink, p);
        }
        case ScaleRule::multiply: {
            if (amax == 0) return store_scale(1.0F, p.type);
            const float stretch = p.margin_factor * (1.0F + 0.0625F * static_cast<float>(candidate));
            const float m = minimum(minimum(C::max / amax, f32_max) / stretch, f32_max);
            BlockScale result = store_scale(1.0F / m, p.type);
            result.factor = m;
            result.multiply = true;
            return result;
        }
        case ScaleRule::divide: break;
    }
    if (amax == 0) return store_scale(1.0F, p.type);
    float s = amax / C::max * p.margin_factor;
    if constexpr (C::family == CodecFamily::minifloat) {
        // One binade of larger scales visits every alignment of the float grid, and nothing saturates.
        s *= 1.0F + 0.0625F * static_cast<float>(candidate);
    } else {
        // Smaller scales saturate the outliers. A negative one gives the larger side of the data the extra code.
        s *= 1.0F - 0.02F * static_cast<float>(candidate & 15);
        if (candidate >= 16) s = -s;
    }
    return store_scale(s, p.type);
}

template <class C>
static inline BlockScale choose_scale(const BlockStats& stats, const ScaleParams& p, int candidate) {
    if (!C::has_nan && stats.has_nan) return poisoned_scale(p.type);
    BlockScale result = scale_of_rule<C>(stats, p, candidate);
    result.all_finite = !stats.has_nan && !stats.has_infinity;
    allow_fast_division(result, stats.amax_bits);
    const int exponent = static_cast<int>(stats.amax_bits >> 23) - 127;
    result.error_unit = exp2i(exponent < -126 ? 126 : (exponent > 126 ? -126 : -exponent));
    return result;
}
