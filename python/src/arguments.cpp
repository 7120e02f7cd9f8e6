// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

namespace breccia::python {
namespace {

namespace py = pybind11;

std::string utf8(py::handle string) {
    const auto bytes =
        py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(string.ptr(), "utf-8", "backslashreplace"));
    if (!bytes) throw py::error_already_set();
    return bytes;
}

std::string type_name(py::handle object) { return utf8(py::type::handle_of(object).attr("__name__")); }

}  // namespace

std::string quoted(py::handle object) { return utf8(py::str(object)); }

std::string printable(std::string_view text) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string line;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '\n')
            line += "\\n";
        else if (byte < 0x20 || byte == 0x7F)
            (line += "\\x") += {digits[byte >> 4], digits[byte & 15]};
        else
            line += c;
    }
    return line;
}

std::string to_text(py::handle object, const char* argument) {
    if (!py::isinstance<py::str>(object))
        throw_type(std::string(argument) + " must be a string, got " + type_name(object));
    return utf8(object);
}

std::int64_t to_integer(py::handle object, const char* argument) {
    const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
    if (!integer) {
        PyErr_Clear();
        throw_type(std::string(argument) + " must be an integer, got " + type_name(object));
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    if (overflow != 0) throw_value(std::string(argument) + " must fit in 64 bits, got " + quoted(integer));
    return value;
}

Shape to_shape(py::handle object, const char* argument) {
    const auto items = py::reinterpret_steal<py::object>(
        py::isinstance<py::str>(object) ? nullptr : PySequence_Fast(object.ptr(), ""));
    if (!items) {
        PyErr_Clear();
        throw_type(std::string(argument) + " must be a sequence of integers, got " + type_name(object));
    }
    Shape shape;
    const Py_ssize_t rank = PySequence_Fast_GET_SIZE(items.ptr());
    for (Py_ssize_t i = 0; i < rank; ++i)
        shape.push_back(to_integer(PySequence_Fast_GET_ITEM(items.ptr(), i), argument));
    return shape;
}

}  // namespace breccia::python
