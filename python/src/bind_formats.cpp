// SPDX-License-Identifier: Apache-2.0
#include "given_arrays.hpp"

namespace breccia::python {
namespace {

using Floats = Given<float>;
using Bytes = Given<std::uint8_t>;

template <class To, class From>
Given<To> empty_like(const From& array) {
    return Given<To>(std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
}

Format to_format(py::handle name) { return parse_format(to_text(name, "format")); }

}  // namespace

void register_formats(py::module_& m) {
    m.def("format_names", [] {
        py::list names;
        for (const FormatInfo& format : format_table) names.append(format.name);
        return names;
    });
    m.def("format_info", [](py::handle name) {
        const FormatInfo& f = info(to_format(name));
        py::dict result;
        result["name"] = f.name;
        result["bits"] = f.bits;
        result["max"] = f.max;
        result["min"] = f.lowest;
        result["smallest"] = f.smallest;
        result["has_nan"] = f.has_nan;
        result["mantissa_bits"] = f.mantissa_bits;
        result["max_exponent"] = f.max_exponent;
        return result;
    });
    m.def("encode", [](const Floats& x, py::handle name) {
        const Format format = to_format(name);
        auto codes = empty_like<std::uint8_t>(x);
        const auto from = read(x);
        const auto to = write(codes);
        const Released release;
        encode(from, format, to);
        return codes;
    });
    m.def("decode", [](const Bytes& codes, py::handle name) {
        const Format format = to_format(name);
        auto x = empty_like<float>(codes);
        const auto from = read(codes);
        const auto to = write(x);
        const Released release;
        decode(from, format, to);
        return x;
    });
    m.def("pack", [](const Bytes& codes) {
        Bytes packed((codes.size() + 1) / 2);
        pack(read(codes), write(packed));
        return packed;
    });
    m.def("unpack", [](const Bytes& packed, py::handle count) {
        const std::int64_t n = to_integer(count, "n");
        if (n < 0 || n / 2 + n % 2 != packed.size())
            throw_value("n must be the number of codes in " + std::to_string(packed.size()) + " packed bytes, got " +
                        std::to_string(n));
        Bytes codes(n);
        unpack(read(packed), write(codes));
        return codes;
    });
    m.def("pack_sixes", [](const Bytes& codes) {
        Bytes packed(codes.size() / 4 * 3);
        const auto from = read(codes);
        const auto to = write(packed);
        const Released release;
        pack_sixes(from, to);
        return packed;
    });
    m.def("unpack_sixes", [](const Bytes& packed) {
        Bytes codes(packed.size() / 3 * 4);
        const auto from = read(packed);
        const auto to = write(codes);
        const Released release;
        unpack_sixes(from, to);
        return codes;
    });
}

}  // namespace breccia::python
