// SPDX-License-Identifier: Apache-2.0
#include "breccia/word_layouts.hpp"
#include "given_arrays.hpp"

namespace breccia::python {
namespace {

using Words = Given<std::uint32_t>;
using Bytes = Given<std::uint8_t>;
using Order = Given<std::int64_t>;

template <class T>
std::pair<std::int64_t, std::int64_t> extents(const Given<T>& array, const char* name) {
    if (array.ndim() != 2)
        throw_value(std::string(name) + " must be a matrix, got " + std::to_string(array.ndim()) + " axes");
    return {array.shape(0), array.shape(1)};
}

int checked_bits(py::handle bits) {
    const std::int64_t n = to_integer(bits, "bits");
    if (n != 4 && n != 8) throw_value("bits must be 4 or 8, got " + std::to_string(n));
    return static_cast<int>(n);
}

}  // namespace

void register_word_layouts(py::module_& m) {
    m.def("codes_from_gptq", [](const Words& words, py::handle bits, const Order& order, std::uint32_t flip) {
        const auto [down, across] = extents(words, "words");
        const int width = checked_bits(bits);
        const WordShape shape{.rows = across, .columns = down * 32 / width, .bits = width, .flip = flip};
        return converted<std::uint8_t>(words, {across, 4 * down},
                                       [&](auto from, auto to) { codes_from_gptq(from, shape, read(order), to); });
    });
    m.def("codes_to_gptq", [](const Bytes& codes, py::handle bits, const Order& order, std::uint32_t flip) {
        const auto [rows, bytes] = extents(codes, "codes");
        const int width = checked_bits(bits);
        const WordShape shape{.rows = rows, .columns = bytes * 8 / width, .bits = width, .flip = flip};
        return converted<std::uint32_t>(codes, {bytes / 4, rows},
                                        [&](auto from, auto to) { codes_to_gptq(from, shape, read(order), to); });
    });
    m.def("codes_from_awq", [](const Words& words, std::uint32_t flip) {
        const auto [columns, across] = extents(words, "words");
        const WordShape shape{.rows = 8 * across, .columns = columns, .flip = flip};
        return converted<std::uint8_t>(words, {8 * across, (columns + 1) / 2},
                                       [&](auto from, auto to) { codes_from_awq(from, shape, to); });
    });
    m.def("codes_to_awq", [](const Bytes& codes, py::handle columns, std::uint32_t flip) {
        const auto [rows, bytes] = extents(codes, "codes");
        const std::int64_t wide = to_integer(columns, "columns");
        if (wide < 0 || wide / 2 + wide % 2 != bytes)
            throw_value("columns must be the number of codes in " + std::to_string(bytes) + " bytes of a row, got " +
                        std::to_string(wide));
        const WordShape shape{.rows = rows, .columns = wide, .flip = flip};
        return converted<std::uint32_t>(codes, {wide, rows / 8},
                                        [&](auto from, auto to) { codes_to_awq(from, shape, to); });
    });
}

}  // namespace breccia::python
