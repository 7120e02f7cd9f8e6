// SPDX-License-Identifier: Apache-2.0
//
// One activation by a prepared weight in integers: a row to each lane, a doubleword of its codes times the same four
// bytes of the activation's digits. In a run of doublewords every digit has sums of its own, which 32 bits hold; these
// become floats, are put together and take the scale. Of a run of few elements the third digits are seldom needed:
// those of bfloat16 numbers only where one is a hundredth (where codes are bytes a thirtieth) of its step's largest or
// less.

/// The unit of a third digit to that of a second.
constexpr float third_digit = exp2i(-8);

/// Products of `n` doublewords of each row, of at most `Run`, with `Count` digits, as the number that they stand for,
/// if the second digit's unit is 1, or that of an only one.
template <int Count, int Run, ByteReading Reading>
BRECCIA_INLINE F run_of_digits(const ByteReader<Reading>& reader, const std::uint8_t* codes, std::int64_t n,
                               const std::int8_t* digits, const std::int32_t* offsets) {
    constexpr int vectors = ByteReader<Reading>::vectors;
    // Two in turn, so that no product waits for the one before; of short runs there are others meanwhile.
    constexpr int chains = Run == 2 ? 1 : 2;
    I sums[Count][chains];
#pragma GCC unroll 3
    for (int d = 0; d < Count; ++d) {
        sums[d][0] = i_set(offsets[d * 16]);
        if constexpr (chains == 2) sums[d][1] = i_set(0);
    }
    const auto add = [&](std::int64_t j) BRECCIA_INLINE_LAMBDA {
        I bytes[vectors];
        // One stream is not enough for the hardware to keep memory busy.
        if constexpr (Count > 1) _mm_prefetch(codes + j * 64 + 8192, _MM_HINT_T0);
        reader.read(_mm512_loadu_si512(codes + j * 64), bytes);
#pragma GCC unroll 3
        for (int d = 0; d < Count; ++d)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) {
                std::int32_t four;
                __builtin_memcpy(&four, digits + d * 128 + v * 64 + j * 4, sizeof four);
                I& sum = sums[d][(vectors == 2 ? v : j) % chains];
                sum = _mm512_dpbusd_epi32(sum, bytes[v], i_set(four));
            }
    };
    if (n == Run) {
#pragma GCC unroll 16
        for (int j = 0; j < Run; ++j) add(j);
    } else {
        for (std::int64_t j = 0; j < n; j += 2) {  // of which there is a multiple of four
            add(j);
            add(j + 1);
        }
    }
    const auto of_digit = [&](int d) BRECCIA_INLINE_LAMBDA {
        if constexpr (chains == 2) return _mm512_cvtepi32_ps(i_add(sums[d][0], sums[d][1]));
        return _mm512_cvtepi32_ps(sums[d][0]);
    };
    if constexpr (Count == 1) return of_digit(0);
    const F two = f_multiply_add(of_digit(0), f_set(256.0F), of_digit(1));
    if constexpr (Count == 2) return two;
    return f_multiply_add(of_digit(2), f_set(third_digit), two);
}

/// Scales as they are read: of whatever type, or E8M0, or E4M3 without its bias, which is so small that no sum times it
/// overflows; others take the unit first.
enum class LaneScaling : std::uint8_t { any, e8m0, biased };

