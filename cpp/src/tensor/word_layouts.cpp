// SPDX-License-Identifier: Apache-2.0
#include "breccia/word_layouts.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/threads.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

static_assert(std::endian::native == std::endian::little, "the first code of a word is in its first byte");

// Words of four neighbours. Every target has vectors of 16 bytes.
using Words = std::uint32_t __attribute__((vector_size(16)));

Words load(const std::uint32_t* p) {
    Words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
void store(std::uint32_t* p, Words x) { std::memcpy(p, &x, sizeof x); }

// a[i][j] becomes a[j][i].
void transpose(Words (&a)[4]) {
    const Words low_01 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
    const Words high_01 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
    const Words low_23 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
    const Words high_23 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
    a[0] = __builtin_shufflevector(low_01, low_23, 0, 1, 4, 5);
    a[1] = __builtin_shufflevector(low_01, low_23, 2, 3, 6, 7);
    a[2] = __builtin_shufflevector(high_01, high_23, 0, 1, 4, 5);
    a[3] = __builtin_shufflevector(high_01, high_23, 2, 3, 6, 7);
}

// A tile is turned in the first-level cache: 128 rows of 16 words, a cache line of each row.
constexpr std::int64_t tile_words = 16, tile_rows = 128, per_awq_word = 8;
using TileRow = std::uint32_t[tile_rows];
using Tile = TileRow[tile_words];  // tile[r][n]: word r of row n
using Line = std::uint32_t[tile_words];

// Four columns of the tile as lines, and back.
void columns_of(const Tile& tile, std::int64_t n, Line (&lines)[4]) {
    for (std::int64_t r = 0; r < tile_words; r += 4) {
        Words a[4] = {load(tile[r] + n), load(tile[r + 1] + n), load(tile[r + 2] + n), load(tile[r + 3] + n)};
        transpose(a);
        for (std::size_t i = 0; i < 4; ++i) store(lines[i] + r, a[i]);
    }
}
void set_columns(Tile& tile, std::int64_t n, const Line (&lines)[4]) {
    for (std::int64_t r = 0; r < tile_words; r += 4) {
        Words a[4] = {load(lines[0] + r), load(lines[1] + r), load(lines[2] + r), load(lines[3] + r)};
        transpose(a);
        for (std::int64_t i = 0; i < 4; ++i) store(tile[r + i] + n, a[i]);
    }
}

// Rows of codes as words, the last of which may be short.
template <class Byte>
struct RowsOfBytes {
    Byte* data;
    std::int64_t rows, bytes;  // bytes of a row

    [[nodiscard]] std::int64_t words() const { return (bytes + 3) / 4; }
    [[nodiscard]] Byte* at(std::int64_t row, std::int64_t word) const { return data + row * bytes + 4 * word; }
    // How many bytes of a line a row has from word `first` on.
    [[nodiscard]] std::size_t size_at(std::int64_t first) const {
        return static_cast<std::size_t>(std::min<std::int64_t>(bytes - 4 * first, sizeof(Line)));
    }
};

// Copies whole lines as such, which compilers have instructions for.
void copy_line(void* to, const void* from, std::size_t size) {
    if (size == sizeof(Line))
        std::memcpy(to, from, sizeof(Line));
    else
        std::memcpy(to, from, size);
}

// Stores column n of a tile as words `first` and following of row row_of(n) of the codes. Columns of rows that do not
// exist are left out.
template <class RowOf>
void store_tile(const RowsOfBytes<std::uint8_t>& codes, std::int64_t first, const Tile& tile, RowOf row_of) {
    for (std::int64_t n = 0; n < tile_rows; n += 4) {
        Line lines[4];
        columns_of(tile, n, lines);
        for (std::int64_t i = 0; i < 4; ++i)
            if (const std::int64_t row = row_of(n + i); row < codes.rows)
                copy_line(codes.at(row, first), lines[i], codes.size_at(first));
    }
}

// Loads a tile's columns from the same places. What there is no code for is zero.
template <class RowOf>
void load_tile(const RowsOfBytes<const std::uint8_t>& codes, std::int64_t first, Tile& tile, RowOf row_of) {
    for (std::int64_t n = 0; n < tile_rows; n += 4) {
        Line lines[4] = {};
        for (std::int64_t i = 0; i < 4; ++i)
            if (const std::int64_t row = row_of(n + i); row < codes.rows)
                copy_line(lines[i], codes.at(row, first), codes.size_at(first));
        set_columns(tile, n, lines);
    }
}

void copy_flipped(const std::uint32_t* from, std::int64_t n, std::uint32_t flip, std::uint32_t* to) {
    if (flip == 0)
        std::copy_n(from, n, to);
    else
        for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] ^ flip;
}

