// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>

#include "register.hpp"

namespace breccia::python {
namespace {

FieldValue field_value(const std::string& name, py::handle value) {
    if (value.is_none()) return std::monostate{};
    if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
    if (py::isinstance<py::float_>(value)) return value.cast<double>();
    if (PyIndex_Check(value.ptr()) != 0) {
        const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
        if (!integer) throw py::error_already_set();
        const auto number = PyLong_AsLongLong(integer.ptr());
        if (number == -1 && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            throw_value(name + " must fit in 64 bits, got " + quoted(value));
        }
        return std::int64_t{number};
    }
    // Anything else is quoted back by the check that refuses it.
    return quoted(value);
}

int to_axis(py::handle axis) {
    const std::int64_t value = to_integer(axis, "axis");
    return static_cast<int>(std::clamp<std::int64_t>(value, -1000, 1000));  // any but -1 and -2 is refused
}

py::object to_python(const FieldValue& value) {
    return std::visit(
        [](const auto& v) -> py::object {
            if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::monostate>)
                return py::none();
            else
                return py::cast(v);
        },
        value);
}

}  // namespace

void register_recipes(py::module_& m) {
    py::class_<Layout>(m, "Layout")
        .def_static("per_tensor", &Layout::per_tensor)
        .def_static(
            "per_block_k",
            [](py::handle block_size, py::handle axis) {
                return Layout::per_block_k(to_integer(block_size, "block_size"), to_axis(axis));
            },
            py::arg("block_size"), py::arg("axis") = -1)
        .def_static(
            "per_channel", [](py::handle axis) { return Layout::per_channel(to_axis(axis)); }, py::arg("axis") = -1)
        .def_static(
            "per_block_mn",
            [](py::handle block_m, py::handle block_n, py::handle axis) {
                return Layout::per_block_mn(to_integer(block_m, "block_m"), to_integer(block_n, "block_n"),
                                            to_axis(axis));
            },
            py::arg("block_m"), py::arg("block_n"), py::arg("axis") = -1)
        .def_property_readonly("kind", [](const Layout& l) { return name_of(l.kind); })
        .def_readonly("block_m", &Layout::block_m)
        .def_readonly("block_n", &Layout::block_n)
        .def_readonly("axis", &Layout::axis)
        .def_property_readonly("T", &Layout::transposed)
        .def("scale_shape",
             [](const Layout& l, py::handle shape) {
                 return py::tuple(py::cast(l.scale_shape(to_shape(shape, "shape"))));
             })
        .def(
            "validate",
            [](const Layout& l, py::handle shape, py::handle scale_shape) {
                l.validate(to_shape(shape, "data.shape"), to_shape(scale_shape, "scale.shape"));
            },
            py::arg("shape"), py::arg("scale_shape"))
        .def(py::self == py::self);

    py::class_<Recipe>(m, "Recipe")
        .def(py::init([](py::handle name, const py::dict& fields) {
                 Fields values;
                 for (const auto& [key, value] : fields) {
                     const std::string field = quoted(key);
                     values.emplace(field, field_value(field, value));
                 }
                 return make_recipe(to_text(name, "name"), values);
             }),
             py::arg("name"), py::arg("fields"))
        .def_readonly("name", &Recipe::name)
        .def_property_readonly("element", [](const Recipe& r) { return info(r.element).name; })
        .def_readonly("layout", &Recipe::layout)
        .def_readonly("two_level", &Recipe::two_level)
        .def_readonly("global_divides", &Recipe::global_divides)
        .def_property_readonly("has_zero_point", &Recipe::has_zero_point)
        .def_property_readonly("is_expanded", &Recipe::is_expanded)
        .def(py::self == py::self);

    m.def("catalogue", [] {
        // [(name, short name, {field: default})], from which Python's recipe classes are checked.
        py::list rows;
        for (const RecipeRow& row : catalogue()) {
            py::dict fields;
            for (const FieldSpec& field : row.fields)
                fields[py::str(std::string(field.name))] = to_python(field.default_value());
            rows.append(py::make_tuple(row.name, row.short_name, fields));
        }
        return rows;
    });
}

}  // namespace breccia::python
