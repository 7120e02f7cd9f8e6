// SPDX-License-Identifier: Apache-2.0
//
// Codes of six bits against the place of each bit.
#include "breccia/six_bits.hpp"
#include "support.hpp"

namespace breccia {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::size_t n) {
    std::mt19937 random(5);
    Bytes bytes(n);
    std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(random()); });
    return bytes;
}

bool bit_of(const Bytes& bytes, std::size_t i) { return (bytes[i / 8] >> i % 8 & 1U) != 0; }

TEST(SixBits, EveryBitHasItsPlace) {
    for (const std::size_t n : {0U, 4U, 12U, 16U, 20U, 64U, 1'000'004U}) {
        const Bytes packed = random_bytes(n / 4 * 3);
        Bytes codes(n), back(packed.size());
        unpack_sixes(packed, codes);
        for (std::size_t i = 0; i < 6 * n; ++i) ASSERT_EQ(codes[i / 6] >> i % 6 & 1U, bit_of(packed, i));
        for (const std::uint8_t code : codes) ASSERT_LT(code, 64);
        pack_sixes(codes, back);
        ASSERT_EQ(back, packed);
        for (std::uint8_t& code : codes) code |= 0xC0U;
        pack_sixes(codes, back);
        ASSERT_EQ(back, packed);
    }
}

TEST(SixBits, SizesMustFit) {
    Bytes packed(6), codes(8);
    const auto refused = [&](std::size_t bytes, std::size_t n) {
        return message_of(Error::Kind::value,
                          [&] { unpack_sixes(std::span(packed).first(bytes), std::span(codes).first(n)); });
    };
    EXPECT_EQ(refused(3, 5), "codes must be a multiple of 4, got 5");
    EXPECT_EQ(refused(6, 4), "packed must have 3 bytes for 4 codes, got 6");
    EXPECT_EQ(message_of(Error::Kind::value, [&] { pack_sixes(codes, std::span(packed).first(5)); }),
              "packed must have 6 bytes for 8 codes, got 5");
}

}  // namespace
}  // namespace breccia
