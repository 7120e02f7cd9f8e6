// SPDX-License-Identifier: Apache-2.0
#include "buffers.hpp"

#include "interpreter.hpp"

namespace breccia::python {
namespace {

// NumPy's numbers for its own types; fixed since 1.0. Extension types (ml_dtypes) go by name.
ElementType element_type(const py::dtype& dtype) {
    switch (dtype.num()) {
        case 1: return ElementType::int8();
        case 2: return ElementType::uint8();
        case 4: return ElementType::uint16();
        case 11: return DType::float32;
        case 12: return DType::float64;
        case 23: return DType::float16;
        default:
            return dtype.num() < 24 ? ElementType()
                                    : ElementType::parse(py::str(dtype.attr("name")).cast<std::string>());
    }
}

py::dtype numpy_dtype(ElementType type) {
    if (type.is_number() && type.dtype() == DType::bfloat16)
        return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
    return py::dtype(type.name());
}

std::shared_ptr<const void> hold(py::handle object) {
    auto* reference = new py::object(py::reinterpret_borrow<py::object>(object));
    return {reference, [](const py::object* held) {
                if (is_finalizing() && PyGILState_Check() == 0) return;  // nobody will miss it
                const py::gil_scoped_acquire gil;
                delete held;
            }};
}

Array from_numpy(const py::array& array, const char* argument) {
    const py::dtype dtype = array.dtype();
    const char order = dtype.byteorder();
    if (order != '=' && order != '|') throw_type(std::string(argument) + " must have the machine's byte order");
    const ElementType type = element_type(dtype);
    if (type.is_unknown())
        throw_type(std::string(argument) +
                   " must be an array of dtype float32, float64, float16, bfloat16, uint8, int8 or one of ml_dtypes' "
                   "formats, got "
                   "dtype " +
                   py::str(dtype).cast<std::string>());
    return {const_cast<void*>(array.data()), type, Shape(array.shape(), array.shape() + array.ndim()),
            Shape(array.strides(), array.strides() + array.ndim())};
}

}  // namespace

Array to_array(py::handle object, const char* argument, bool keep) {
    Array array;
    if (py::isinstance<py::array>(object))
        array = from_numpy(py::reinterpret_borrow<py::array>(object), argument);
    else if (py::isinstance<Array>(object))
        array = object.cast<const Array&>();
    else
        throw_type(std::string(argument) + " must be array-like with .shape and .dtype, got " +
                   py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>());
    if (keep) array.owner = hold(object);
    return array;
}

std::optional<Array> to_optional_array(py::handle object, const char* argument, bool keep) {
    if (object.is_none()) return std::nullopt;
    return to_array(object, argument, keep);
}

Array borrow(std::uintptr_t pointer, Shape shape, Shape strides, std::string_view dtype) {
    const ElementType type = ElementType::parse(dtype);
    if (type.is_unknown()) throw_type("dtype '" + std::string(dtype) + "' is not supported");
    return {reinterpret_cast<void*>(pointer), type, std::move(shape), std::move(strides)};
}

Array borrow_elements(std::uintptr_t pointer, Shape shape, Shape strides, std::string_view dtype) {
    const auto item = static_cast<std::int64_t>(ElementType::parse(dtype).size());
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < std::min(strides.size(), shape.size()); ++i) {
        std::int64_t& stride = strides[i];
        if (shape[i] <= 1) stride = 1;  // any number may stand there
        if (stride > most / item || stride < -most / item)
            throw_value("strides must be below 2^63 bytes, got " + to_string(strides));
        stride *= item;
    }
    return borrow(pointer, std::move(shape), std::move(strides), dtype);
}

Array to_output(py::handle object, const char* argument) {
    if (py::isinstance<py::array>(object) && !py::reinterpret_borrow<py::array>(object).writeable())
        throw_value(std::string(argument) + " must be writable, got a read-only array");
    return to_array(object, argument);
}

PyOperand::PyOperand(py::handle object, const char* argument, bool half_words) {
    if (py::isinstance<ScaledTensor>(object)) {
        scaled_ = &object.cast<const ScaledTensor&>();
        return;
    }
    array_ = to_array(object, argument);
    if (half_words && array_.type.is_half_word()) array_.type = DType::bfloat16;
}

std::pair<py::array, Array> allocate_numpy(ElementType type, const Shape& shape) {
    // Inside of NumPy's own memory, which knows of huge pages, at a cache line, where XLA takes arrays over uncopied.
    constexpr std::int64_t cache_line = 64;
    const std::int64_t bytes = element_count(shape, type.size()) * static_cast<std::int64_t>(type.size());
    const py::array_t<std::uint8_t> memory(bytes + cache_line);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    auto* aligned = reinterpret_cast<void*>((address + cache_line - 1) / cache_line * cache_line);
    py::array array(numpy_dtype(type), shape, aligned, memory);
    Array view = Array::borrow(aligned, type, shape);
    return {std::move(array), std::move(view)};
}

DType parse_dtype(std::string_view name) {
    const ElementType type = ElementType::parse(name);
    if (!type.is_number())
        throw_type("dtype must be 'float32', 'float64', 'float16' or 'bfloat16', got '" + std::string(name) + "'");
    return type.dtype();
}

}  // namespace breccia::python
