// SPDX-License-Identifier: Apache-2.0
#include "given_arrays.hpp"

namespace breccia::python {
namespace {

using Floats = Given<float>;
using Bytes = Given<std::uint8_t>;

template <class T>
Extents shape_of(const Given<T>& array) {
    return {array.shape(), array.shape() + array.ndim()};
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
        return converted<std::uint8_t>(x, shape_of(x), [&](auto from, auto to) { encode(from, format, to); });
    });
    m.def("decode", [](const Bytes& codes, py::handle name) {
        const Format format = to_format(name);
        return converted<float>(codes, shape_of(codes), [&](auto from, auto to) { decode(from, format, to); });
    });
    m.def("pack", [](const Bytes& codes) { return converted<std::uint8_t>(codes, {(codes.size() + 1) / 2}, pack); });
    m.def("unpack", [](const Bytes& packed, py::handle count) {
        const std::int64_t n = to_integer(count, "n");
        if (n < 0 || n / 2 + n % 2 != packed.size())
            throw_value("n must be the number of codes in " + std::to_string(packed.size()) + " packed bytes, got " +
                        std::to_string(n));
        return converted<std::uint8_t>(packed, {n}, unpack);
    });
    m.def("pack_sixes",
          [](const Bytes& codes) { return converted<std::uint8_t>(codes, {codes.size() / 4 * 3}, pack_sixes); });
    m.def("unpack_sixes",
          [](const Bytes& packed) { return converted<std::uint8_t>(packed, {packed.size() / 3 * 4}, unpack_sixes); });
}

}  // namespace breccia::python
