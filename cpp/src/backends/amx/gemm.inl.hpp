// SPDX-License-Identifier: Apache-2.0
//
// The bfloat16 panel product in tiles: 16 weight rows by 32 k in their own order times 16 pairs of k by 16 activations.
// A block's sums go through memory to be scaled. They leave their tiles one by one, each just before it takes the first
// product of the next block, and are scaled a few rows at a time between the products that follow.

// Tile numbers must be literals. Sums: 0 ... 3. Weights: 4, 5 (and 3 where tiles are one abreast). Activations: 6, 7.

/// So much of K at a time keeps three terms of 32 activations in the first-level cache.
constexpr std::int64_t k_of_terms = panel_k / 2;

/// What a panel's product reads once, to be loaded with a hint not to displace the rest from the first-level cache (30
/// to 27 cycles a product). Weights meet each term of the activations; where these all fit, nothing is read once.
enum class ReadOnce : std::uint8_t { weights, activations, nothing };

/// Sums of one block on their way to c.
struct TileSums {
    float* c;
    const float* w_scales;
    const float* x_scales;
};

/// Rows [first, first + Count) of a block's sums, times their scales, added to c.
template <class Tiles, bool XScales, int Count>
BRECCIA_INLINE void add_scaled(const TileSums& t, const float* sums, int first) {
    F x_scale_f32x16[Tiles::across];  // read once: the compiler cannot know that c is elsewhere
    if constexpr (XScales)
#pragma GCC unroll 2
        for (int v = 0; v < Tiles::across; ++v) x_scale_f32x16[v] = f_load(t.x_scales + 16 * v);
#pragma GCC unroll 6
    for (int n = first; n < first + Count; ++n) {
        const F w_scale_f32x16 = f_set(t.w_scales[n]);
#pragma GCC unroll 2
        for (int v = 0; v < Tiles::across; ++v) {
            F scale_f32x16 = w_scale_f32x16;
            if constexpr (XScales) scale_f32x16 = f_mul(scale_f32x16, x_scale_f32x16[v]);
            float* c = t.c + (n * Tiles::across + v) * 16;
            const F sum = f_load(sums + ((n / 16 * Tiles::across + v) * 16 + n % 16) * 16);
            f_store(c, f_multiply_add(sum, scale_f32x16, f_load(c)));
        }
    }
}

template <int Count>
BRECCIA_INLINE void store_all_sums(float* to) {
    for_constants<Count>(
        [&](auto tile) BRECCIA_INLINE_LAMBDA { store_sums<decltype(tile)::value>(to + decltype(tile)::value * 256); });
}

// 32 rows by 32 activations: four products for four loads. Each product is one of a step's slots.
struct Tiles2x2 {
    static constexpr int down = 2, across = 2, slots = 4;

    /// 32 k of `Terms` terms, the last of them first. `First`: of a block, which lets the sums of the one before go.
    template <bool First, int Terms, ReadOnce Once, class Between>
    BRECCIA_INLINE void step(const std::uint16_t* w, const std::uint16_t* x, std::int64_t term_stride, float* sums,
                             Between between) {
        constexpr std::int64_t w_bytes = panel_stride_bf16 * 2, x_bytes = 128;
        constexpr bool w_once = Once == ReadOnce::weights, x_once = Once == ReadOnce::activations;
        for_constants<Terms>([&](auto constant) BRECCIA_INLINE_LAMBDA {
            constexpr int done = decltype(constant)::value, slot = done * slots;
            constexpr bool load_w = done == 0, begin = First && done == 0;
            const std::uint16_t* x_term = x + (Terms - 1 - done) * term_stride;
            if constexpr (x_once)
                _tile_stream_loadd(6, x_term, x_bytes);
            else
                _tile_loadd(6, x_term, x_bytes);
            if constexpr (load_w && w_once)
                _tile_stream_loadd(4, w, w_bytes);
            else if constexpr (load_w)
                _tile_loadd(4, w, w_bytes);
            begin_sums<begin, 0>(sums);
            _tile_dpbf16ps(0, 4, 6);
            between(Constant<slot>{});
            if constexpr (x_once)
                _tile_stream_loadd(7, x_term + 32, x_bytes);
            else
                _tile_loadd(7, x_term + 32, x_bytes);
            begin_sums<begin, 1>(sums + 256);
            _tile_dpbf16ps(1, 4, 7);
            between(Constant<slot + 1>{});
            if constexpr (load_w && w_once)
                _tile_stream_loadd(5, w + 16 * panel_stride_bf16, w_bytes);
            else if constexpr (load_w)
                _tile_loadd(5, w + 16 * panel_stride_bf16, w_bytes);
            begin_sums<begin, 2>(sums + 512);
            _tile_dpbf16ps(2, 5, 6);
            between(Constant<slot + 2>{});
            begin_sums<begin, 3>(sums + 768);
            _tile_dpbf16ps(3, 5, 7);
            between(Constant<slot + 3>{});
        });
    }
};