// Calls body(first word, first row) for every tile, in parallel.
template <class F>
void for_each_tile(const Call& call, std::int64_t words, std::int64_t rows, F body) {
    const std::int64_t across = (words + tile_words - 1) / tile_words, down = (rows + tile_rows - 1) / tile_rows;
    constexpr std::int64_t grain = 8;  // tiles: 64 KiB
    parallel_for_each(call, across * down, grain,
                      [&](std::int64_t i) { body(i % across * tile_words, i / across * tile_rows); });
}

// ---- GPTQ -----------------------------------------------------------------------------------------------------------

// Word r of the matrix whose column j is column order[j] of the given one, whose rows of words are `stride` apart.
template <int PerWord>
void gather_word(const std::uint32_t* words, std::int64_t stride, const std::int64_t* order, std::int64_t n,
                 std::uint32_t flip, std::uint32_t* out) {
    constexpr int bits = 32 / PerWord;
    constexpr std::uint32_t mask = (1U << static_cast<unsigned>(bits)) - 1U;
    const std::uint32_t* rows[PerWord];  // where each code of the word comes from, shifted
    int shifts[PerWord];
    for (int i = 0; i < PerWord; ++i) {
        rows[i] = words + order[i] / PerWord * stride;
        shifts[i] = static_cast<int>(order[i] % PerWord) * bits;
    }
    std::int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        Words x = Words{} + flip;
        for (int i = 0; i < PerWord; ++i) x ^= ((load(rows[i] + j) >> shifts[i]) & mask) << (i * bits);
        store(out + j, x);
    }
    for (; j < n; ++j) {
        std::uint32_t x = flip;
        for (int i = 0; i < PerWord; ++i) x ^= ((rows[i][j] >> shifts[i]) & mask) << (i * bits);
        out[j] = x;
    }
}

void gather_word(const WordShape& shape, const std::uint32_t* words, std::int64_t stride,
                 std::span<const std::int64_t> order, std::int64_t r, std::int64_t n, std::uint32_t* out) {
    if (shape.bits == 4)
        gather_word<8>(words, stride, order.data() + 8 * r, n, shape.flip, out);
    else
        gather_word<4>(words, stride, order.data() + 4 * r, n, shape.flip, out);
}

// Of codes that a byte holds one or two of.
std::int64_t bytes_of_row(const WordShape& shape) {
    return shape.bits == 8 ? shape.columns : shape.columns / 2 + shape.columns % 2;
}

void check_size(std::size_t size, std::int64_t wanted, const char* name, const WordShape& shape) {
    if (static_cast<std::int64_t>(size) != wanted)
        throw_value(name, " must have ", wanted, " items for ", shape.rows, " x ", shape.columns, " codes of ",
                    shape.bits, " bits, got ", size);
}

void check_gptq(std::size_t words, const WordShape& shape, std::span<const std::int64_t> order, std::size_t codes) {
    if (shape.bits != 4 && shape.bits != 8) throw_value("bits must be 4 or 8, got ", shape.bits);
    const std::int64_t per_word = 32 / shape.bits;
    if (shape.rows < 0 || shape.columns < 0 || shape.columns % per_word != 0)
        throw_value("columns must be a multiple of ", per_word, ", got ", shape.columns);
    const Shape all_words{shape.rows, shape.columns / per_word};
    check_size(words, element_count(all_words), "words", shape);
    check_size(codes, element_count(all_words, 4) * 4, "codes", shape);
    if (!order.empty()) check_size(order.size(), shape.columns, "order", shape);
    for (const std::int64_t place : order)
        if (place < 0 || place >= shape.columns)
            throw_value("order must be places of columns, from 0 to ", shape.columns - 1, ", got ", place);
}

