// SPDX-License-Identifier: Apache-2.0
//
// A few activations by rows of codes read in place: units of codes become numbers in registers and are multiplied
// there. A block's sum takes its scale once. Several rows at a time share the loads of the activations.

/// A row's numbers are dot products of this many rows at a time.
template <int Vectors>
inline constexpr int rows_at_once = Vectors == 1 ? single_vector_rows : 1;

/// What is known of rows when compiling.
struct BlocksAre {
    int per_unit = 1;  ///< blocks to a unit, or one to a unit or to several
    bool zeros = false;
};

template <class C, BlocksAre What, int Rows, int Vectors>
struct RowProduct {
    using Unit = CodeUnit<C>;
    using Sums = F[Rows][Vectors];
    static constexpr bool shifted = What.zeros || Unit::offset != 0;

    const InPlaceF32& g;
    Unit unit{};
    F zero_f32x16[Rows] = {};

    /// Adds the products of a unit of each row to `sums`, or begins them. Rows are `stride` apart, the next ones
    /// `next`.
    template <bool Begin>
    BRECCIA_INLINE_MEMBER void add_unit(const std::uint8_t* codes, std::int64_t stride, std::int64_t next,
                                        const float* x, Sums& sums) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            F w_f32x16[Unit::parts];
            unit.decode(codes + r * stride, w_f32x16);
            // Rows are too short for the hardware to learn: the next ones are asked for.
            prefetch(codes + r * stride + next);
            if constexpr (shifted)
#pragma GCC unroll 4
                for (int p = 0; p < Unit::parts; ++p) w_f32x16[p] = f_sub(w_f32x16[p], zero_f32x16[r]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
                for (int p = 0; p < Unit::parts; ++p) {
                    const F x_f32x16 = f_load(x + v * g.x_stride + p * part_lanes);
                    sums[r][v] = Begin && p == 0 ? f_mul(w_f32x16[p], x_f32x16)
                                                 : f_multiply_add(w_f32x16[p], x_f32x16, sums[r][v]);
                }
        }
    }

    BRECCIA_INLINE_MEMBER void read_zeros(const float* zeros) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            zero_f32x16[r] = f_set(-Unit::offset);
            if constexpr (What.zeros)
                zero_f32x16[r] = f_add(zero_f32x16[r], f_spread<What.per_unit>(zeros + r * g.scale_stride));
        }
    }

    void run(std::int64_t row) {
        const std::int64_t bytes = Unit::packed ? (g.k + 1) / 2 : g.k,
                           units = (g.k + Unit::elements - 1) / Unit::elements;
        const std::int64_t in_block = What.per_unit > 1 ? 1 : g.block >= g.k ? units : g.block / Unit::elements;
        const std::uint8_t* codes = g.codes + row * g.row_stride;
        const float* scales = g.scales + row * g.scale_stride;
        const float* zeros = What.zeros ? g.zero_points + row * g.scale_stride : nullptr;
        const float* x = g.x;
        Sums totals;
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) totals[r][v] = f_set(0.0F);
        read_zeros(zeros);
        const auto add_block = [&](Sums& sums) BRECCIA_INLINE_LAMBDA {
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const F scale_f32x16 = f_spread<What.per_unit>(scales + r * g.scale_stride);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) totals[r][v] = f_multiply_add(sums[r][v], scale_f32x16, totals[r][v]);
            }
            scales += What.per_unit;
            if constexpr (What.zeros) zeros += What.per_unit;
        };
        std::int64_t whole = bytes / Unit::bytes;
        const std::int64_t rest = bytes % Unit::bytes;
        for (; whole > 0; whole -= in_block) {
            if constexpr (What.zeros) read_zeros(zeros);
            Sums sums;
            add_unit<true>(codes, g.row_stride, Rows * g.row_stride, x, sums);
            const std::int64_t n = whole < in_block ? whole : in_block;
            for (std::int64_t i = 1; i < n; ++i) {
                codes += Unit::bytes;
                x += Unit::elements;
                add_unit<false>(codes, g.row_stride, Rows * g.row_stride, x, sums);
            }
            codes += Unit::bytes;
            x += Unit::elements;
            if (n == in_block || rest == 0) {
                add_block(sums);
                continue;
            }
            add_rest<false>(codes, rest, x, sums);
            add_block(sums);
            return finish(row, totals);
        }
        if (rest > 0) {
            if constexpr (What.zeros) read_zeros(zeros);
            Sums sums;
            add_rest<true>(codes, rest, x, sums);
            add_block(sums);
        }
        finish(row, totals);
    }

    /// The last codes of rows, filled up with others; activations are zero there.
    template <bool Begin>
    BRECCIA_INLINE_MEMBER void add_rest(const std::uint8_t* codes, std::int64_t count, const float* x, Sums& sums) {
        alignas(64) std::uint8_t last[Rows][Unit::bytes];
        for (int r = 0; r < Rows; ++r)
            for (std::int64_t i = 0; i < Unit::bytes; ++i) last[r][i] = i < count ? codes[r * g.row_stride + i] : 0;
        add_unit<Begin>(last[0], Unit::bytes, 0, x, sums);
    }

    BRECCIA_INLINE_MEMBER void finish(std::int64_t row, Sums& totals) {
        const bool nan = unit.missed_nan();
        for (int r = 0; r < Rows; ++r) {
            const bool none = nan && has_nan(row + r);
            for (int v = 0; v < Vectors; ++v)
                g.out[(row + r) * Vectors + v] = none ? float_from_bits(0x7FC0'0000) : f_sum(totals[r][v]);
        }
    }

    [[nodiscard]] bool has_nan(std::int64_t row) const {
        const std::uint8_t* codes = g.codes + row * g.row_stride;
        for (std::int64_t i = 0; i < g.k; ++i)
            if (const float value = decode_table<C>.values[codes[i]]; value != value) return true;
        return false;
    }
};