// 48 rows by 16 activations.
struct Tiles3x1 {
    static constexpr int down = 3, across = 1, slots = 3;

    template <bool First, int Terms, ReadOnce, class Between>
    BRECCIA_INLINE void step(const std::uint16_t* w, const std::uint16_t* x, std::int64_t, float* sums,
                             Between between) {
        static_assert(Terms == 1);
        constexpr std::int64_t w_bytes = panel_stride_bf16 * 2, x_bytes = 64;
        _tile_loadd(6, x, x_bytes);
        _tile_loadd(3, w, w_bytes);
        begin_sums<First, 0>(sums);
        _tile_dpbf16ps(0, 3, 6);
        between(Constant<0>{});
        _tile_loadd(4, w + 16 * panel_stride_bf16, w_bytes);
        begin_sums<First, 1>(sums + 256);
        _tile_dpbf16ps(1, 4, 6);
        between(Constant<1>{});
        _tile_loadd(5, w + 32 * panel_stride_bf16, w_bytes);
        begin_sums<First, 2>(sums + 512);
        _tile_dpbf16ps(2, 5, 6);
        between(Constant<2>{});
    }
};

/// Has a part of the codes of the next panel brought to the second-level cache: rows of share `part` of `parts`.
BRECCIA_INLINE void prefetch_next(const GemmBF16& g, std::int64_t part, std::int64_t parts) {
    if (g.next == nullptr) return;
    for (std::int64_t r = g.next_rows * part / parts; r < g.next_rows * (part + 1) / parts; ++r)
        for (std::int64_t at = 0; at < g.next_bytes; at += 64)
            _mm_prefetch(g.next + r * g.next_stride + at, _MM_HINT_T1);
}

/// `AtOnce`: so many of the smallest terms meet a tile of weights together, which is loaded less often for that. With
/// the largest among them it would be quicker by another 4 to 6 %, but would be rounded with every product of theirs.
template <class Tiles, bool XScales, int AtOnce, ReadOnce Once>
static void gemm_tiles(const GemmBF16& g) {
    constexpr int rows = 16 * Tiles::down, width = 16 * Tiles::across, slots = AtOnce * Tiles::slots;
    // Scaling starts a step after the sums have left, and is spread over the slots of three.
    constexpr int spread_steps = 4, rows_per_slot = (rows + 3 * slots - 1) / (3 * slots);
    alignas(64) float sums[rows * width], nowhere[rows * width] = {};
    static constexpr float none[rows] = {};
    TileSums pending{.c = nowhere, .w_scales = none, .x_scales = none};
    const auto idle = [](auto) {};
    const std::int64_t parts = g.panels * (g.rows / rows);
    // A few lines at a time of the activations that the next panel of weights meets.
    const char *next_x = reinterpret_cast<const char*>(g.next_x), *next_x_end = next_x + g.next_x_bytes;
    const std::int64_t steps_in_all = parts * (g.terms - AtOnce + 1) * (g.pairs / 16);
    const std::int64_t next_x_lines = (g.next_x_bytes / 64 + steps_in_all - 1) / steps_in_all;
    for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t panel = part / (g.rows / rows), row = part % (g.rows / rows) * rows;
        prefetch_next(g, part, parts);
        const std::uint16_t* w = g.w + row * panel_stride_bf16;
        const std::uint16_t* x = g.x + panel * g.x_panel_stride;
        std::int64_t block = 0;
        for (std::int64_t done = 0; done < g.pairs; ++block) {
            const std::int64_t left = g.pairs - done, pairs = left < g.block_pairs ? left : g.block_pairs;
            const std::int64_t steps = pairs / 16;
            // The smallest terms first: their sum is still small when it is rounded.
            const std::uint16_t* x_term = x + (g.terms - AtOnce) * g.term_stride;
            const auto step = [&]<bool First, int Terms>(std::int64_t s, auto between) BRECCIA_INLINE_LAMBDA {
                Tiles::template step<First, Terms, Once>(w + s * 32, x_term + s * 32 * width, g.term_stride, sums,
                                                         between);
                for (std::int64_t i = 0; i < next_x_lines && next_x < next_x_end; ++i, next_x += 64)
                    _mm_prefetch(next_x, _MM_HINT_T1);
            };
            std::int64_t s = 0;
            if (steps >= spread_steps) {
                for_constants<spread_steps>([&](auto constant) BRECCIA_INLINE_LAMBDA {
                    constexpr int at = decltype(constant)::value;
                    step.template operator()<at == 0, AtOnce>(at, [&](auto slot) BRECCIA_INLINE_LAMBDA {
                        constexpr int first = ((at - 1) * slots + decltype(slot)::value) * rows_per_slot;
                        constexpr int count = first + rows_per_slot <= rows ? rows_per_slot : rows - first;
                        if constexpr (at > 0 && count > 0) add_scaled<Tiles, XScales, count>(pending, sums, first);
                    });
                });
                s = spread_steps;
            } else {
                step.template operator()<true, AtOnce>(0, idle);
                for (int n = 0; n < rows; n += 4) add_scaled<Tiles, XScales, 4>(pending, sums, n);
                s = 1;
            }
            for (; s < steps; ++s) step.template operator()<false, AtOnce>(s, idle);
            for (std::int64_t term = g.terms - AtOnce; term > 0; --term) {
                x_term -= g.term_stride;
                for (s = 0; s < steps; ++s) step.template operator()<false, 1>(s, idle);
            }
            pending = {.c = g.c + panel * g.c_panel_stride + row * width,
                       .w_scales = g.w_scales + block * g.w_scale_stride + row,
                       .x_scales = XScales ? g.x_scales + panel * g.x_scale_panel_stride + block * width : none};
            done += pairs;
            w += 2 * pairs;
            x += 2 * pairs * width;
        }
    }
    store_all_sums<Tiles::down * Tiles::across>(sums);
    for (int n = 0; n < rows; n += 4) add_scaled<Tiles, XScales, 4>(pending, sums, n);
}

