// SPDX-License-Identifier: Apache-2.0
#include "quantize/exact_scale.hpp"

#include <algorithm>
#include <span>

namespace breccia::inline v0_4 {
namespace {

std::optional<std::uint32_t> stored_bits(float scale, ScaleType type) {
    const auto if_exact = [&](float stored, std::uint32_t bits) {
        return stored == scale ? std::optional(bits) : std::nullopt;
    };
    const auto half = [&](auto rounded) { return if_exact(to_float(rounded), rounded.bits); };
    switch (type) {
        case ScaleType::float32: return bits_of(scale);
        case ScaleType::float16: return half(to_float16(scale));
        case ScaleType::bfloat16: return half(to_bfloat16(scale));
        case ScaleType::e8m0:
        case ScaleType::e4m3: {
            const FormatInfo& codec = info(format_of_scale(type));
            const std::uint8_t code = codec.encode(scale);
            return if_exact(codec.decode(code), code);
        }
        default: return std::nullopt;
    }
}

constexpr float integer_magic = 12582912.0F;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
constexpr float tolerance = 1.0F / 512;       // of fractions whose denominators are at most 255

float distance_to_integer(float x) { return abs(x - ((x + integer_magic) - integer_magic)); }

// The denominator of a fraction between 0 and 1/2, by Euclid's algorithm with nearest quotients.
std::int32_t denominator_of(float fraction) {
    float a = 1, b = fraction;
    for (int i = 0; i < 8 && b >= tolerance; ++i) {
        const float quotient = (a / b + integer_magic) - integer_magic;
        const float rest = abs(a - quotient * b);
        a = b;
        b = rest;
    }
    return static_cast<std::int32_t>((1 / a + integer_magic) - integer_magic);
}

// Significands of p in the order of their odd parts.
constexpr std::uint32_t significands_of_4[] = {16, 24, 20, 28, 18, 22, 26, 30, 17, 19, 21, 23, 25, 27, 29, 31};
constexpr std::uint32_t significands_of_3[] = {8, 12, 10, 14, 9, 11, 13, 15};
constexpr std::uint32_t significands_of_2[] = {4, 6, 5, 7};
constexpr std::uint32_t significands_of_1[] = {2, 3};

std::span<const std::uint32_t> significands_of(int mantissa_bits) {
    if (mantissa_bits == 1) return significands_of_1;
    if (mantissa_bits == 2) return significands_of_2;
    if (mantissa_bits == 3) return significands_of_3;
    return significands_of_4;
}

// A power of two, neither it nor its reciprocal a subnormal number.
bool has_exact_reciprocal(float scale) {
    const std::uint32_t bits = bits_of(scale) & f32_abs_mask;
    return (bits & 0x007F'FFFFU) == 0 && bits >= 0x0080'0000U && bits <= 0x7E80'0000U;
}

}  // namespace

std::optional<BlockScale> stored_exactly(float scale, ScaleType type, std::uint32_t amax_bits) {
    if (scale == 0 || !is_finite(scale)) return std::nullopt;
    const std::optional<std::uint32_t> stored = stored_bits(scale, type);
    if (!stored) return std::nullopt;
    BlockScale s;
    s.stored = *stored;
    s.factor = s.decoded = scale;
    s.all_finite = true;
    s.multiply = has_exact_reciprocal(scale);
    if (s.multiply)
        s.factor = 1 / scale;
    else
        allow_fast_division(s, amax_bits);
    return s;
}

std::optional<float> power_of_two_for(float amax, Format format) {
    if (amax == 0) return std::nullopt;
    const std::uint32_t rounded_up = (bits_of(amax / info(format).max) + 0x007F'FFFFU) & 0x7F80'0000U;
    if (rounded_up == 0 || rounded_up >= f32_infinity_bits) return std::nullopt;
    return float_from_bits(rounded_up);
}

bool has_few_bits(float x, Format format) {
    const std::uint32_t magnitude = bits_of(x) & f32_abs_mask;
    if (magnitude < 0x0080'0000U) return true;  // a subnormal number's leading zeros are not counted
    return (magnitude & (0x007F'FFFFU >> info(format).mantissa_bits)) == 0;
}

bool any_too_small(const float* x, std::int64_t n, float power, Format format) {
    const float unit = info(format).smallest;
    return std::any_of(x, x + n, [&](float value) {
        const bool is_normal = (bits_of(value) & f32_abs_mask) >= 0x0080'0000U;
        return is_normal && has_few_bits(value, format) && distance_to_integer(abs(value) / power / unit) != 0;
    });
}

bool set_zero_point(BlockScale& s, const BlockStats& stats, Format format) {
    const float ends[] = {stats.min / s.decoded, stats.max / s.decoded};
    const float low = (std::min(ends[0], ends[1]) + integer_magic) - integer_magic;
    const float high = (std::max(ends[0], ends[1]) + integer_magic) - integer_magic;
    const FormatInfo& codes = info(format);
    s.zero_point = codes.lowest - low;
    return high - low <= codes.max - codes.lowest;
}

CommonScale::CommonScale(float amax, const Recipe& recipe, bool has_too_small)
    : amax_(amax),
      format_(info(recipe.element)),
      type_(recipe.scale),
      integers_(format_.family == CodecFamily::integer),
      asymmetric_(recipe.has_zero_point()) {
    if (!integers_)
        for (const std::uint32_t m : significands_of(format_.mantissa_bits)) significands_ |= 1U << m;
    const float largest = format_.lowest < 0 ? -format_.lowest : format_.max;
    limit_ = static_cast<std::int32_t>(asymmetric_ ? format_.max - format_.lowest : largest);
    if (has_too_small && type_ != ScaleType::e4m3) leave_out_power();
}

// A value below the smallest code under the power of two is below it under each p with a larger odd part, too. These
// come after the p with amax's own significand, for which amax / p is that power.
void CommonScale::leave_out_power() {
    const std::uint32_t bits = bits_of(amax_);
    if (bits < 0x0080'0000U) return;
    const std::uint32_t own = ((bits & 0x007F'FFFFU) | 0x0080'0000U) >> (23 - format_.mantissa_bits);
    bool left_out = false;
    for (const std::uint32_t m : significands_of(format_.mantissa_bits)) {
        left_out |= m == own;
        if (left_out) significands_ &= ~(1U << m);
    }
}

bool CommonScale::see(const float* x, std::int64_t n) { return integers_ ? see_fractions(x, n) : see_magnitudes(x, n); }

bool CommonScale::see_magnitudes(const float* x, std::int64_t n) {
    const std::uint32_t rest = 0x007F'FFFFU >> format_.mantissa_bits;
    for (std::int64_t i = 0; i < n && significands_ != 0; ++i) {
        const float ratio = abs(x[i]) / amax_;
        if (ratio == 0) continue;
        for (const std::uint32_t m : significands_of(format_.mantissa_bits))
            if (((bits_of(ratio * static_cast<float>(m)) + 16) & rest) >= 32) significands_ &= ~(1U << m);
    }
    return significands_ != 0;
}

// Whether a ratio is near none of k / n with n up to the largest code, of formats that have few of them.
bool CommonScale::is_no_fraction(float ratio) const {
    constexpr std::int32_t few = 16;
    if (limit_ >= few) return false;
    float least = 1;
    for (std::int32_t n = 1; n <= limit_; ++n)
        least = std::min(least, distance_to_integer(ratio * static_cast<float>(n)));
    return least > tolerance;
}

bool CommonScale::see_fractions(const float* x, std::int64_t n) {
    constexpr std::int64_t run = 16;
    for (std::int64_t i = 0; i < std::min(run, n); ++i)
        if (is_no_fraction(abs(x[i]) / amax_)) return false;
    const auto denominator = static_cast<float>(denominator_);
    for (std::int64_t begin = 0; begin < n; begin += run) {
        for (std::int64_t i = begin; i < std::min(begin + run, n); ++i) {
            const float distance = distance_to_integer(abs(x[i]) / amax_ * denominator);
            fraction_bits_ = std::max(fraction_bits_, static_cast<std::int32_t>(bits_of(distance)));
            has_plus_ |= x[i] == amax_;
            has_minus_ |= x[i] == -amax_;
        }
        if (next_denominator() > limit_) return false;  // whatever the other values are
    }
    return true;
}

std::int32_t CommonScale::next_denominator() const {
    const float fraction = float_from_bits(static_cast<std::uint32_t>(fraction_bits_));
    return fraction < tolerance ? denominator_ : denominator_ * denominator_of(fraction);
}

bool CommonScale::end_pass() {
    if (!integers_) return false;
    const std::int32_t next = next_denominator();
    const bool found = next == denominator_;
    fraction_bits_ = 0;
    denominator_ = next;
    return !found && next <= limit_;
}

std::optional<float> CommonScale::scale() const { return integers_ ? integer_scale() : float_scale(); }

std::optional<float> CommonScale::stored(float p) const {
    const float scale = amax_ / p;
    if (type_ == ScaleType::float32) return scale;
    const bool exact = is_finite(scale) && stored_bits(scale, type_) && scale * p == amax_;
    return exact ? std::optional(scale) : std::nullopt;
}

std::optional<float> CommonScale::float_scale() const {
    for (const std::uint32_t m : significands_of(format_.mantissa_bits)) {
        if ((significands_ & 1U << m) == 0) continue;
        float p = static_cast<float>(m) * exp2i(format_.max_exponent - format_.mantissa_bits);
        if (p > format_.max) p /= 2;
        // E4M3 scales are the ones whose range a smaller p with a larger scale may still reach.
        const float least = type_ == ScaleType::e4m3 ? format_.smallest : p;
        while (p >= least && distance_to_integer(p / format_.smallest) == 0) {
            if (const auto found = stored(p)) return found;
            p /= 2;
        }
    }
    return std::nullopt;
}

std::optional<float> CommonScale::integer_scale() const {
    const std::int32_t most = type_ == ScaleType::float32 ? denominator_ : limit_;
    for (std::int32_t n = denominator_; n <= most && n <= limit_; n += denominator_) {
        const auto found = stored(static_cast<float>(n));
        if (!found) continue;
        // A negative scale gives the positive side the lowest code, or unsigned codes to negative values.
        const bool turned = format_.lowest < 0 ? static_cast<float>(n) > format_.max && has_plus_ : has_minus_;
        return turned && !asymmetric_ ? -*found : *found;
    }
    return std::nullopt;
}

}  // namespace breccia::inline v0_4
