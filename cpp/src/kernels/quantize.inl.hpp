// SPDX-License-Identifier: Apache-2.0
//
// One block at a time: its statistics, its scale, its codes.

static BlockStats block_stats(const float* x, std::int64_t n, bool range) {
    I amax_i32x16 = i_set(0);
    const I abs_mask = i_set(0x7FFF'FFFF);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load(x + i)), abs_mask));
    if (i < n) amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load_n(x + i, n - i)), abs_mask));
    BlockStats stats;
    stats.amax_bits = static_cast<std::uint32_t>(i_max_lane(amax_i32x16));
    const bool finite = stats.amax_bits < f32_infinity_bits;
    if (finite && !range) return stats;
    if (finite) {
        F min_f32x16 = f_set(0.0F), max_f32x16 = f_set(0.0F);
        for (i = 0; i + lanes <= n; i += lanes) {
            min_f32x16 = f_min(min_f32x16, f_load(x + i));
            max_f32x16 = f_max(max_f32x16, f_load(x + i));
        }
        if (i < n) {
            min_f32x16 = f_min(min_f32x16, f_load_n(x + i, n - i));
            max_f32x16 = f_max(max_f32x16, f_load_n(x + i, n - i));
        }
        stats.min = -f_max_lane(f_sub(f_set(0.0F), min_f32x16));
        stats.max = f_max_lane(max_f32x16);
        return stats;
    }
    // Infinities and NaNs do not count: a neighbour of theirs keeps its precision.
    stats.amax_bits = 0;
    for (i = 0; i < n; ++i) {
        const std::uint32_t magnitude = bits_of(x[i]) & f32_abs_mask;
        if (magnitude > f32_infinity_bits) stats.has_nan = true;
        if (magnitude == f32_infinity_bits) stats.has_infinity = true;
        if (magnitude >= f32_infinity_bits) continue;
        if (magnitude > stats.amax_bits) stats.amax_bits = magnitude;
        if (x[i] < stats.min) stats.min = x[i];
        if (x[i] > stats.max) stats.max = x[i];
    }
    return stats;
}

// Largest magnitudes of the blocks a row passes through, kept lane by lane so that rows add up without a reduction.
static void fold_amax(const float* x, std::int64_t n, std::int64_t block, std::int32_t* amax) {
    const I abs_mask = i_set(0x7FFF'FFFF);
    for (std::int64_t begin = 0; begin < n; begin += block, amax += lanes) {
        const std::int64_t end = begin + block < n ? begin + block : n;
        I amax_i32x16 = i_load(amax);
        std::int64_t i = begin;
        for (; i + lanes <= end; i += lanes) amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load(x + i)), abs_mask));
        if (i < end) amax_i32x16 = i_max(amax_i32x16, i_and(as_bits(f_load_n(x + i, end - i)), abs_mask));
        i_store(amax, amax_i32x16);
    }
}

/// Scale `i` of a row of them, at any address.
static inline void write_scale(void* scales, std::int64_t i, std::uint32_t stored, ScaleType type) {
    auto* bytes = static_cast<std::uint8_t*>(scales);
    if (is_coded(type)) {
        bytes[i] = static_cast<std::uint8_t>(stored);
    } else if (type == ScaleType::float32) {
        __builtin_memcpy(bytes + i * 4, &stored, 4);
    } else {
        const auto half = static_cast<std::uint16_t>(stored);
        __builtin_memcpy(bytes + i * 2, &half, 2);
    }
}

template <class C>
static inline BlockScale search_scale(const float* x, std::int64_t n, const BlockStats& stats, const ScaleParams& p) {
    BlockScale best = choose_scale<C>(stats, p, 0);
    if (p.search == ScaleSearch::amax || stats.has_nan || stats.has_infinity || stats.amax_bits == 0) return best;
    float best_error = squared_error<C>(x, n, best);
    const int count = candidate_count<C>(p);
    for (int candidate = 1; candidate < count; ++candidate) {
        const BlockScale other = choose_scale<C>(stats, p, candidate);
        const float error = squared_error<C>(x, n, other);
        if (error < best_error) {
            best_error = error;
            best = other;
        }
    }
    return best;
}

template <class C>
static inline void quantize_block(const QuantizeRow& row, std::int64_t i) {
    const float* x = row.x + i * row.block;
    const BlockStats stats = block_stats(x, row.block, row.params.needs_range());
    const BlockScale s = search_scale<C>(x, row.block, stats, row.params);
    write_scale(row.scales, i, s.stored, row.params.type);
    if (row.zero_points != nullptr) row.zero_points[i] = static_cast<std::uint8_t>(static_cast<int>(s.zero_point));
    encode_run<C>(x, row.block, s, row.codes, i * row.block, C::bits == 4);
}