// ---- AWQ ------------------------------------------------------------------------------------------------------------

constexpr std::int64_t awq_places[per_awq_word] = {0, 2, 4, 6, 1, 3, 5, 7};  // row in nibble i
constexpr std::int64_t tile_awq_words = tile_rows / per_awq_word;

// The high part of each field of x trades places with the low part of the same field of y.
template <int Shift, std::uint32_t Low>
void trade(Words& x, Words& y) {
    const Words changed = ((x >> Shift) ^ y) & Low;
    x ^= changed << Shift;
    y ^= changed;
}

// Nibble i of word c becomes nibble c of word i: halves, then quarters, then eighths.
void transpose_nibbles(Words (&a)[per_awq_word]) {
    for (int i = 0; i < 4; ++i) trade<16, 0x0000'FFFF>(a[i], a[i + 4]);
    for (int i = 0; i < 8; i += 4) trade<8, 0x00FF'00FF>(a[i], a[i + 2]), trade<8, 0x00FF'00FF>(a[i + 1], a[i + 3]);
    for (int i = 0; i < 8; i += 2) trade<4, 0x0F0F'0F0F>(a[i], a[i + 1]);
}

// Of eight rows of words, in place.
void transpose_nibbles(std::uint32_t (&words)[per_awq_word][tile_awq_words]) {
    for (std::int64_t j = 0; j < tile_awq_words; j += 4) {
        Words a[per_awq_word];
        for (std::int64_t i = 0; i < per_awq_word; ++i) a[i] = load(words[i] + j);
        transpose_nibbles(a);
        for (std::int64_t i = 0; i < per_awq_word; ++i) store(words[i] + j, a[i]);
    }
}

// A tile's columns are in the order of nibbles: column n is this row, counted from the tile's first.
std::int64_t awq_row(std::int64_t n) { return n % tile_awq_words * per_awq_word + awq_places[n / tile_awq_words]; }

void check_awq(std::size_t words, const WordShape& shape, std::size_t codes) {
    if (shape.bits != 4) throw_value("bits must be 4, got ", shape.bits);
    if (shape.rows < 0 || shape.columns < 0 || shape.rows % per_awq_word != 0)
        throw_value("rows must be a multiple of 8, got ", shape.rows);
    check_size(words, element_count({shape.columns, shape.rows / per_awq_word}, 4), "words", shape);
    check_size(codes, element_count({shape.rows, bytes_of_row(shape)}), "codes", shape);
}

}  // namespace

void codes_from_gptq(std::span<const std::uint32_t> words, WordShape shape, std::span<const std::int64_t> order,
                     std::span<std::uint8_t> codes) {
    const Call call;
    check_gptq(words.size(), shape, order, codes.size());
    const RowsOfBytes<std::uint8_t> to{codes.data(), shape.rows, bytes_of_row(shape)};
    for_each_tile(call, to.words(), shape.rows, [&](std::int64_t word, std::int64_t row) {
        Tile tile = {};
        const std::int64_t n = std::min(tile_rows, shape.rows - row);
        for (std::int64_t r = word; r < std::min(word + tile_words, to.words()); ++r)
            if (order.empty())
                copy_flipped(words.data() + r * shape.rows + row, n, shape.flip, tile[r - word]);
            else
                gather_word(shape, words.data() + row, shape.rows, order, r, n, tile[r - word]);
        store_tile(to, word, tile, [row](std::int64_t i) { return row + i; });
    });
}

