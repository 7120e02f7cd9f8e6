// SPDX-License-Identifier: Apache-2.0
//
// Up to sixteen blocks at a time: their amaxes, scales (group_scales.inl.hpp) and codes. Bytes equal those of one block
// at a time; groups with anything unusual in them (specials, zeros, extreme magnitudes) are left to that.

static inline bool can_group(const QuantizeRow& row) {
    constexpr std::int64_t longest = 256;  // the transposed group stays in the first-level cache
    return has_groups(row.params.rule) && row.block % lanes == 0 && row.block <= longest;
}

BRECCIA_INLINE void write_scales(void* scales, std::int64_t first, std::int64_t count, I stored, ScaleType type) {
    if (is_coded(type)) {
        auto* bytes = static_cast<std::uint8_t*>(scales) + first;
        return count == lanes ? i_store_bytes(bytes, stored) : i_store_bytes_n(bytes, stored, count);
    }
    alignas(64) std::int32_t bits[lanes];
    i_store(bits, stored);
    for (std::int64_t i = 0; i < count; ++i) write_scale(scales, first + i, static_cast<std::uint32_t>(bits[i]), type);
}

// What the blocks of a group are multiplied or divided by, spread out from memory a block at a time.
template <class Product>
struct GroupProducts {
    const float* factor;
    BRECCIA_INLINE_MEMBER Product operator[](std::int64_t block) const { return {f_set(factor[block])}; }
    BRECCIA_INLINE_MEMBER void set(BlockScale& s, std::int64_t block) const {
        s.multiply = true;
        s.factor = factor[block] * Product::unit;
    }
};
using GroupMultiply = GroupProducts<Multiply>;
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
    BRECCIA_INLINE_MEMBER void set(BlockScale& s, std::int64_t block) const {
        s.fast_division = true;
        s.factor = divisor[block], s.high = high[block], s.low = low[block];
    }
};

// What comes next is fetched while codes are computed: the pass for amax would wait for memory.
BRECCIA_INLINE void prefetch_ahead(const float* x) {
    constexpr std::int64_t distance = 16384, line = 64;
    const auto* p = reinterpret_cast<const std::uint8_t*>(x) + distance;
    for (std::int64_t at = 0; at < wide * static_cast<std::int64_t>(sizeof(float)); at += line)
        __builtin_prefetch(p + at);
}

// Four times the factor: see b_store_quarters.
struct Quarters : Multiply {
    static constexpr float unit = 0.25F;
};
using GroupQuarters = GroupProducts<Quarters>;

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

// The codes of up to 16 blocks: 64 values at a time, which are several blocks or a part of one. What is left is encoded
// a block at a time.
template <class C, bool Saturate, class Scales>
static void encode_group(const float* x, std::int64_t block, std::int64_t count, std::uint8_t* codes,
                         const Scales& scales) {
    constexpr std::int64_t wide_bytes = C::bits == 4 ? wide / 2 : wide;
    const std::int64_t at_once = block == wide / 4 ? 4 : block == wide / 2 ? 2 : block % wide == 0 ? 1 : 0;
    const std::int64_t span = block < wide ? wide : block;
    std::int64_t b = 0;
    for (; at_once > 0 && b + at_once <= count; b += at_once) {
        const auto s0 = scales[b], s1 = scales[b + at_once / 4], s2 = scales[b + at_once / 2],
                   s3 = scales[b + at_once - 1];
        for (std::int64_t k = 0; k < span; k += wide, x += wide, codes += wide_bytes)
            encode_wide_to<C, Saturate>(codes, x, s0, s1, s2, s3);
    }
    BlockScale s;
    s.all_finite = true;
    for (; b < count; ++b, x += block, codes += block * wide_bytes / wide) {
        scales.set(s, b);
        encode_run<C>(x, block, s, codes, 0, C::bits == 4);
    }
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
    bool moderate, saturate;
};

// Up to 16 blocks of a row.
struct Group {
    std::int64_t first, count;
};

BRECCIA_OUT_OF_LINE void measure_group(const QuantizeRow& row, Group g, GroupFactors& group) {
    if (row.amax_bits != nullptr && g.count == lanes) return i_store(group.amax_bits, i_load(row.amax_bits + g.first));
    const float* x = row.x + g.first * row.block;
    i_store(group.amax_bits, g.count == lanes ? group_amax(x, row.block, lanes) : group_amax(x, row.block, g.count));
}

using SearchGroup = GroupScale (*)(const float* x, std::int64_t block, I amax_bits, const ScaleParams& p);

// Scales of a group, whose amax_bits are known; nothing is written if they are not moderate.
BRECCIA_OUT_OF_LINE void choose_group(const QuantizeRow& row, Group g, const ScaleFormat& format, SearchGroup search,
                                      GroupFactors& group) {
    const I amax_bits = i_load(group.amax_bits);
    group.moderate = moderate(amax_bits, row.params.type);
    if (!group.moderate) return;
    const GroupScale s = row.params.search == ScaleSearch::amax
                             ? scale_of_amax<SixteenLanes>(amax_bits, row.params, format, 0)
                             : search(row.x + g.first * row.block, row.block, amax_bits, row.params);
    group.saturate = may_saturate(s.stored, row.params, format);
    write_scales(row.scales, g.first, g.count, s.stored, row.params.type);
    f_store(group.factor, s.factor);
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

// Codes of integers are made by division alone: no rule that multiplies has groups of them.
template <class C>
BRECCIA_INLINE void encode_scaled(const QuantizeRow& row, Group g, GroupFactors& group) {
    if constexpr (C::family == CodecFamily::minifloat)
        if (multiplies(row.params.rule)) return encode_products<C>(row, g, group);
    encode_group<C>(row, g, group.saturate, GroupDivide(f_load(group.factor)));
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
        each([&](Group g, GroupFactors& f)
                 BRECCIA_INLINE_LAMBDA { choose_group(row, g, scale_format<C>, search_group<C>, f); });
        each([&](Group g, GroupFactors& f) BRECCIA_INLINE_LAMBDA {
            if (!f.moderate)
                for (std::int64_t b = g.first; b < g.first + g.count; ++b) quantize_block<C>(row, b);
            else
                encode_scaled<C>(row, g, f);
        });
    }
    return blocks;
}

template <class C>
static void quantize_row(const QuantizeRow& row) {
    std::int64_t i = 0;
    if (can_group(row)) i = quantize_groups<C>(row);
    for (; i < row.blocks; ++i) quantize_block<C>(row, i);
}
