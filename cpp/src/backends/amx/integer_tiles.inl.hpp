// SPDX-License-Identifier: Apache-2.0
//
// Panels of integers in tiles: 16 activations by 64 of their codes in order times 16 words of 16 weight rows. Lanes of
// the sums are weight rows, as in other panels of integers, and what is done to them is the same, so that results have
// the same bits.

inline constexpr bool panel_codes_are_signed = true, packed_starts_are_words = false;
inline constexpr int panel_byte_offset = 0, panel_byte_stride = 64;
inline constexpr std::int64_t long_run = 4096, packed_run = long_run;  // steps, whose sums of bytes 32 bits hold

BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_load_si512(words));
}
#include "backends/avx512/integer_packing.inl.hpp"
#include "kernels/integer_packing.inl.hpp"

/// Steps that one product takes, and those of 32 activations that stay in the first-level cache while they meet all
/// groups of a panel.
constexpr std::int64_t tile_steps = 16, chunk_steps = 128;
constexpr std::int64_t most_groups = 16;  // whose sums wait in memory

/// Sums of all groups by all activations: tiles of [activation][weight row].
struct alignas(64) TileTotals {
    std::int32_t words[most_groups / 2][4][256];
};

// `Down`: groups of weight rows, in tiles 6 and 7. `Across`: 16 activations each, in tiles 4 and 5. The sums of group d
// by activations a are tile 2 d + a.
template <int Down, int Across>
struct IntegerTiles {
    static constexpr int down = Down, across = Across;

    /// f(tile of sums) for each.
    template <class Function>
    BRECCIA_INLINE_MEMBER static void for_sums(Function f) {
        f(Constant<0>{});
        if constexpr (Across == 2) f(Constant<1>{});
        if constexpr (Down == 2) f(Constant<2>{});
        if constexpr (Down == 2 && Across == 2) f(Constant<3>{});
    }
    /// One product each; `before(tile)` comes before it, `after(tile)` after it.
    template <class Before, class After>
    BRECCIA_INLINE_MEMBER static void step(const std::int8_t* x, const std::uint8_t* w, std::int64_t group_bytes,
                                           Before before, After after) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        before(Constant<0>{});
        _tile_dpbssd(0, 4, 6);
        after(Constant<0>{});
        if constexpr (Across == 2) {
            _tile_loadd(5, x + 1024, 64);
            before(Constant<1>{});
            _tile_dpbssd(1, 5, 6);
            after(Constant<1>{});
        }
        if constexpr (Down == 2) {
            _tile_loadd(7, w + group_bytes, 64);
            before(Constant<2>{});
            _tile_dpbssd(2, 4, 7);
            after(Constant<2>{});
        }
        if constexpr (Down == 2 && Across == 2) {
            before(Constant<3>{});
            _tile_dpbssd(3, 5, 7);
            after(Constant<3>{});
        }
    }
};

/// Asks for a part of the activations of the next chunk, which lie `bytes` after those of a step: those of pair `pair`.
BRECCIA_INLINE void prefetch_chunk(const std::int8_t* x, std::int64_t bytes, int across, std::int64_t pair,
                                   std::int64_t pairs) {
    for (std::int64_t at = pair; at < 16 * across; at += pairs) _mm_prefetch(x + bytes + at * 64, _MM_HINT_T1);
}

/// total + sums by scales of a unit, of 16 activations.
template <bool XScaled>
BRECCIA_INLINE void add_unit(float* total, const std::int32_t* sums, const float* scales, const float* x_scales) {
    const F scale_f32x16 = f_load(scales);
#pragma GCC unroll 16
    for (int a = 0; a < 16; ++a) {
        const F sum_f32x16 = _mm512_cvtepi32_ps(i_load(sums + 16 * a));
        F by_f32x16 = scale_f32x16;
        if constexpr (XScaled) by_f32x16 = f_mul(by_f32x16, f_set(x_scales[a]));
        f_store(total + 16 * a, f_multiply_add(sum_f32x16, by_f32x16, f_load(total + 16 * a)));
    }
}

