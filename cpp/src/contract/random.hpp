// SPDX-License-Identifier: Apache-2.0
//
// Random numbers as a function of a seed and a position: the same on every backend, in any number of threads, for any
// strides, and in python/breccia/kernels/whole_array/random.py.
#pragma once

#include <cstdint>

namespace breccia::inline v0_4 {

/// A bijection of 32-bit integers in which every input bit moves every output bit: Wellons' "lowbias32"
/// (https://github.com/skeeto/hash-prospector).
constexpr std::uint32_t mix_bits(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB'352DU;
    x ^= x >> 15;
    x *= 0x846C'A68BU;
    return x ^ x >> 16;
}

/// What 32 random bits are for.
enum class RandomStream : std::uint32_t { rounding = 0x9E37'79B9U, signs = 0x7F4A'7C15U };

/// A seed made ready for one stream. `bits(i)` are the random bits of position i, modulo 2^32.
struct RandomKey {
    std::uint32_t key = 0, offset = 0;

    constexpr RandomKey() = default;
    constexpr RandomKey(std::uint64_t seed, RandomStream stream)
        : key(mix_bits(static_cast<std::uint32_t>(seed) + static_cast<std::uint32_t>(stream))),
          offset(mix_bits(static_cast<std::uint32_t>(seed >> 32) ^ key)) {}

    [[nodiscard]] constexpr std::uint32_t bits(std::uint32_t position) const {
        return mix_bits(mix_bits(position ^ key) + offset);
    }
};

}  // namespace breccia::inline v0_4
