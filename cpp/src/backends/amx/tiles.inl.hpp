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

// Configuring takes longer than a tile of few activations.
static void configure_tiles() { _tile_loadconfig(&tile_config); }
static void release_tiles() { _tile_release(); }  // a thread that does not use tiles need not save them
