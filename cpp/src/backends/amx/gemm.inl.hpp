// SPDX-License-Identifier: Apache-2.0
//
// The bfloat16 panel product in tiles: 16 weight rows by 32 k in their own order times 16 pairs of k by 16 activations.
// A block's sums go through memory to be scaled; the sums of one block are scaled while the tiles of the next are at
// work, which is what the two halves of the buffer are for.

// Tile numbers must be literals. Sums: 0 ... 3. Weights: 4, 5 (and 3 where tiles are one abreast). Activations: 6, 7.
struct TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) constexpr TileConfig tile_config{};

// gcc's tile intrinsics do not tell it that they read and write memory.
BRECCIA_INLINE void tile_memory_barrier() { __asm__ volatile("" ::: "memory"); }

/// Sums of one block on their way to c: `tiles` of 16 x 16, row tiles by `across`.
struct TileSums {
    const float* sums = nullptr;
    float* c = nullptr;
    const float* w_scales = nullptr;
    const float* x_scales = nullptr;
};

template <int Down, int Across>
BRECCIA_INLINE void add_scaled(const TileSums& t, std::int64_t w_scale_stride) {
    if (t.sums == nullptr) return;
    F x_scale_f32x16[Across];
#pragma GCC unroll 2
    for (int v = 0; v < Across; ++v)
        x_scale_f32x16[v] = t.x_scales != nullptr ? f_load(t.x_scales + 16 * v) : f_set(1.0F);
    for (int n = 0; n < 16 * Down; ++n) {
        const F w_scale_f32x16 = f_set(t.w_scales[n * w_scale_stride]);
#pragma GCC unroll 2
        for (int v = 0; v < Across; ++v) {
            float* c = t.c + (n * Across + v) * 16;
            const F sum = f_load(t.sums + ((n / 16 * Across + v) * 16 + n % 16) * 16);
            f_store(c, f_multiply_add(sum, f_mul(w_scale_f32x16, x_scale_f32x16[v]), f_load(c)));
        }
    }
}

BRECCIA_INLINE void prefetch_next(const GemmBF16& g, std::int64_t row, std::int64_t rows) {
    if (g.next == nullptr) return;
    const std::int64_t end = row + rows < g.next_rows ? row + rows : g.next_rows;
    for (std::int64_t r = row; r < end; ++r)
        for (std::int64_t at = 0; at < g.next_bytes; at += 64)
            _mm_prefetch(g.next + r * g.next_stride + at, _MM_HINT_T1);
}

// 32 rows by 32 activations: four products for four loads.
static void gemm_amx_32(const GemmBF16& g) {
    alignas(64) float buffer[2][4 * 256];
    constexpr std::int64_t w_bytes = panel_stride_bf16 * 2, x_bytes = 128;
    TileSums pending;
    int half = 0;
    for (std::int64_t row = 0; row < g.rows; row += 32) {
        prefetch_next(g, row, 32);
        const std::uint16_t* w = g.w + row * panel_stride_bf16;
        const std::uint16_t* x = g.x;
        std::int64_t block = 0;
        for (std::int64_t done = 0; done < g.pairs; ++block) {
            const std::int64_t left = g.pairs - done, pairs = left < g.block_pairs ? left : g.block_pairs;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (std::int64_t p = 0; p < pairs; p += 16, w += 32, x += 16 * 64) {
                _tile_loadd(6, x, x_bytes);
                _tile_loadd(4, w, w_bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, x + 32, x_bytes);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, w + 16 * panel_stride_bf16, w_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            done += pairs;
            add_scaled<2, 2>(pending, g.w_scale_stride);
            float* sums = buffer[half];
            half ^= 1;
            tile_memory_barrier();
            _tile_stored(0, sums, 64);
            _tile_stored(1, sums + 256, 64);
            _tile_stored(2, sums + 512, 64);
            _tile_stored(3, sums + 768, 64);
            tile_memory_barrier();
            pending = {.sums = sums,
                       .c = g.c + row * 32,
                       .w_scales = g.w_scales + row * g.w_scale_stride + block,
                       .x_scales = g.x_scales != nullptr ? g.x_scales + block * 32 : nullptr};
        }
    }
    add_scaled<2, 2>(pending, g.w_scale_stride);
}

// 48 rows by 16 activations.
static void gemm_amx_16(const GemmBF16& g) {
    alignas(64) float buffer[2][3 * 256];
    constexpr std::int64_t w_bytes = panel_stride_bf16 * 2, x_bytes = 64;
    TileSums pending;
    int half = 0;
    for (std::int64_t row = 0; row < g.rows; row += 48) {
        prefetch_next(g, row, 48);
        const std::uint16_t* w = g.w + row * panel_stride_bf16;
        const std::uint16_t* x = g.x;
        std::int64_t block = 0;
        for (std::int64_t done = 0; done < g.pairs; ++block) {
            const std::int64_t left = g.pairs - done, pairs = left < g.block_pairs ? left : g.block_pairs;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            for (std::int64_t p = 0; p < pairs; p += 16, w += 32, x += 16 * 32) {
                _tile_loadd(6, x, x_bytes);
                _tile_loadd(3, w, w_bytes);
                _tile_dpbf16ps(0, 3, 6);
                _tile_loadd(4, w + 16 * panel_stride_bf16, w_bytes);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(5, w + 32 * panel_stride_bf16, w_bytes);
                _tile_dpbf16ps(2, 5, 6);
            }
            done += pairs;
            add_scaled<3, 1>(pending, g.w_scale_stride);
            float* sums = buffer[half];
            half ^= 1;
            tile_memory_barrier();
            _tile_stored(0, sums, 64);
            _tile_stored(1, sums + 256, 64);
            _tile_stored(2, sums + 512, 64);
            tile_memory_barrier();
            pending = {.sums = sums,
                       .c = g.c + row * 16,
                       .w_scales = g.w_scales + row * g.w_scale_stride + block,
                       .x_scales = g.x_scales != nullptr ? g.x_scales + block * 16 : nullptr};
        }
    }
    add_scaled<3, 1>(pending, g.w_scale_stride);
}

static void gemm_amx(const GemmBF16& g) {
    tile_memory_barrier();
    _tile_loadconfig(&tile_config);
    if (g.width == 16)
        gemm_amx_16(g);
    else
        gemm_amx_32(g);
    _tile_release();  // a thread that does not use tiles need not save them
}
