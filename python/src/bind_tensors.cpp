// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

namespace breccia::python {
namespace {

py::tuple shape_tuple(const Shape& shape) {
    py::tuple result(shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) result[i] = py::int_(shape[i]);
    return result;
}

}  // namespace

void register_tensors(py::module_& m) {
    py::class_<Array>(m, "Array")
        .def(py::init(&borrow), py::arg("pointer"), py::arg("shape"), py::arg("strides"), py::arg("dtype"))
        .def_static("of_elements", &borrow_elements, py::arg("pointer"), py::arg("shape"), py::arg("strides"),
                    py::arg("dtype"));

    py::class_<ScaledTensor>(m, "ScaledTensor")
        .def(py::init([](py::handle data, py::handle scale, const Recipe& recipe, const Layout& layout,
                         py::handle zero_point, py::handle global_scale, py::handle shape, py::handle original_dtype) {
                 std::optional<Shape> logical;
                 if (!shape.is_none()) logical = to_shape(shape, "shape");
                 return ScaledTensor(to_array(data, "data", true), to_array(scale, "scale", true), recipe, layout,
                                     {.zero_point = to_optional_array(zero_point, "zero_point", true),
                                      .global_scale = to_optional_array(global_scale, "global_scale", true),
                                      .shape = std::move(logical),
                                      .original_dtype = parse_dtype(to_text(original_dtype, "original_dtype"))});
             }),
             py::arg("data"), py::arg("scale"), py::arg("recipe"), py::arg("layout"), py::arg("zero_point"),
             py::arg("global_scale"), py::arg("shape"), py::arg("original_dtype"))
        .def_property_readonly("shape", [](const ScaledTensor& t) { return shape_tuple(t.shape()); })
        .def_property_readonly("nbytes", &ScaledTensor::nbytes)
        .def_property_readonly("packed_nbytes", &ScaledTensor::packed_nbytes)
        .def_property_readonly("is_packed", &ScaledTensor::is_packed)
        .def_property_readonly("original_dtype", [](const ScaledTensor& t) { return name_of(t.original_dtype()); })
        .def_property_readonly("layout", &ScaledTensor::layout)
        .def_property_readonly("T", &ScaledTensor::transposed);
}

}  // namespace breccia::python
