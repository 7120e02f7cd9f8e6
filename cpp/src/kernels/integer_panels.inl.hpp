// SPDX-License-Identifier: Apache-2.0
//
// Many activations that are INT8 codes by a weight whose codes are small integers. Sixteen weight rows lie side by
// side, a word of 32 bits of each; it meets the same elements of an activation, which are broadcast. So the sum of a
// block is a lane, becomes a float once and takes its row's scale: nothing is added across lanes. Included after the
// backend's PanelWords and what is named there.

/// How codes become integers.
struct PanelCodes {
    alignas(16) std::uint8_t integer[16];  ///< of packed codes
    float unit;
    PanelIntegers integers;
};

template <class C, bool HasZero>
inline constexpr PanelCodes panel_codes = [] {
    constexpr float unit = C::decode(1);
    PanelCodes of{.integer = {}, .unit = unit, .integers = {}};
    if constexpr (C::bits == 4) {
        // Values, less their zero points too, are -15 … 15.
        static_assert(-C::lowest <= 15 * unit && C::max <= 15 * unit);
        const int offset = HasZero ? 15 : static_cast<int>(-C::lowest / unit);
        for (int i = 0; i < 16; ++i) {
            const auto value = static_cast<int>(C::decode(static_cast<std::uint8_t>(i)) / unit);
            of.integer[i] = static_cast<std::uint8_t>(value + offset);
        }
        of.integers = {.offset = offset, .starts_are_words = packed_starts_are_words, .most_run = packed_run};
    } else {
        of.integers = {.offset = panel_byte_offset, .most_run = long_run};
    }
    return of;
}();

/// Bytes ahead of a row's codes that are asked for: sixteen streams are too many for the processor to follow.
inline constexpr std::int64_t panel_ahead = 512;

/// Sixteen rows of packed codes, 64 bytes of each at a time.
template <bool HasZero>
static void pack_packed_integers(const PackIntegers& p, const PanelCodes& of) {
    const CodeRows& w = p.w;
    const std::int64_t bytes = (w.k + 1) / 2, block_words = w.block >= w.k ? bytes : w.block / 8;
    alignas(64) std::uint8_t last[16][64], zeros[64];
    alignas(64) std::uint32_t turned[16 * 16];
    const std::uint8_t* rows[16];
    const std::uint8_t* zero_points[16];
    for (int r = 0; r < 16; ++r) {
        const std::int64_t row = r < w.rows ? r : w.rows - 1;
        rows[r] = w.codes + row * w.row_stride;
        if constexpr (HasZero) zero_points[r] = w.zero_points + w.scale_row_of(row) * w.zero_row_stride;
    }
    std::uint8_t* out = p.out;
    std::int64_t zeros_of = -1;
    for (std::int64_t at = 0; at < bytes; at += 64) {
        if (at + 64 > bytes) {
            for (int r = 0; r < 16; ++r) {
                for (std::int64_t i = 0; i < 64; ++i) last[r][i] = at + i < bytes ? rows[r][i] : 0;
                rows[r] = last[r];
            }
        }
        transpose_words(rows, turned);
        for (const std::uint8_t*& row : rows) {
            row += 64;
            prefetch(row + panel_ahead);
        }
        for (int j = 0; j < 16; ++j, out += 128) {
            if constexpr (HasZero) {
                const std::int64_t block = (at / 4 + j) / block_words;
                if (block != zeros_of && (at / 4 + j) * 8 < w.k) {
                    zeros_of = block;
                    for (int i = 0; i < 64; ++i) zeros[i] = zero_points[i / 4][block];
                }
            }
            unpack_words<HasZero>(turned + j * 16, of.integer, zeros, out);
        }
    }
}

/// Sixteen rows of INT8 codes.
static void pack_byte_integers(const PackIntegers& p) {
    const CodeRows& w = p.w;
    alignas(64) std::uint8_t last[16][64];
    alignas(64) std::uint32_t turned[16 * 16];
    const std::uint8_t* rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = w.codes + (r < w.rows ? r : w.rows - 1) * w.row_stride;
    std::uint8_t* out = p.out;
    for (std::int64_t at = 0; at < w.k; at += 64) {
        if (at + 64 > w.k) {
            for (int r = 0; r < 16; ++r) {
                for (std::int64_t i = 0; i < 64; ++i) last[r][i] = at + i < w.k ? rows[r][i] : 0;
                rows[r] = last[r];
            }
        }
        transpose_words(rows, turned);
        for (const std::uint8_t*& row : rows) {
            row += 64;
            prefetch(row + panel_ahead);
        }
        for (int j = 0; j < 16; ++j, out += panel_byte_stride) put_bytes(turned + j * 16, out);
    }
}

