// SPDX-License-Identifier: Apache-2.0
//
// The tile instructions in plain code, for tests on machines that lack them (CMake option BRECCIA_EMULATE_AVX512).
// Every use is checked against the configuration: where the processor would raise an exception, the program ends.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace breccia::emulated_tiles {

constexpr int tile_count = 8, most_rows = 16, row_size = 64;

struct Configuration {
    std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

inline thread_local Configuration configuration;  // palette 0: tiles are not in use
inline thread_local std::uint8_t tiles[tile_count][most_rows][row_size];

inline void require(bool valid) {
    if (!valid) std::abort();
}

inline void require_tile(int tile) { require(configuration.palette == 1 && configuration.rows[tile] != 0); }

inline void zero(int tile) {
    require_tile(tile);
    std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

inline void configure(const void* memory) {
    std::memcpy(&configuration, memory, sizeof configuration);
    require(configuration.palette == 1);
    for (int tile = 0; tile < tile_count; ++tile) {
        require(configuration.rows[tile] <= most_rows && configuration.row_bytes[tile] <= row_size);
        std::memset(tiles[tile], 0, sizeof tiles[tile]);
    }
}

inline void release() { configuration = {}; }

inline void load(int tile, const void* memory, std::int64_t stride) {
    zero(tile);
    for (int row = 0; row < configuration.rows[tile]; ++row)
        std::memcpy(tiles[tile][row], static_cast<const char*>(memory) + row * stride, configuration.row_bytes[tile]);
}

inline void store(int tile, void* memory, std::int64_t stride) {
    require_tile(tile);
    for (int row = 0; row < configuration.rows[tile]; ++row)
        std::memcpy(static_cast<char*>(memory) + row * stride, tiles[tile][row], configuration.row_bytes[tile]);
}

using Floats = float __attribute__((vector_size(row_size)));
using Words = std::uint32_t __attribute__((vector_size(row_size)));

inline Words row_of(int tile, int row) {
    Words words;
    std::memcpy(&words, tiles[tile][row], sizeof words);
    return words;
}

// Subnormal numbers count as zeros, operands and sums alike.
inline Floats flushed(Words bits) {
    const Words zero = reinterpret_cast<Words>((bits & 0x7F80'0000U) == 0);
    return reinterpret_cast<Floats>(bits & (~zero | 0x8000'0000U));
}

// The first (0) or second (1) bfloat16 of each pair.
inline Floats member(Words pairs, int which) { return flushed(which == 0 ? pairs << 16 : pairs & 0xFFFF'0000U); }

// TDPBF16PS. Products of bfloat16 numbers are exact, so adding one rounds once.
inline void multiply(int sum, int a, int b) {
    for (const int tile : {sum, a, b}) require_tile(tile);
    const Configuration& c = configuration;
    const int pairs = c.row_bytes[a] / 4;
    require(pairs == c.rows[b] && c.row_bytes[sum] == c.row_bytes[b] && c.rows[sum] == c.rows[a]);
    Floats right[most_rows][2];
    for (int k = 0; k < pairs; ++k)
        for (const int which : {0, 1}) right[k][which] = member(row_of(b, k), which);
    for (int row = 0; row < c.rows[sum]; ++row) {
        const Floats left[] = {member(row_of(a, row), 0), member(row_of(a, row), 1)};
        Floats total = reinterpret_cast<Floats>(row_of(sum, row));
        for (int k = 0; k < pairs; ++k)
            for (const int which : {0, 1})
                total = flushed(reinterpret_cast<Words>(total + left[which][k] * right[k][which]));
        std::memcpy(tiles[sum][row], &total, sizeof total);
    }
}

// TDPBSSD. Sums wrap, of which no kernel makes use.
inline void multiply_bytes(int sum, int a, int b) {
    for (const int tile : {sum, a, b}) require_tile(tile);
    const Configuration& c = configuration;
    const int words = c.row_bytes[a] / 4;
    require(words == c.rows[b] && c.row_bytes[sum] == c.row_bytes[b] && c.rows[sum] == c.rows[a]);
    for (int row = 0; row < c.rows[sum]; ++row) {
        std::int32_t total[row_size / 4];
        std::memcpy(total, tiles[sum][row], sizeof total);
        for (int k = 0; k < c.row_bytes[a]; ++k) {
            const auto left = static_cast<std::int8_t>(tiles[a][row][k]);
            for (int column = 0; column < c.row_bytes[b] / 4; ++column)
                total[column] += left * static_cast<std::int8_t>(tiles[b][k / 4][4 * column + k % 4]);
        }
        std::memcpy(tiles[sum][row], total, sizeof total);
    }
}

}  // namespace breccia::emulated_tiles

#define _tile_loadconfig(memory) ::breccia::emulated_tiles::configure(memory)
#define _tile_release() ::breccia::emulated_tiles::release()
#define _tile_zero(tile) ::breccia::emulated_tiles::zero(tile)
#define _tile_loadd(tile, memory, stride) ::breccia::emulated_tiles::load(tile, memory, stride)
#define _tile_stream_loadd(tile, memory, stride) ::breccia::emulated_tiles::load(tile, memory, stride)
#define _tile_stored(tile, memory, stride) ::breccia::emulated_tiles::store(tile, memory, stride)
#define _tile_dpbf16ps(sum, a, b) ::breccia::emulated_tiles::multiply(sum, a, b)
#define _tile_dpbssd(sum, a, b) ::breccia::emulated_tiles::multiply_bytes(sum, a, b)