/// A panel in one unit: sums stay integers until the end, and wait in memory from one chunk to the next.
template <class Tiles>
static void add_chunk(const IntegerPanel& p, const std::int8_t* x, const std::uint8_t* w, std::int64_t steps,
                      bool first, std::int64_t pair, std::int32_t (*sums)[256]) {
    const std::int64_t group_bytes = p.steps * 64;
    Tiles::for_sums([&](auto tile) BRECCIA_INLINE_LAMBDA {
        constexpr int t = decltype(tile)::value;
        first ? clear_sums<t>() : load_sums<t>(sums[t]);
    });
    const auto nothing = [](auto) BRECCIA_INLINE_LAMBDA {};
    for (std::int64_t s = 0; s < steps; s += tile_steps) {
        prefetch_chunk(x + s * 64 * Tiles::across, steps * 64 * Tiles::across, Tiles::across, pair, (p.groups + 1) / 2);
        Tiles::step(x + s * 64 * Tiles::across, w + s * 64, group_bytes, nothing, nothing);
    }
    Tiles::for_sums([&](auto tile) BRECCIA_INLINE_LAMBDA {
        constexpr int t = decltype(tile)::value;
        store_sums<t>(sums[t]);
    });
}

/// A chunk of whole units. The sums of one leave their tiles just before these take the first product of the next, and
/// are scaled while that runs.
template <class Tiles, bool XScaled>
static void add_units(const IntegerPanel& p, std::int64_t pair, std::int64_t from, std::int64_t steps,
                      float (*totals)[256]) {
    alignas(64) std::int32_t sums[4][256];
    const std::int64_t group_bytes = p.steps * 64, height = 16 * Tiles::across;
    const std::int8_t* x = p.x + from * 4 * height;
    const std::uint8_t* w = p.codes + 2 * pair * group_bytes + from * 64;
    // Of the unit whose sums leave the tiles.
    const std::int64_t first_unit = from / p.run;
    const float* scales = p.scales + 2 * pair * p.group_scales + first_unit / p.units_per_scale * 16;
    const float* x_scales = XScaled ? p.x_scales + first_unit * height : nullptr;
    std::int64_t left_of_scale = p.units_per_scale - first_unit % p.units_per_scale;
    const auto scale = [&](auto tile) BRECCIA_INLINE_LAMBDA {
        constexpr int t = decltype(tile)::value;
        tile_memory_barrier();
        add_unit<XScaled>(totals[t], sums[t], scales + t / 2 * p.group_scales,
                          XScaled ? x_scales + t % 2 * 16 : nullptr);
        tile_memory_barrier();  // read before the next sums are stored
    };
    const auto nothing = [](auto) BRECCIA_INLINE_LAMBDA {};
    for (std::int64_t done = 0; done < steps;) {
        const std::int64_t of_unit = p.run < steps - done ? p.run : steps - done;
        if (done == 0) {
            Tiles::for_sums([](auto tile) BRECCIA_INLINE_LAMBDA { clear_sums<decltype(tile)::value>(); });
            Tiles::step(x, w, group_bytes, nothing, nothing);
        } else {
            Tiles::step(
                x, w, group_bytes,
                [&](auto tile) BRECCIA_INLINE_LAMBDA {
                    constexpr int t = decltype(tile)::value;
                    store_sums<t>(sums[t]);
                    clear_sums<t>();
                },
                scale);
            if (--left_of_scale == 0) {
                left_of_scale = p.units_per_scale;
                scales += 16;
            }
            if constexpr (XScaled) x_scales += height;
        }
        for (std::int64_t s = 0; s < of_unit; s += tile_steps)
            prefetch_chunk(x + s * 4 * height, steps * 4 * height, Tiles::across, pair, (p.groups + 1) / 2);
        for (std::int64_t s = tile_steps; s < of_unit; s += tile_steps)
            Tiles::step(x + s * 4 * height, w + s * 64, group_bytes, nothing, nothing);
        done += of_unit;
        x += of_unit * 4 * height;
        w += of_unit * 64;
    }
    Tiles::for_sums([&](auto tile) BRECCIA_INLINE_LAMBDA {
        store_sums<decltype(tile)::value>(sums[decltype(tile)::value]);
        scale(tile);
    });
}

