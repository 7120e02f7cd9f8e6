// SPDX-License-Identifier: Apache-2.0
#include "ieee_arithmetic.hpp"
#include "register.hpp"

namespace breccia::python {
namespace {

// `with IeeeArithmetic():` around core calls.
class PyIeeeArithmetic {
public:
    void enter() { scope_.emplace(); }
    void exit() { scope_.reset(); }

private:
    std::optional<IeeeArithmetic> scope_;
};

// `with BackendScope(name):` around core calls of this thread.
class PyBackendScope {
public:
    explicit PyBackendScope(std::string name) : name_(std::move(name)) {}
    void enter() { scope_ = std::make_unique<BackendScope>(name_); }
    void exit() { scope_.reset(); }

private:
    std::string name_;
    std::unique_ptr<BackendScope> scope_;
};

}  // namespace

void register_cpu(py::module_& m) {
    m.def("cpu_info", [] {
        const CpuInfo found = cpu_info();
        py::dict result;
        result["backend"] = found.backend;
        result["supported"] = found.supported;
        result["features"] = found.features;
        result["threads"] = found.threads;
        return result;
    });
    m.def("matmul_kernels", [] {
        std::vector<MatmulKernel> found;
        {
            const py::gil_scoped_release release;
            found = matmul_kernels();
        }
        py::list result;
        for (const MatmulKernel& kernel : found)
            result.append(
                py::make_tuple(kernel.recipe, kernel.activations, kernel.prepared, kernel.rows, kernel.kernel));
        return result;
    });
    m.def("set_backend", &set_backend, py::arg("name"));
    m.def("set_num_threads", &set_num_threads, py::arg("count"));
    m.def("num_threads", &num_threads);
    py::class_<PyBackendScope>(m, "BackendScope")
        .def(py::init<std::string>(), py::arg("name"))
        .def("__enter__", &PyBackendScope::enter)
        .def("__exit__", [](PyBackendScope& scope, const py::args&) { scope.exit(); });
    py::class_<PyIeeeArithmetic>(m, "IeeeArithmetic")
        .def(py::init<>())
        .def("__enter__", &PyIeeeArithmetic::enter)
        .def("__exit__", [](PyIeeeArithmetic& scope, const py::args&) { scope.exit(); });
}

}  // namespace breccia::python