/// A unit's sums at a time: all of them, and the totals, in registers where there are enough.
template <class Words, int Height, bool XScaled>
static void panel_of(const IntegerPanel& p) {
    constexpr int vectors = Words::vectors, step = Words::steps_at_once, x_bytes = 4 * Height;
    typename Words::Floats total[vectors][Height];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 12
        for (int a = 0; a < Height; ++a) total[v][a] = Words::none();
    const std::uint8_t* codes = p.codes;
    const std::int8_t* x = p.x;
    const float* scales = p.scales;
    const std::int32_t* starts = p.starts;
    [[maybe_unused]] const float* x_scales = p.x_scales;
    std::int64_t left_of_scale = p.units_per_scale;
    for (std::int64_t left = p.steps; left > 0; left -= p.run) {
        typename Words::Sums sums[vectors][Height];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 12
            for (int a = 0; a < Height; ++a) sums[v][a] = Words::begin(starts + a);
        for (std::int64_t s = p.run < left ? p.run : left; s > 0; s -= step) {
#pragma GCC unroll 8
            for (int i = 0; i < step; ++i) {
                typename Words::Codes of[vectors];
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) of[v] = Words::read(codes + i * 64, v);
#pragma GCC unroll 12
                for (int a = 0; a < Height; ++a) {
                    const auto by = Words::broadcast(x + i * x_bytes + a * 4);
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) Words::add(sums[v][a], of[v], by);
                }
            }
            codes += step * 64;
            x += step * x_bytes;
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const auto scale = Words::load(scales, v);
#pragma GCC unroll 12
            for (int a = 0; a < Height; ++a) {
                const auto sum = Words::end(sums[v][a], starts + a);
                if constexpr (XScaled)
                    Words::multiply_add(total[v][a], sum, Words::times(scale, x_scales + a));
                else
                    Words::multiply_add(total[v][a], sum, scale);
            }
        }
        starts += Height;
        if constexpr (XScaled) x_scales += Height;
        if (--left_of_scale == 0) {
            left_of_scale = p.units_per_scale;
            scales += 16;
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 12
        for (int a = 0; a < Height; ++a) Words::store(p.out + a * p.out_stride, v, total[v][a]);
}

template <class Words, int Height>
static void panel_of(const IntegerPanel& p) {
    if (p.x_scales != nullptr) return panel_of<Words, Height, true>(p);
    panel_of<Words, Height, false>(p);
}

template <class Words>
static void multiply_panel(const IntegerPanel& p) {
    if constexpr (panel_heights[1] != 0) {
        if (p.height == panel_heights[0]) return panel_of<Words, panel_heights[0]>(p);
        if (p.height == panel_heights[1]) return panel_of<Words, panel_heights[1]>(p);
        return panel_of<Words, panel_heights[2]>(p);
    } else {
        panel_of<Words, panel_heights[0]>(p);
    }
}

template <class C>
static void pack_integers(const PackIntegers& p) {
    if constexpr (C::bits == 8)
        pack_byte_integers(p);
    else if (p.w.zero_points != nullptr)
        pack_packed_integers<true>(p, panel_codes<C, true>);
    else
        pack_packed_integers<false>(p, panel_codes<C, false>);
}

static consteval void add_integer_panels(IntegerKernels& kernels) {
    kernels.panels = Codecs::map([]<Codec C>() -> IntegerPanelKernel {
        if constexpr (C::bits == 4 || std::is_same_v<C, Int8>) {
            constexpr bool packed = C::bits == 4;
            using Words = std::conditional_t<packed, NibblePanelWords, BytePanelWords>;
            return {.pack = pack_integers<C>,
                    .multiply = multiply_panel<Words>,
                    .elements = packed ? 4 : panel_byte_elements,
                    .unit = panel_codes<C, false>.unit,
                    .plain = panel_codes<C, false>.integers,
                    .with_zero_points = panel_codes<C, true>.integers};
        } else {
            return {};
        }
    });
    kernels.heights = panel_heights;
}
