// SPDX-License-Identifier: Apache-2.0
//
// Numbers, shapes and arrays of a fuzzer's bytes; where these end all that follows is zero.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "breccia/breccia.hpp"

namespace breccia::fuzz {

/// Ends the process, which is how a fuzzer is told of a wrong value.
inline void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
}

class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    std::uint8_t byte() {
        if (size_ == 0) return 0;
        --size_;
        return *data_++;
    }
    std::int64_t below(std::int64_t limit) { return byte() % limit; }
    bool one_in(std::int64_t count) { return byte() % count == 1; }

    /// Mostly small, sometimes the edge of something.
    std::int64_t extent() {
        constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
        constexpr std::int64_t edges[] = {-1,      most, most / 2 + 1, std::int64_t{1} << 32, std::int64_t{1} << 31,
                                          most - 1};
        constexpr std::int64_t usual[] = {0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 128};
        const std::uint8_t kind = byte();
        if (kind >= 252) return edges[below(6)];
        return kind < 200 ? usual[kind % 16] : byte();
    }
    Shape shape() {
        Shape result(static_cast<std::size_t>(one_in(8) ? below(6) : 1 + below(3)));
        for (auto& n : result) n = extent();
        return result;
    }
    void fill(std::uint8_t* to, std::size_t count) {
        const std::size_t given = std::min(count, size_);
        if (given != 0) std::memcpy(to, data_, given);
        data_ += given;
        size_ -= given;
        for (std::size_t i = given; i < count; ++i) to[i] = static_cast<std::uint8_t>(i * 37);
    }

private:
    const std::uint8_t* data_;
    std::size_t size_;
};

/// The product, or one factor where it has no place.
inline std::int64_t product(std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    return __builtin_mul_overflow(a, b, &result) ? b : result;
}

/// An array of any strides, whose memory ends where its elements do; without memory where that would be large.
inline Array any_array(Input& in, ElementType type, Shape shape) {
    constexpr std::size_t most = 1 << 16;
    const std::size_t rank = shape.size();
    __int128 count = 1;
    for (const std::int64_t n : shape) count *= n < 0 || count > most ? most : n;
    Shape strides(rank);
    std::int64_t step = static_cast<std::int64_t>(type.size());
    for (std::size_t i = rank; i-- > 0;) {
        strides[i] = step;
        step = product(step, shape[i]);
    }
    const std::int64_t kind = in.below(16);
    if (kind == 1 && rank > 1) std::swap(strides[rank - 1], strides[rank - 2]);
    if (kind == 2 && rank > 0) strides[static_cast<std::size_t>(in.below(static_cast<std::int64_t>(rank)))] = 0;
    if (kind == 3)
        for (auto& s : strides) s = product(s, -1);
    if (kind == 4)
        for (auto& s : strides) s = product(s, 2);
    if (kind == 5)
        for (auto& s : strides) s = in.extent();
    __int128 low = 0, high = static_cast<__int128>(type.size());
    for (std::size_t i = 0; i < rank; ++i) {
        const __int128 last = shape[i] > 0 ? static_cast<__int128>(shape[i] - 1) * strides[i] : 0;
        (last < 0 ? low : high) += last;
    }
    if (count > static_cast<__int128>(most) || high - low > static_cast<__int128>(8 * most))
        return {nullptr, type, std::move(shape), std::move(strides)};
    // Types wider than a byte are read where they are aligned, as the languages' own arrays are.
    auto memory = std::shared_ptr<std::uint8_t[]>(new std::uint8_t[static_cast<std::size_t>(high - low)]);
    in.fill(memory.get(), static_cast<std::size_t>(high - low));
    return {memory.get() - static_cast<std::int64_t>(low), type, std::move(shape), std::move(strides), memory};
}

inline ElementType any_type(Input& in) {
    const std::int64_t kind = in.below(10);
    const auto format = Format{static_cast<std::uint8_t>(in.below(static_cast<std::int64_t>(format_table.size())))};
    if (kind < 4) return static_cast<DType>(kind);
    if (kind < 6) return ElementType::uint8();
    if (kind == 6) return ElementType::int8();
    if (kind == 7) return ElementType::uint16();
    return kind == 8 ? ElementType::codes(format) : ElementType::packed_codes(format);
}

inline Recipe any_recipe(Input& in) {
    const auto rows = catalogue();
    const RecipeRow& row = rows[static_cast<std::size_t>(in.below(static_cast<std::int64_t>(rows.size())))];
    Fields fields;
    for (const FieldSpec& spec : row.fields) {
        if (!in.one_in(3)) continue;
        FieldValue value = spec.default_value();
        switch (spec.kind) {
            case FieldSpec::Kind::choice: {
                std::string_view rest = spec.text;
                for (std::int64_t skip = in.below(4); skip > 0 && rest.find('|') != std::string_view::npos; --skip)
                    rest.remove_prefix(rest.find('|') + 1);
                value = std::string(rest.substr(0, rest.find('|')));
                break;
            }
            case FieldSpec::Kind::boolean: value = in.below(2) == 1; break;
            case FieldSpec::Kind::fixed: break;
            default: value = in.extent();
        }
        if (in.one_in(64)) value = FieldValue{};
        fields[std::string(spec.name)] = value;
    }
    return make_recipe(row.name, fields);
}

inline Layout any_layout(Input& in) {
    return {.kind = static_cast<LayoutKind>(in.below(4)),
            .block_m = in.extent(),
            .block_n = in.extent(),
            .axis = in.one_in(4) ? -2 : -1};
}

}  // namespace breccia::fuzz
