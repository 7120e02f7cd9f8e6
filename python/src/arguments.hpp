// SPDX-License-Identifier: Apache-2.0
//
// Plain values from Python: each function throws an Error of one sentence that names the argument, where pybind11's own
// conversion would answer with the signatures that it knows.
#pragma once

#include <pybind11/pybind11.h>

#include "breccia/array.hpp"
#include "breccia/error.hpp"

namespace breccia::python {

/// UTF-8. What has no UTF-8 is escaped, to be quoted by whoever does not know the name.
std::string to_text(pybind11::handle object, const char* argument);

std::int64_t to_integer(pybind11::handle object, const char* argument);

Shape to_shape(pybind11::handle object, const char* argument);

/// str(object), escaped as above.
std::string quoted(pybind11::handle object);

/// The text with its control characters escaped, on one line.
std::string printable(std::string_view text);

/// A C++ object behind a Python one.
template <class T>
const T& to_value(pybind11::handle object, const char* argument, const char* what) {
    if (!pybind11::isinstance<T>(object))
        throw_type(std::string(argument) + " must be " + what + ", got " + quoted(object));
    return object.cast<const T&>();
}

}  // namespace breccia::python
