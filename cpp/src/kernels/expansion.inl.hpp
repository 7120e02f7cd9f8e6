// SPDX-License-Identifier: Apache-2.0
//
// Dynamic range expansion (COAT, arXiv:2410.19313, section 4): with m the largest magnitude of a group and k its
// exponent, the code of x is that of sign(x) * max * (|x| / m)^k, max being the format's largest value, and the scale
// is that of m. This is the paper's |x|^k over the scale m^k / max, without numbers that overflow. k makes the least
// magnitude above zero the format's least.
#include "kernels/powers.inl.hpp"

inline constexpr std::uint16_t plain_exponent = 0x3C00;  // 1: codes are those of the values themselves
inline constexpr float most_exponent = 256.0F;           // of groups whose numbers are all but equal

BRECCIA_INLINE F magnitude(F x) { return as_float(i_and(as_bits(x), i_set(0x7FFF'FFFF))); }
BRECCIA_INLINE F with_sign(F magnitude, F of) {
    return as_float(i_or(as_bits(magnitude), i_and(as_bits(of), i_set(std::numeric_limits<std::int32_t>::min()))));
}

BRECCIA_INLINE float first_lane(F x) {
    alignas(64) float lane[lanes];
    f_store(lane, x);
    return lane[0];
}

// The largest and the least magnitude above zero of a group, as bits.
struct Extent {
    I most, least;

    BRECCIA_INLINE_MEMBER Extent() : most(i_set(0)), least(i_set(0x7F80'0000)) {}
    BRECCIA_INLINE_MEMBER void add(F x) {
        const I bits = i_and(as_bits(x), i_set(0x7FFF'FFFF));
        most = i_max(most, bits);
        least = i_min(least, i_select(i_less(i_set(0), bits), bits, i_set(0x7F80'0000)));
    }
    [[nodiscard]] BRECCIA_INLINE_MEMBER std::int32_t most_bits() const { return i_max_lane(most); }
    [[nodiscard]] BRECCIA_INLINE_MEMBER std::int32_t least_bits() const { return -i_max_lane(i_sub(i_set(0), least)); }
};

// The exponent that makes the range of a group that of the format, as float16; plain_exponent where the group has no
// range or is not finite.
BRECCIA_INLINE std::uint16_t range_exponent(std::int32_t most, std::int32_t least, const FormatRange& format) {
    if (most == 0 || most >= 0x7F80'0000) return plain_exponent;
    const F high = as_float(i_set(most)), low = as_float(i_set(least));
    const F range = log2_ratio(logarithm<true>(high), logarithm<true>(low));
    const F span = log2_ratio(logarithm<false>(f_set(format.max)), logarithm<false>(f_set(format.smallest)));
    return to_float16(first_lane(f_div(span, f_max(range, f_mul(span, f_set(1 / most_exponent)))))).bits;
}

// Values of a group as multiples of its scale. Subnormal: whether one of them may be a subnormal number.
template <bool Subnormal>
class Expansion {
public:
    BRECCIA_INLINE_MEMBER Expansion(std::int32_t most, std::uint16_t exponent, float max)
        : top_(logarithm<Subnormal>(as_float(i_set(most)))),
          exponent_(f_set(to_float(Float16{exponent}))),
          max_(f_set(max)) {}

    BRECCIA_INLINE_MEMBER F operator()(F value) const {
        const F size = magnitude(value);
        const F log = f_mul(log2_ratio(logarithm<Subnormal>(size), top_), exponent_);
        const F power = f_mul(power_of_two_f(f_max(log, f_set(-126.0F))), max_);
        return with_sign(f_select(f_less(f_set(0.0F), size), power, f_set(0.0F)), value);
    }

private:
    Logarithm top_;
    F exponent_, max_;
};

template <class Body>
BRECCIA_INLINE void with_expansion(std::int32_t most, std::int32_t least, std::uint16_t exponent, float max,
                                   Body body) {
    if (least < 0x0080'0000)
        body(Expansion<true>(most, exponent, max));
    else
        body(Expansion<false>(most, exponent, max));
}

// What the codes of a group stand for. Zero, an infinity and a NaN stand for themselves; a group whose exponent is no
// number above zero has no values.
class Contraction {
public:
    BRECCIA_INLINE_MEMBER Contraction(float scale, float exponent, float max)
        : scale_(f_set(is_known(exponent) ? scale : std::numeric_limits<float>::quiet_NaN())),
          plain_(exponent == 1.0F || !is_known(exponent)),
          top_(f_set(value_of_largest(scale, max))),
          half_(f_div(f_set(0.5F), f_set(exponent))),
          largest_(logarithm<false>(f_set(max))) {}

    BRECCIA_INLINE_MEMBER F operator()(F code) const {
        if (plain_) return f_mul(code, scale_);
        const F size = magnitude(code);
        // The square root of the ratio to the largest value, so that none underflows. INT8's -128 is beyond that value.
        const F log = f_mul(log2_ratio(logarithm<false>(size), largest_), half_);
        const F root = power_of_two_f(f_min(f_max(log, f_set(-126.0F)), f_set(127.0F)));
        const F value = f_mul(f_mul(root, top_), with_sign(root, code));
        const Mask number = i_less(i_set(0), as_bits(size)), finite = i_less(as_bits(size), i_set(0x7F80'0000));
        return f_select(finite, f_select(number, value, code), code);
    }

private:
    static constexpr bool is_known(float exponent) { return exponent > 0 && exponent <= f32_max; }
    // The scale of the largest float32 may have been rounded up, and the product be beyond float32.
    static constexpr float value_of_largest(float scale, float max) {
        const float value = scale * max;
        if (abs(value) <= f32_max || !(abs(scale) <= f32_max / max)) return value;
        return scale < 0 ? -f32_max : f32_max;
    }

    F scale_;
    bool plain_;
    F top_, half_;
    Logarithm largest_;
};

// The first n of 16 numbers.
BRECCIA_INLINE void store_some(float* to, F x, std::int64_t n) {
    if (n >= lanes) return f_store(to, x);
    alignas(64) float rest[lanes];
    f_store(rest, x);
    __builtin_memcpy(to, rest, static_cast<std::size_t>(n) * sizeof(float));
}

BRECCIA_INLINE F load_some(const float* from, std::int64_t n) { return n >= lanes ? f_load(from) : f_load_n(from, n); }

static std::uint32_t expand_group(const float* x, std::int64_t n, const FormatRange& range, float* scaled,
                                  std::uint16_t* exponent) {
    Extent extent;
    for (std::int64_t i = 0; i < n; i += lanes) extent.add(load_some(x + i, n - i));
    const std::int32_t most = extent.most_bits(), least = extent.least_bits();
    const std::uint16_t k = range_exponent(most, least, range);
    if (k == plain_exponent) return 0;
    *exponent = k;
    with_expansion(most, least, k, range.max, [&](auto expansion) BRECCIA_INLINE_LAMBDA {
        for (std::int64_t i = 0; i < n; i += lanes) store_some(scaled + i, expansion(load_some(x + i, n - i)), n - i);
    });
    return static_cast<std::uint32_t>(most);
}

static void contract_row(const ContractRow& row) {
    std::int64_t group = 0;
    for (std::int64_t i = 0, end = 0; i < row.count; i = end, ++group) {
        end = (row.begin + i) / row.group * row.group + row.group - row.begin;
        end = end < row.count ? end : row.count;
        const Contraction contraction(row.scales[group], row.exponents[group], row.max);
        for (; i < end; i += lanes)
            store_some(row.values + i, contraction(load_some(row.values + i, end - i)), end - i);
    }
}
