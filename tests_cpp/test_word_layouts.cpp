// SPDX-License-Identifier: Apache-2.0
//
// Words of GPTQ and AWQ against the place of each code by the formats' definitions.
#include <algorithm>
#include <numeric>

#include "breccia/word_layouts.hpp"
#include "support.hpp"

namespace breccia {
namespace {

using Words = std::vector<std::uint32_t>;
using Codes = std::vector<std::uint8_t>;
using Order = std::vector<std::int64_t>;

std::uint32_t field(std::uint32_t word, std::int64_t i, int bits) {
    return word >> static_cast<unsigned>(i * bits) & ((1U << static_cast<unsigned>(bits)) - 1U);
}

// Code (row, column) of rows of bytes.
std::uint32_t code_at(const Codes& codes, const WordShape& s, std::int64_t row, std::int64_t column) {
    const std::int64_t bytes = (s.columns * s.bits + 7) / 8, bit = column * s.bits;
    return field(codes[static_cast<std::size_t>(row * bytes + bit / 8)], bit % 8 / s.bits, s.bits);
}

Words random_words(std::int64_t n, unsigned seed = 3) {
    std::mt19937 random(seed);
    Words words(static_cast<std::size_t>(n));
    std::ranges::generate(words, [&] { return static_cast<std::uint32_t>(random()); });
    return words;
}

TEST(WordLayouts, Gptq) {
    for (const int bits : {4, 8})
        for (const std::int64_t down : {0, 1, 15, 17, 33})
            for (const std::int64_t rows : {0, 1, 3, 127, 130}) {
                const WordShape s{.rows = rows, .columns = down * 32 / bits, .bits = bits, .flip = 0x9999'9999};
                Order backwards(static_cast<std::size_t>(s.columns));
                std::iota(backwards.rbegin(), backwards.rend(), 0);
                const Words words = random_words(down * rows);
                for (const Order& order : {Order{}, backwards}) {
                    Codes codes(static_cast<std::size_t>(rows * down * 4));
                    codes_from_gptq(words, s, order, codes);
                    for (std::int64_t k = 0; k < s.columns; ++k)
                        for (std::int64_t n = 0; n < rows; ++n) {
                            const std::int64_t from = order.empty() ? k : order[static_cast<std::size_t>(k)];
                            const std::int64_t each = 32 / bits;
                            const std::uint32_t word = words[static_cast<std::size_t>(from / each * rows + n)];
                            const std::uint32_t wanted = field(word, from % each, bits) ^ field(s.flip, k % each, bits);
                            ASSERT_EQ(code_at(codes, s, n, k), wanted);
                        }
                    Words back(words.size());
                    codes_to_gptq(codes, s, order, back);
                    EXPECT_EQ(back, words);
                }
            }
}

TEST(WordLayouts, Awq) {
    constexpr std::int64_t places[] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (const std::int64_t columns : {0, 1, 7, 8, 129, 130})
        for (const std::int64_t across : {0, 1, 3, 16, 17}) {
            const WordShape s{.rows = 8 * across, .columns = columns, .flip = 0x8888'8888};
            const Words words = random_words(columns * across);
            Codes codes(static_cast<std::size_t>(s.rows * ((columns + 1) / 2)));
            codes_from_awq(words, s, codes);
            for (std::int64_t k = 0; k < columns; ++k)
                for (std::int64_t n = 0; n < s.rows; ++n) {
                    const std::uint32_t word = words[static_cast<std::size_t>(k * across + n / 8)];
                    const std::int64_t nibble = std::ranges::find(places, n % 8) - places;
                    ASSERT_EQ(code_at(codes, s, n, k), field(word, nibble, 4) ^ 8U);
                }
            Words back(words.size());
            codes_to_awq(codes, s, back);
            EXPECT_EQ(back, words);
        }
}

// Sizes that wrap around, and no words in very many rows, which must take no time.
TEST(WordLayouts, ExtentsBeyondAnyMemory) {
    constexpr std::int64_t many = std::int64_t{1} << 40;
    Words words;
    Codes codes;
    for (const auto& [rows, columns] : {std::pair{std::int64_t{1} << 62, std::int64_t{32}}, std::pair{many, 32 * many},
                                        std::pair{std::int64_t{32}, std::int64_t{1} << 62}}) {
        const WordShape s{.rows = rows, .columns = columns};
        EXPECT_THROW(codes_from_gptq(words, s, {}, codes), Error);
        EXPECT_THROW(codes_to_gptq(codes, s, {}, words), Error);
        EXPECT_THROW(codes_from_awq(words, s, codes), Error);
        EXPECT_THROW(codes_to_awq(codes, s, words), Error);
    }
    for (const auto& [rows, columns] : {std::pair{many, std::int64_t{0}}, std::pair{std::int64_t{0}, many}}) {
        const WordShape s{.rows = rows, .columns = columns};
        codes_from_gptq(words, s, {}, codes);
        codes_to_gptq(codes, s, {}, words);
        codes_from_awq(words, s, codes);
        codes_to_awq(codes, s, words);
    }
}

TEST(WordLayouts, Messages) {
    Words words(8);
    Codes codes(32);
    const auto gptq = [&](WordShape shape, const Order& order) {
        return message_of(Error::Kind::value, [&] { codes_from_gptq(words, shape, order, codes); });
    };
    EXPECT_EQ(gptq({.rows = 8, .columns = 7}, {}), "columns must be a multiple of 8, got 7");
    EXPECT_EQ(gptq({.rows = 9, .columns = 8}, {}), "words must have 9 items for 9 x 8 codes of 4 bits, got 8");
    EXPECT_EQ(gptq({.rows = 8, .columns = 8, .bits = 2}, {}), "bits must be 4 or 8, got 2");
    EXPECT_EQ(gptq({.rows = 8, .columns = 8}, {0, 1, 2, 3, 4, 5, 6, 8}),
              "order must be places of columns, from 0 to 7, got 8");
    EXPECT_EQ(message_of(Error::Kind::value, [&] { codes_to_awq(codes, {.rows = 12, .columns = 2}, words); }),
              "rows must be a multiple of 8, got 12");
}

}  // namespace
}  // namespace breccia
