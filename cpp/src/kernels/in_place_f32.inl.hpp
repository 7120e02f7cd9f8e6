// SPDX-License-Identifier: Apache-2.0
//
// A few activations by rows of codes read in place: units of codes become numbers in registers and are multiplied
// there. A block's sum takes its scale once. Several rows at a time share the loads of the activations.

/// A row's numbers are dot products of this many rows at a time.
template <int Vectors>
inline constexpr int rows_at_once = Vectors == 1 ? single_vector_rows : 1;

/// `Rows` rows at a time. A scale is of a whole unit or several, or there are two or four to a unit.
template <class Unit, int Rows, int Vectors>
struct RowProduct {
    using Sums = F[Rows][Vectors];

    const InPlaceF32& g;
    const UnitNumbers& numbers;
    std::int64_t per_unit, row_stride, scale_stride;
    Unit unit{numbers};
    Spread spread{static_cast<int>(per_unit)};
    F zero_f32x16[Rows] = {};

    /// Adds the products of a unit of each row to `sums`. Rows are `stride` apart, the next ones `next`.
    BRECCIA_INLINE_MEMBER void add_unit(const std::uint8_t* codes, std::int64_t stride, std::int64_t next,
                                        const float* x, Sums& sums) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            F w_f32x16[Unit::parts];
            unit.decode(codes + r * stride, w_f32x16);
            // Rows are too short for the hardware to learn: the next ones are asked for.
            prefetch(codes + r * stride + next);
            if constexpr (Unit::shifted)
#pragma GCC unroll 4
                for (int p = 0; p < Unit::parts; ++p) w_f32x16[p] = f_sub(w_f32x16[p], zero_f32x16[r]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
                for (int p = 0; p < Unit::parts; ++p) {
                    const F x_f32x16 = f_load(x + v * g.x_stride + p * part_lanes);
                    sums[r][v] = f_multiply_add(w_f32x16[p], x_f32x16, sums[r][v]);
                }
        }
    }

    BRECCIA_INLINE_MEMBER void read_zeros(const float* zeros) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            zero_f32x16[r] = f_set(-numbers.offset);
            if (zeros != nullptr) zero_f32x16[r] = f_add(zero_f32x16[r], spread(zeros + r * scale_stride));
        }
    }

    /// Of these rows, the sums of the first `count` are written.
    void run(std::int64_t row, int count) {
        const std::int64_t bytes = Unit::packed ? (g.k + 1) / 2 : g.k,
                           units = (g.k + Unit::elements - 1) / Unit::elements;
        const std::int64_t in_block = per_unit > 1 ? 1 : g.block >= g.k ? units : g.block / Unit::elements;
        const std::uint8_t* codes = g.codes + row * g.row_stride;
        const float* scales = g.scales + row * g.scale_stride;
        const float* zeros = Unit::shifted && g.zero_points != nullptr ? g.zero_points + row * g.scale_stride : nullptr;
        const float* x = g.x;
        Sums totals;
        clear(totals);
        if constexpr (Unit::shifted) read_zeros(zeros);
        const auto add_block = [&](Sums& sums) BRECCIA_INLINE_LAMBDA {
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const F scale_f32x16 = spread(scales + r * scale_stride);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; ++v) totals[r][v] = f_multiply_add(sums[r][v], scale_f32x16, totals[r][v]);
            }
            scales += per_unit;
            if (Unit::shifted && zeros != nullptr) zeros += per_unit;
        };
        const std::int64_t rest = bytes % Unit::bytes;
        std::int64_t stride = row_stride, next = Rows * row_stride;
        alignas(64) std::uint8_t last[Rows][Unit::bytes];
        for (std::int64_t left = units; left > 0;) {
            if (Unit::shifted && zeros != nullptr) read_zeros(zeros);
            Sums sums;
            clear(sums);
            std::int64_t n = left < in_block ? left : in_block;
            left -= n;
            const std::int64_t cut = left == 0 && rest > 0 ? 1 : 0;
            for (; n > 0; --n, codes += Unit::bytes, x += Unit::elements) {
                if (n == cut)
                    [[unlikely]] {  // the last codes of rows, filled up with others: activations are zero there
                    for (int r = 0; r < Rows; ++r)
                        for (std::int64_t i = 0; i < Unit::bytes; ++i)
                            last[r][i] = i < rest ? codes[r * row_stride + i] : 0;
                    codes = last[0];
                    stride = Unit::bytes;
                    next = 0;
                }
                add_unit(codes, stride, next, x, sums);
            }
            add_block(sums);
        }
        finish(row, count, totals);
    }

    BRECCIA_INLINE_MEMBER void clear(Sums& sums) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[r][v] = f_set(0.0F);
    }

    BRECCIA_INLINE_MEMBER void finish(std::int64_t row, int count, Sums& totals) {
        const bool nan = unit.missed_nan();
        for (int r = 0; r < count; ++r) {
            const bool none = nan && has_nan(row + r);
            for (int v = 0; v < Vectors; ++v)
                g.out[(row + r) * Vectors + v] = none ? float_from_bits(0x7FC0'0000) : f_sum(totals[r][v]);
        }
    }

    [[nodiscard]] bool has_nan(std::int64_t row) const {
        const std::uint8_t* codes = g.codes + row * g.row_stride;
        for (std::int64_t i = 0; i < g.k; ++i)
            if (const float value = numbers.values[codes[i]]; value != value) return true;
        return false;
    }
};

