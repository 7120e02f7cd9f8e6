// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

namespace breccia::python {
namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Bytes = py::array_t<std::uint8_t, py::array::c_style>;

template <class T>
std::span<const T> span_of(const py::array_t<T, py::array::c_style>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}
template <class T>
std::span<T> mutable_span(py::array_t<T, py::array::c_style>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}
template <class To, class From>
py::array_t<To, py::array::c_style> empty_like(const From& array) {
    return py::array_t<To, py::array::c_style>(std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
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
        const auto from = span_of(x);
        const auto to = mutable_span(codes);
        const Released release;
        encode(from, format, to);
        return codes;
    });
    m.def("decode", [](const Bytes& codes, py::handle name) {
        const Format format = to_format(name);
        auto x = empty_like<float>(codes);
        const auto from = span_of(codes);
        const auto to = mutable_span(x);
        const Released release;
        decode(from, format, to);
        return x;
    });
    m.def("pack", [](const Bytes& codes) {
        Bytes packed((codes.size() + 1) / 2);
        pack(span_of(codes), mutable_span(packed));
        return packed;
    });
    m.def("unpack", [](const Bytes& packed, py::handle count) {
        const std::int64_t n = to_integer(count, "n");
        if (n < 0 || n / 2 + n % 2 != packed.size())
            throw_value("n must be the number of codes in " + std::to_string(packed.size()) + " packed bytes, got " +
                        std::to_string(n));
        Bytes codes(n);
        unpack(span_of(packed), mutable_span(codes));
        return codes;
    });
}

}  // namespace breccia::python