void codes_to_gptq(std::span<const std::uint8_t> codes, WordShape shape, std::span<const std::int64_t> order,
                   std::span<std::uint32_t> words) {
    const Call call;
    check_gptq(words.size(), shape, order, codes.size());
    const RowsOfBytes<const std::uint8_t> from{codes.data(), shape.rows, bytes_of_row(shape)};
    const std::int64_t strips = from.words() == 0 ? 0 : (shape.rows + tile_rows - 1) / tile_rows;
    parallel_for(call, strips, 1, [&](std::int64_t begin, std::int64_t end) {
        std::vector<std::uint32_t> unordered(order.empty() ? 0 : static_cast<std::size_t>(from.words() * tile_rows));
        for (std::int64_t row = begin * tile_rows; row < std::min(end * tile_rows, shape.rows); row += tile_rows) {
            const std::int64_t n = std::min(tile_rows, shape.rows - row), stride = order.empty() ? shape.rows : n;
            std::uint32_t* to = order.empty() ? words.data() + row : unordered.data();
            for (std::int64_t word = 0; word < from.words(); word += tile_words) {
                Tile tile;
                load_tile(from, word, tile, [row](std::int64_t i) { return row + i; });
                for (std::int64_t r = word; r < std::min(word + tile_words, from.words()); ++r)
                    copy_flipped(tile[r - word], n, order.empty() ? shape.flip : 0, to + r * stride);
            }
            if (order.empty()) continue;
            for (std::int64_t r = 0; r < from.words(); ++r)
                gather_word(shape, to, stride, order, r, n, words.data() + r * shape.rows + row);
        }
    });
}

void codes_from_awq(std::span<const std::uint32_t> words, WordShape shape, std::span<std::uint8_t> codes) {
    const Call call;
    check_awq(words.size(), shape, codes.size());
    const RowsOfBytes<std::uint8_t> to{codes.data(), shape.rows, bytes_of_row(shape)};
    const std::int64_t across = shape.rows / per_awq_word;
    for_each_tile(call, to.words(), shape.rows, [&](std::int64_t word, std::int64_t row) {
        Tile tile = {};
        const std::int64_t n = std::min(tile_rows, shape.rows - row) / per_awq_word;
        for (std::int64_t r = 0; r < std::min(tile_words, to.words() - word); ++r) {
            std::uint32_t eight[per_awq_word][tile_awq_words] = {};
            const std::int64_t k = per_awq_word * (word + r), last = std::min(k + per_awq_word, shape.columns);
            for (std::int64_t i = k; i < last; ++i)
                copy_flipped(words.data() + i * across + row / per_awq_word, n, shape.flip, eight[i - k]);
            transpose_nibbles(eight);
            std::memcpy(tile[r], eight, sizeof eight);
        }
        store_tile(to, word, tile, [row](std::int64_t i) { return row + awq_row(i); });
    });
}

void codes_to_awq(std::span<const std::uint8_t> codes, WordShape shape, std::span<std::uint32_t> words) {
    const Call call;
    check_awq(words.size(), shape, codes.size());
    const RowsOfBytes<const std::uint8_t> from{codes.data(), shape.rows, bytes_of_row(shape)};
    const std::int64_t across = shape.rows / per_awq_word;
    for_each_tile(call, from.words(), shape.rows, [&](std::int64_t word, std::int64_t row) {
        Tile tile;
        const std::int64_t n = std::min(tile_rows, shape.rows - row) / per_awq_word;
        load_tile(from, word, tile, [row](std::int64_t i) { return row + awq_row(i); });
        for (std::int64_t r = 0; r < std::min(tile_words, from.words() - word); ++r) {
            std::uint32_t eight[per_awq_word][tile_awq_words];
            std::memcpy(eight, tile[r], sizeof eight);
            transpose_nibbles(eight);
            const std::int64_t k = per_awq_word * (word + r), last = std::min(k + per_awq_word, shape.columns);
            for (std::int64_t i = k; i < last; ++i)
                copy_flipped(eight[i - k], n, shape.flip, words.data() + i * across + row / per_awq_word);
        }
    });
}

}  // namespace breccia::inline v0_4