template <class Tiles, bool XScaled>
static void multiply_pair(const IntegerPanel& p, std::int64_t pair, std::int64_t from, std::int64_t steps,
                          TileTotals& totals) {
    if (p.run >= p.steps)
        add_chunk<Tiles>(p, p.x + from * 64 * Tiles::across, p.codes + (2 * pair * p.steps + from) * 64, steps,
                         from == 0, pair, totals.words[pair]);
    else
        add_units<Tiles, XScaled>(p, pair, from, steps, reinterpret_cast<float (*)[256]>(totals.words[pair]));
}

/// Sums of a group by 16 activations, to where they belong.
template <bool XScaled>
static void write_sums(const IntegerPanel& p, std::int64_t group, int first, const std::int32_t* sums) {
    const F scale_f32x16 = f_load(p.scales + group * p.group_scales);
    for (int a = 0; a < 16; ++a) {
        F by_f32x16 = scale_f32x16;
        if constexpr (XScaled) by_f32x16 = f_mul(by_f32x16, f_set(p.x_scales[first + a]));
        const F sum_f32x16 = f_multiply_add(_mm512_cvtepi32_ps(i_load(sums + 16 * a)), by_f32x16, f_set(0.0F));
        f_store(p.out + (first + a) * p.out_stride + 16 * group, sum_f32x16);
    }
}
static void write_totals(const IntegerPanel& p, std::int64_t group, int first, const std::int32_t* totals) {
    for (int a = 0; a < 16; ++a)
        i_store(reinterpret_cast<std::int32_t*>(p.out + (first + a) * p.out_stride + 16 * group),
                i_load(totals + 16 * a));
}

template <int Across, bool XScaled>
static void multiply_in_tiles(const IntegerPanel& p) {
    TileTotals totals;
    const bool one_unit = p.run >= p.steps;
    const std::int64_t pairs = (p.groups + 1) / 2;
    if (!one_unit) __builtin_memset(&totals, 0, static_cast<std::size_t>(pairs) * sizeof totals.words[0]);
    const std::int64_t chunk = one_unit ? chunk_steps : p.run < chunk_steps ? chunk_steps / p.run * p.run : p.run;
    for (std::int64_t from = 0; from < p.steps; from += chunk) {
        const std::int64_t steps = chunk < p.steps - from ? chunk : p.steps - from;
        for (std::int64_t pair = 0; pair < pairs; ++pair)
            if (2 * pair + 1 < p.groups)
                multiply_pair<IntegerTiles<2, Across>, XScaled>(p, pair, from, steps, totals);
            else
                multiply_pair<IntegerTiles<1, Across>, XScaled>(p, pair, from, steps, totals);
    }
    tile_memory_barrier();
    for (std::int64_t group = 0; group < p.groups; ++group)
        for (int a = 0; a < Across; ++a) {
            const std::int32_t* of = totals.words[group / 2][group % 2 * 2 + a];
            one_unit ? write_sums<XScaled>(p, group, 16 * a, of) : write_totals(p, group, 16 * a, of);
        }
}

static void multiply_in_tiles(const IntegerPanel& p) {
    tile_memory_barrier();
    configure_tiles();
    if (p.height == 32)
        p.x_scales != nullptr ? multiply_in_tiles<2, true>(p) : multiply_in_tiles<2, false>(p);
    else
        p.x_scales != nullptr ? multiply_in_tiles<1, true>(p) : multiply_in_tiles<1, false>(p);
    release_tiles();
}

static bool has_integer_tiles();

static consteval IntegerPanels make_integer_tiles() {
    IntegerPanels panels{.heights = {32, 16, 0},
                         .groups = most_groups,
                         .multiple = tile_steps,
                         .abreast = tile_steps,
                         .bytes = 1 << 20,
                         .supported = has_integer_tiles};
    set_each(panels.kernels, []<PanelCodec C>() { return panel_kernel<C>(multiply_in_tiles, 4); });
    return panels;
}