/// Several rows at a time. The last of them begin so early that there are as many: some are computed twice. Where all
/// rows are fewer than that, each is read as often as there should be rows, and one result is kept.
template <class Unit, int Vectors>
static void rows_by_vectors(const InPlaceF32& g, const UnitNumbers& numbers, std::int64_t per_unit) {
    constexpr int rows = rows_at_once<Vectors>;
    using Product = RowProduct<Unit, rows, Vectors>;
    const bool few = g.rows < rows;
    const std::int64_t row_stride = few ? 0 : g.row_stride, scale_stride = few ? 0 : g.scale_stride;
    for (std::int64_t row = 0; row < g.rows; row += few ? 1 : rows)
        Product{
            .g = g, .numbers = numbers, .per_unit = per_unit, .row_stride = row_stride, .scale_stride = scale_stride}
            .run(few || row + rows <= g.rows ? row : g.rows - rows, few ? 1 : rows);
}

template <class Unit>
static void multiply_units(const InPlaceF32& g, const UnitNumbers& numbers) {
    const std::int64_t per_unit = g.block < g.k && g.block < Unit::elements ? Unit::elements / g.block : 1;
    switch (g.vectors) {
        case 1: return rows_by_vectors<Unit, 1>(g, numbers, per_unit);
        case 2: return rows_by_vectors<Unit, 2>(g, numbers, per_unit);
        case 3: return rows_by_vectors<Unit, 3>(g, numbers, per_unit);
        default: return rows_by_vectors<Unit, 4>(g, numbers, per_unit);
    }
}

template <class C>
static void multiply_in_place_f32(const InPlaceF32& g) {
    using Units = UnitsOf<C>;
    if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
        if (g.zero_points != nullptr) return multiply_units<typename Units::ShiftedProduct>(g, Units::numbers);
    multiply_units<typename Units::Product>(g, Units::numbers);
}

template <class C>
static void arrange_f32(const ArrangeF32& a) {
    using Unit = UnitsOf<C>::Product;
    for (std::int64_t k = 0; k < a.k; ++k)
        a.out[k / Unit::elements * Unit::elements + Unit::place(k % Unit::elements)] =
            a.x[k] * UnitsOf<C>::numbers.factor;
}

template <class C>
concept MatrixCodec = C::family != CodecFamily::exponent;

static consteval CodeKernelsF32 code_kernels_f32(std::int64_t tile_rows) {
    CodeKernelsF32 kernels{.tile_rows = tile_rows};
    set_each(kernels.arrange, []<MatrixCodec C>() { return arrange_f32<C>; });
    set_each(kernels.product, []<MatrixCodec C>() { return multiply_in_place_f32<C>; });
    set_each(kernels.decode, []<MatrixCodec C>() { return decode_f32<C>; });
    return kernels;
}
