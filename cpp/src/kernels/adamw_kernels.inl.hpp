// SPDX-License-Identifier: Apache-2.0
//
// A step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) over weights whose two moments are codes: a group is
// decoded, updated, used and encoded again while it is in registers and the first cache.
// What groups with exponents are: expansion.inl.hpp.

BRECCIA_INLINE float read_float(const std::uint8_t* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

// The factors in registers, and the update of sixteen numbers.
struct AdamWLanes {
    F beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit, least;

    BRECCIA_INLINE_MEMBER explicit AdamWLanes(const AdamWFactors& f)
        : beta1(f_set(f.beta1)),
          beta2(f_set(f.beta2)),
          rest1(f_set(f.rest1)),
          rest2(f_set(f.rest2)),
          keep(f_set(f.keep)),
          rate(f_set(f.rate)),
          correction(f_set(f.correction)),
          eps(f_set(f.eps)),
          limit(f_set(f.limit)),
          least(f_set(-f.limit)) {}

    // Moments become those after the step. Returns the root of the second.
    BRECCIA_INLINE_MEMBER F update(F& weight, F gradient, F& first, F& second) const {
        first = f_add(f_mul(beta1, first), f_mul(rest1, gradient));
        second = f_add(f_mul(beta2, second), f_mul(f_mul(rest2, gradient), gradient));
        const F root = f_sqrt(second);
        const F quotient = f_div(first, f_add(f_mul(root, correction), eps));
        const F change = f_max(least, f_min(limit, quotient));  // a NaN stays
        weight = f_sub(f_mul(weight, keep), f_mul(rate, change));
        return root;
    }
};

// The values of one group's codes, sixteen at a time.
template <class C>
class ExpandedReader {
public:
    BRECCIA_INLINE_MEMBER ExpandedReader(const std::uint8_t* codes, const std::uint8_t* scale, std::uint16_t exponent)
        : codes_(codes), contraction_(read_float(scale), to_float(Float16{exponent}), C::max) {}

    BRECCIA_INLINE_MEMBER F operator()(std::int64_t i) const {
        return contraction_(f_decode<C>(i_load_bytes(codes_ + i)));
    }

private:
    const std::uint8_t* codes_;
    Contraction contraction_;
};

// A group that has no range, or whose numbers are not all finite. A NaN is written without its sign, which depends on
// the order in which a processor takes operands.
template <class C>
BRECCIA_OUT_OF_LINE void encode_plain(float* x, std::int64_t n, const ScaleParams& params, const MomentGroups& to) {
    for (std::int64_t i = 0; i < n; ++i)
        if (is_nan(x[i])) x[i] = std::numeric_limits<float>::quiet_NaN();
    const BlockScale s = choose_scale<C>(block_stats(x, n, false), params, 0);
    write_scale(to.scales, 0, s.stored, params.type);
    *to.exponents = plain_exponent;
    encode_run<C>(x, n, s, to.codes, 0, false);
}

template <class C>
BRECCIA_INLINE void encode_expanded(float* x, std::int64_t n, const Extent& extent, const ScaleParams& params,
                                    const MomentGroups& to) {
    const std::int32_t most = extent.most_bits(), least = extent.least_bits();
    const std::uint16_t exponent = range_exponent(most, least, {.max = C::max, .smallest = C::smallest});
    if (exponent == plain_exponent) return encode_plain<C>(x, n, params, to);
    const BlockScale s = choose_scale<C>({.amax_bits = static_cast<std::uint32_t>(most)}, params, 0);
    write_scale(to.scales, 0, s.stored, params.type);
    *to.exponents = exponent;
    with_expansion(most, least, exponent, C::max, [&](auto expansion) BRECCIA_INLINE_LAMBDA {
        for (std::int64_t i = 0; i < n; i += lanes) {
            const F value = f_load(x + i);
            i_store_bytes(to.codes + i, encode<C, false>(value, expansion(value), 0.0F));
        }
    });
}

// The moment of the group that is `index` groups further.
BRECCIA_INLINE MomentGroups group_of(const MomentGroups& m, std::int64_t index, std::int64_t group,
                                     std::int64_t scale_bytes) {
    return {.codes = m.codes + index * group,
            .scales = m.scales + index * scale_bytes,
            .exponents = m.exponents == nullptr ? nullptr : m.exponents + index,
            .key = m.key};
}

template <class C>
static void step_expanded(const AdamWGroups& groups, const AdamWFactors& factors, const ScaleParams& params) {
    const AdamWLanes step(factors);
    const std::int64_t n = groups.group;
    alignas(64) float first[adamw_group], second[adamw_group];
    for (std::int64_t g = 0; g < groups.groups; ++g) {
        const MomentGroups to_first = group_of(groups.first, g, n, sizeof(float));
        const MomentGroups to_second = group_of(groups.second, g, n, sizeof(float));
        const ExpandedReader<C> old_first(to_first.codes, to_first.scales, *to_first.exponents);
        const ExpandedReader<C> old_second(to_second.codes, to_second.scales, *to_second.exponents);
        Extent of_first, of_second;
        for (std::int64_t i = 0; i < n; i += lanes) {
            float* at = groups.weights + g * n + i;
            F weight = f_load(at), m = old_first(i), v = old_second(i);
            step.update(weight, f_load(groups.gradients + g * n + i), m, v);
            f_store(at, weight);
            f_store(first + i, m);
            f_store(second + i, v);
            of_first.add(m);
            of_second.add(v);
        }
        encode_expanded<C>(first, n, of_first, params, to_first);
        encode_expanded<C>(second, n, of_second, params, to_second);
    }
}

// ---- Rounded stochastically: the first moment, and the root of the second ----

// The least share of a group's largest number that E4M3 under the scales of MX never rounds to zero, even by chance.
inline constexpr float root_floor = 0x1p-16F;

// Raises numbers above zero, which might be rounded to zero, to the least that is not.
BRECCIA_INLINE void raise_to_floor(float* x, std::int64_t n, const Extent& extent) {
    const F least = f_mul(as_float(i_set(extent.most_bits())), f_set(root_floor));
    for (std::int64_t i = 0; i < n; i += lanes) {
        const F value = f_load(x + i);
        f_store(x + i, f_select(f_less(f_set(0.0F), value), f_max(value, least), value));
    }
}

template <class C>
BRECCIA_INLINE void encode_by_chance(float* x, std::int64_t n, const ScaleParams& params, std::uint32_t position,
                                     const MomentGroups& to) {
    const BlockStats stats = block_stats(x, n, false);
    if (stats.has_nan)
        for (std::int64_t i = 0; i < n; ++i)
            if (is_nan(x[i])) x[i] = std::numeric_limits<float>::quiet_NaN();
    const BlockScale s = choose_scale<C>(stats, params, 0);
    write_scale(to.scales, 0, s.stored, params.type);
    encode_stochastic<C>(x, n, s, to.key, position, to.codes, 0, false);
}

template <class C>
static void step_stochastic(const AdamWGroups& groups, const AdamWFactors& factors, const ScaleParams& params) {
    const AdamWLanes step(factors);
    const std::int64_t n = groups.group;
    alignas(64) float first[adamw_group], root[adamw_group];
    for (std::int64_t g = 0; g < groups.groups; ++g) {
        const MomentGroups to_first = group_of(groups.first, g, n, 1), to_second = group_of(groups.second, g, n, 1);
        const F first_scale = f_set(decode_table<Float8E8M0FNU>.values[*to_first.scales]);
        const F second_scale = f_set(decode_table<Float8E8M0FNU>.values[*to_second.scales]);
        Extent of_root;
        for (std::int64_t i = 0; i < n; i += lanes) {
            float* at = groups.weights + g * n + i;
            F weight = f_load(at);
            F m = f_mul(f_decode<C>(i_load_bytes(to_first.codes + i)), first_scale);
            const F old = f_mul(f_decode<C>(i_load_bytes(to_second.codes + i)), second_scale);
            F v = f_mul(old, old);
            const F kept = step.update(weight, f_load(groups.gradients + g * n + i), m, v);
            f_store(at, weight);
            f_store(first + i, m);
            f_store(root + i, kept);
            of_root.add(kept);
        }
        if (of_root.most_bits() < 0x7F80'0000) raise_to_floor(root, n, of_root);
        const std::uint32_t position = groups.position + static_cast<std::uint32_t>(g * n);
        encode_by_chance<C>(first, n, params, position, to_first);
        encode_by_chance<C>(root, n, params, position, to_second);
    }
}

static consteval AdamWKernels make_adamw_kernels() {
    AdamWKernels kernels{};
    kernels.expanded[static_cast<std::size_t>(format_of<Float8E4M3FN>)] = step_expanded<Float8E4M3FN>;
    kernels.expanded[static_cast<std::size_t>(format_of<Int8>)] = step_expanded<Int8>;
    kernels.stochastic[static_cast<std::size_t>(format_of<Float8E4M3FN>)] = step_stochastic<Float8E4M3FN>;
    return kernels;
}
