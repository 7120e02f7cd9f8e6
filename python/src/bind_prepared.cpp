// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

namespace breccia::python {
namespace {

thread_local Precision precision_here = Precision::exact;

// `with PrecisionScope("fast"):` around products of this thread. A scope, so that the frameworks' operators need not
// carry one more argument.
class PyPrecisionScope {
public:
    explicit PyPrecisionScope(std::string_view name) : precision_(name == "fast" ? Precision::fast : Precision::exact) {
        if (name != "fast" && name != "exact")
            throw_value("precision must be 'exact' or 'fast', got '" + std::string(name) + "'");
    }
    void enter() {
        previous_ = precision_here;
        precision_here = precision_;
    }
    void exit() const { precision_here = previous_; }

private:
    Precision precision_, previous_ = Precision::exact;
};

}  // namespace

Precision current_precision() { return precision_here; }

void register_prepared(py::module_& m) {
    // A prepared weight is a ScaledTensor to Python: the same values in memory of the core's own.
    m.def(
        "prepare",
        [](const ScaledTensor& weight) {
            const py::gil_scoped_release release;
            return PreparedWeight(weight).tensor();
        },
        py::arg("weight"));
    py::class_<PyPrecisionScope>(m, "PrecisionScope")
        .def(py::init<std::string_view>(), py::arg("precision"))
        .def("__enter__", &PyPrecisionScope::enter)
        .def("__exit__", [](const PyPrecisionScope& scope, const py::args&) { scope.exit(); });
}

}  // namespace breccia::python
