// SPDX-License-Identifier: Apache-2.0
//
// The only place where Python arrays become core arrays and back.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "breccia/breccia.hpp"

namespace breccia::python {

namespace py = pybind11;

/// Reads a NumPy array (ml_dtypes included) or an `Array` a framework made. With `keep` the result shares ownership
/// of the memory; otherwise it must not outlive `object`. Throws Error(type), naming the argument.
Array to_array(py::handle object, const char* argument, bool keep = false);
std::optional<Array> to_optional_array(py::handle object, const char* argument, bool keep = false);

/// The same for memory that will be written.
Array to_output(py::handle object, const char* argument);

/// A ScaledTensor or an array, kept alive for the duration of a call.
class PyOperand {
public:
    /// `half_words`: arrays of such are of bfloat16, which NumPy itself has no type for.
    PyOperand(py::handle object, const char* argument, bool half_words = false);
    [[nodiscard]] Operand get() const { return scaled_ != nullptr ? Operand(*scaled_) : Operand(array_); }

private:
    const ScaledTensor* scaled_ = nullptr;
    Array array_;
};

/// Memory a framework tells of, its strides in bytes or in elements. Throws Error naming `dtype` or `strides`.
Array borrow(std::uintptr_t pointer, Shape shape, Shape strides, std::string_view dtype);
Array borrow_elements(std::uintptr_t pointer, Shape shape, Shape strides, std::string_view dtype);

/// An uninitialised NumPy array of an element type, and a core array over its memory.
std::pair<py::array, Array> allocate_numpy(ElementType type, const Shape& shape);

/// Throws Error(type) unless it is the name of a type of numbers.
DType parse_dtype(std::string_view name);

}  // namespace breccia::python
