// SPDX-License-Identifier: Apache-2.0
#include "breccia/six_bits.hpp"

#include <bit>
#include <cstring>
#include <string>

#include "runtime/threads.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

static_assert(std::endian::native == std::endian::little, "the first code of a word is in its first byte");

// Words of four codes each. Every target has vectors of 16 bytes.
using Words = std::uint32_t __attribute__((vector_size(16)));
constexpr std::int64_t group = 16, group_bytes = 12, grain = 4096;  // codes and bytes of four words; groups of a thread

// Four codes of each word, from its low 24 bits to its bytes, and back.
template <class Word>
Word spread(Word x) {
    return (x & 0x3F) | (x & 0xFC0) << 2 | (x & 0x3'F000) << 4 | (x & 0xFC'0000) << 6;
}
template <class Word>
Word gathered(Word x) {
    return (x & 0x3F) | (x >> 2 & 0xFC0) | (x >> 4 & 0x3'F000) | (x >> 6 & 0xFC'0000);
}

std::uint32_t load(const std::uint8_t* p, std::size_t bytes = 4) {
    std::uint32_t x = 0;
    std::memcpy(&x, p, bytes);
    return x;
}
void store(std::uint8_t* p, std::uint32_t x, std::size_t bytes = 4) { std::memcpy(p, &x, bytes); }

void pack_group(const std::uint8_t* codes, std::uint8_t* packed) {
    Words x;
    std::memcpy(&x, codes, sizeof x);
    x = gathered(x);
    store(packed, x[0] | x[1] << 24);
    store(packed + 4, x[1] >> 8 | x[2] << 16);
    store(packed + 8, x[2] >> 16 | x[3] << 8);
}

void unpack_group(const std::uint8_t* packed, std::uint8_t* codes) {
    // The last word begins a byte early: so no byte after the group's is read.
    const Words x = spread(Words{load(packed), load(packed + 3), load(packed + 6), load(packed + 8) >> 8});
    std::memcpy(codes, &x, sizeof x);
}

// Calls whole(code, byte) with the places of each group, in parallel, and word(code, byte) for the words after them.
template <class Whole, class Word>
void for_each_group(std::size_t size, std::size_t packed, Whole whole, Word word) {
    const Call call;
    if (size % 4 != 0) throw_value("codes must be a multiple of 4, got ", size);
    if (packed != size / 4 * 3)
        throw_value("packed must have ", size / 4 * 3, " bytes for ", size, " codes, got ", packed);
    const std::int64_t codes = static_cast<std::int64_t>(size), groups = codes / group;
    parallel_for_each(call, groups, grain, [&](std::int64_t i) { whole(i * group, i * group_bytes); });
    for (std::int64_t at = groups * group; at < codes; at += 4) word(at, at / 4 * 3);
}

}  // namespace

void pack_sixes(std::span<const std::uint8_t> codes, std::span<std::uint8_t> packed) {
    const auto* from = codes.data();
    auto* to = packed.data();
    for_each_group(
        codes.size(), packed.size(), [=](std::int64_t code, std::int64_t byte) { pack_group(from + code, to + byte); },
        [=](std::int64_t code, std::int64_t byte) { store(to + byte, gathered(load(from + code)), 3); });
}

void unpack_sixes(std::span<const std::uint8_t> packed, std::span<std::uint8_t> codes) {
    const auto* from = packed.data();
    auto* to = codes.data();
    for_each_group(
        codes.size(), packed.size(),
        [=](std::int64_t code, std::int64_t byte) { unpack_group(from + byte, to + code); },
        [=](std::int64_t code, std::int64_t byte) { store(to + code, spread(load(from + byte, 3))); });
}

}  // namespace breccia::inline v0_4
