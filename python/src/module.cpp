// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"
#include "tensor/spelling.hpp"

namespace py = pybind11;

namespace {

// In place of the memory that pybind11 would give, unset, to an object that `__new__` has made without `__init__`.
void* refuse_unmade(std::size_t) {
    throw std::runtime_error(
        "an object of breccia._core must be made by calling its class: its __init__() has not run");
}

void refuse_unmade_objects(const py::module_& m) {
    for (const auto& [name, value] : py::dict(m.attr("__dict__")))
        if (py::isinstance<py::type>(value))
            if (auto* type = py::detail::get_type_info(reinterpret_cast<PyTypeObject*>(value.ptr())))
                type->operator_new = refuse_unmade;
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
    m.doc() = "The compiled core of breccia.";
    breccia::spelling = breccia::Spelling::python;
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const breccia::Error& error) {
            py::set_error(error.kind() == breccia::Error::Kind::type ? PyExc_TypeError : PyExc_ValueError,
                          breccia::python::printable(error.what()).c_str());
        }
    });
    breccia::python::watch_signals();
    breccia::python::register_tensors(m);
    breccia::python::register_recipes(m);
    breccia::python::register_ops(m);
    breccia::python::register_compare(m);
    breccia::python::register_formats(m);
    breccia::python::register_word_layouts(m);
    breccia::python::register_cpu(m);
    breccia::python::register_launches(m);
#ifdef BRECCIA_XLA
    breccia::python::register_xla(m);
#endif
    refuse_unmade_objects(m);
}