// 16 rows by 16 activations, for weights that are decoded just before. A product takes three times as long to finish as
// to begin: each tile of sums takes two steps of a block at most, and four tiles are on their way.
static void gemm_tile_rows(const GemmBF16& g) {
    constexpr std::int64_t w_bytes = panel_stride_bf16 * 2, x_bytes = 64;
    constexpr int tiles = 4, most_steps = 2;
    alignas(64) float sums[tiles][256];
    const std::int64_t block_steps = g.block_pairs / 16, all_steps = g.pairs / 16;
    for (std::int64_t row = 0; row < g.rows; row += 16) {
        const std::uint16_t* w = g.w + row * panel_stride_bf16;
        float* c = g.c + row * 16;
        for (std::int64_t step = 0; step < all_steps;) {
            std::int64_t blocks[tiles];
            int used = 0;
            for_constants<tiles>([&](auto constant) BRECCIA_INLINE_LAMBDA {
                constexpr int tile = decltype(constant)::value;
                if (step == all_steps) return;
                blocks[used++] = step / block_steps;
                const std::int64_t block_end = (step / block_steps + 1) * block_steps;
                std::int64_t end = step + most_steps < block_end ? step + most_steps : block_end;
                if (end > all_steps) end = all_steps;
                clear_sums<tile>();
                for (std::int64_t term = g.terms - 1; term >= 0; --term)  // the smallest first
                    for (std::int64_t s = step; s < end; ++s) {
                        _tile_loadd(4, w + s * 32, w_bytes);
                        _tile_loadd(6, g.x + term * g.term_stride + s * 32 * 16, x_bytes);
                        if constexpr (tile == 0) _tile_dpbf16ps(0, 4, 6);
                        if constexpr (tile == 1) _tile_dpbf16ps(1, 4, 6);
                        if constexpr (tile == 2) _tile_dpbf16ps(2, 4, 6);
                        if constexpr (tile == 3) _tile_dpbf16ps(3, 4, 6);
                    }
                step = end;
            });
            store_all_sums<tiles>(sums[0]);
            for (int tile = 0; tile < used; ++tile) {
                const float* w_scales = g.w_scales + blocks[tile] * g.w_scale_stride + row;
                const F x_scale_f32x16 = g.x_scales != nullptr ? f_load(g.x_scales + blocks[tile] * 16) : f_set(1.0F);
#pragma GCC unroll 16
                for (int n = 0; n < 16; ++n) {
                    const F scale_f32x16 = f_mul(f_set(w_scales[n]), x_scale_f32x16);
                    f_store(c + n * 16, f_multiply_add(f_load(sums[tile] + n * 16), scale_f32x16, f_load(c + n * 16)));
                }
            }
        }
    }
}

template <class Tiles, int AtOnce = 1>
static void gemm_tiles(const GemmBF16& g) {
    if (g.terms > 1)
        2 * g.pairs > k_of_terms ? gemm_tiles<Tiles, false, AtOnce, ReadOnce::activations>(g)
                                 : gemm_tiles<Tiles, false, AtOnce, ReadOnce::nothing>(g);
    else
        g.x_scales != nullptr ? gemm_tiles<Tiles, true, 1, ReadOnce::weights>(g)
                              : gemm_tiles<Tiles, false, 1, ReadOnce::weights>(g);
}

static void gemm_amx(const GemmBF16& g) {
    tile_memory_barrier();
    if (g.rows % (16 * Tiles3x1::down) != 0)
        gemm_tile_rows(g);
    else if (g.width == 16)
        gemm_tiles<Tiles3x1>(g);
    else
        g.terms == 3 ? gemm_tiles<Tiles2x2, 2>(g) : gemm_tiles<Tiles2x2>(g);
}