template <class C, BlocksAre What, int Vectors>
static void rows_by_vectors(const InPlaceF32& g) {
    constexpr int rows = rows_at_once<Vectors>;
    std::int64_t row = 0;
    for (; row + rows <= g.rows; row += rows) RowProduct<C, What, rows, Vectors>{g}.run(row);
    for (; row < g.rows; ++row) RowProduct<C, What, 1, Vectors>{g}.run(row);
}

template <class C, BlocksAre What>
static void rows_by_any(const InPlaceF32& g) {
    switch (g.vectors) {
        case 1: return rows_by_vectors<C, What, 1>(g);
        case 2: return rows_by_vectors<C, What, 2>(g);
        case 3: return rows_by_vectors<C, What, 3>(g);
        default: return rows_by_vectors<C, What, 4>(g);
    }
}

template <class C, bool Zeros>
static void rows_of_blocks(const InPlaceF32& g) {
    constexpr std::int64_t elements = CodeUnit<C>::elements;
    if constexpr (elements > 32)
        if (g.block < g.k && g.block == elements / 4) return rows_by_any<C, BlocksAre{4, Zeros}>(g);
    if constexpr (elements > 16)
        if (g.block < g.k && g.block == elements / 2) return rows_by_any<C, BlocksAre{2, Zeros}>(g);
    rows_by_any<C, BlocksAre{1, Zeros}>(g);
}

template <class C>
static void multiply_in_place_f32(const InPlaceF32& g) {
    if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
        if (g.zero_points != nullptr) return rows_of_blocks<C, true>(g);
    rows_of_blocks<C, false>(g);
}

template <class C>
static void arrange_f32(const ArrangeF32& a) {
    using Unit = CodeUnit<C>;
    for (std::int64_t k = 0; k < a.k; ++k)
        a.out[k / Unit::elements * Unit::elements + Unit::place(k % Unit::elements)] = a.x[k] * Unit::factor;
}

static consteval CodeKernelsF32 code_kernels_f32(std::int64_t tile_rows) {
    return {.arrange = Codecs::map([]<Codec C>() -> void (*)(const ArrangeF32&) {
                if constexpr (C::family != CodecFamily::exponent) return arrange_f32<C>;
                return nullptr;
            }),
            .product = Codecs::map([]<Codec C>() -> void (*)(const InPlaceF32&) {
                if constexpr (C::family != CodecFamily::exponent) return multiply_in_place_f32<C>;
                return nullptr;
            }),
            .decode = Codecs::map([]<Codec C>() -> void (*)(const DecodeF32&) {
                if constexpr (C::family != CodecFamily::exponent) return decode_f32<C>;
                return nullptr;
            }),
            .tile_rows = tile_rows};
}
