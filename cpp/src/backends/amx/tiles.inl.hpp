// SPDX-License-Identifier: Apache-2.0
//
// What kernels in tiles share: eight tiles of 16 rows of 64 bytes, whose numbers must be literals.

struct TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) constexpr TileConfig tile_config{};

// gcc's tile intrinsics do not tell it that they read memory.
BRECCIA_INLINE void tile_memory_barrier() { __asm__ volatile("" ::: "memory"); }

template <int N>
struct Constant {
    static constexpr int value = N;
};

/// Calls f(Constant<0>{}) ... f(Constant<N - 1>{}).
template <int N, class F>
BRECCIA_INLINE void for_constants(F f) {
    if constexpr (N > 0) {
        for_constants<N - 1>(f);
        f(Constant<N - 1>{});
    }
}

/// The four tiles of sums, whose rows follow one another in memory.
template <int Tile>
BRECCIA_INLINE void load_sums(const void* from) {
    if constexpr (Tile == 0) _tile_loadd(0, from, 64);
    if constexpr (Tile == 1) _tile_loadd(1, from, 64);
    if constexpr (Tile == 2) _tile_loadd(2, from, 64);
    if constexpr (Tile == 3) _tile_loadd(3, from, 64);
}
template <int Tile>
BRECCIA_INLINE void store_sums(void* to) {
    if constexpr (Tile == 0) _tile_stored(0, to, 64);
    if constexpr (Tile == 1) _tile_stored(1, to, 64);
    if constexpr (Tile == 2) _tile_stored(2, to, 64);
    if constexpr (Tile == 3) _tile_stored(3, to, 64);
}
template <int Tile>
BRECCIA_INLINE void clear_sums() {
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
}
/// Lets the sums of a block go, where the product that follows is the first of the next one.
template <bool First, int Tile>
BRECCIA_INLINE void begin_sums(void* to) {
    if constexpr (!First) return;
    store_sums<Tile>(to);
    clear_sums<Tile>();
}

// Configuring takes longer than a tile of few activations.
static void configure_tiles() { _tile_loadconfig(&tile_config); }
static void release_tiles() { _tile_release(); }  // a thread that does not use tiles need not save them