template <ByteReading Reading, int Run, LaneScaling Scaling>
static void integer_lane_group(const IntegerLanes& g, const ByteReader<Reading>& reader, const std::uint8_t* codes,
                               const std::byte* scales, float* out) {
    constexpr bool biased = Scaling == LaneScaling::biased;
    constexpr int lift = 40;
    const Digits& x = *g.x;
    const std::int64_t doublewords = g.quads * 4;
    F total_f32x16 = f_set(0.0F), scale_f32x16 = f_set(0.0F);
    [[maybe_unused]] std::int64_t block = 0, left = 0;
    for (std::int64_t s = 0; s * 16 < doublewords; ++s) {
        const DigitStep& step = x.steps[s];
        const unsigned thirds = step.thirds;
        const int further = step.further;
        // So small are further digits that they do not come through a scale without its bias.
        const bool lifted = biased && further != 0;
        const F unit_f32x16 = f_set(step.units[0] * (lifted ? exp2i(8 - lift) : exp2i(8)));
        const F small_unit_f32x16 = f_set(further != 0 ? step.smaller * third_digit : 0.0F);
        F step_f32x16 = f_set(0.0F);
        const auto one_run = [&](std::int64_t j, std::int64_t n) BRECCIA_INLINE_LAMBDA {
            const std::uint8_t* at = codes + (s * 16 + j) * 64;
            const std::int8_t* digits = step.digits[0] + j * 4;
            const std::int32_t* offsets = step.runs[0] + j / Run;
            F sum = (thirds >> j & ((1U << Run) - 1)) == 0 ? run_of_digits<2, Run>(reader, at, n, digits, offsets)
                                                           : run_of_digits<3, Run>(reader, at, n, digits, offsets);
            if (further != 0) [[unlikely]] {
                F small = f_set(0.0F);
                for (std::int64_t d = 3; d < 3 + further; ++d)
                    small = f_multiply_add(small, f_set(256.0F),
                                           run_of_digits<1, Run>(reader, at, n, digits + d * 128, offsets + d * 16));
                sum = f_multiply_add(small, small_unit_f32x16, sum);
                if constexpr (biased) sum = f_mul(sum, f_set(exp2i(lift)));
            }
            if constexpr (Scaling != LaneScaling::any) {  // a run is a block: what of it is left of a step is known
                constexpr ScaleType type = biased ? ScaleType::e4m3 : ScaleType::e8m0;
                scale_f32x16 = lane_scale_bits<type>(scales, s * (16 / Run) + j / Run);
            } else {
                if (left == 0) {
                    scale_f32x16 = lane_scales(scales, g.scale_type, block);
                    block += g.scale_step;
                    left = g.runs_per_block;
                }
                --left;
            }
            if (!biased) sum = f_mul(sum, unit_f32x16);
            step_f32x16 = f_multiply_add(sum, scale_f32x16, step_f32x16);
        };
        const std::int64_t there = doublewords - s * 16;
        if (there >= 16)
#pragma GCC unroll 8
            for (std::int64_t j = 0; j < 16; j += Run) one_run(j, Run);
        else
            for (std::int64_t j = 0; j < there; j += Run) one_run(j, there - j < Run ? there - j : Run);
        total_f32x16 = f_multiply_add(step_f32x16, biased ? unit_f32x16 : f_set(1.0F), total_f32x16);
    }
    f_store(out, f_mul(total_f32x16, f_set((biased ? e4m3_bias : 1.0F) / x.bias)));
}

template <ByteReading Reading, int Run, LaneScaling Scaling = LaneScaling::any>
static void integer_lane_groups(const IntegerLanes& g, const CodeBytes& of_codes) {
    const ByteReader<Reading> reader(of_codes);
    for (std::int64_t i = 0; i < g.groups; ++i)
        integer_lane_group<Reading, Run, Scaling>(g, reader, g.codes + i * g.quads * 256,
                                                  g.scales + i * g.group_scale_stride, g.out + i * 16);
}

template <class C>
static void integer_lanes(const IntegerLanes& g) {
    constexpr ByteReading reading = byte_reading<C>;
    constexpr const CodeBytes& of_codes = code_bytes<C>;
    // Blocks of the standards: of 16 elements, a doubleword of packed codes being 8, or of 32.
    constexpr int mx_run = C::bits == 4 ? 4 : 8;
    if constexpr (std::is_same_v<C, Float4E2M1FN>)
        if (g.run == 2 && g.scale_type == ScaleType::e4m3 && g.x->bias != 1)
            return integer_lane_groups<reading, 2, LaneScaling::biased>(g, of_codes);
    if constexpr (C::family == CodecFamily::minifloat)
        if (g.run == mx_run && g.scale_type == ScaleType::e8m0)
            return integer_lane_groups<reading, mx_run, LaneScaling::e8m0>(g, of_codes);
    switch (g.run) {
        case 2: return integer_lane_groups<reading, 2>(g, of_codes);
        case 4: return integer_lane_groups<reading, 4>(g, of_codes);
        case 8: return integer_lane_groups<reading, 8>(g, of_codes);
        default: return integer_lane_groups<reading, 16>(g, of_codes);
    }
}
