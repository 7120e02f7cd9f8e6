// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

namespace breccia::python {
namespace {

// `with BackendScope(name):` around core calls of this thread. May be entered again before it is left.
class PyBackendScope {
public:
    explicit PyBackendScope(std::string name) : name_(std::move(name)) {}
    ~PyBackendScope() {
        while (!scopes_.empty()) scopes_.pop_back();
    }
    PyBackendScope(const PyBackendScope&) = delete;
    PyBackendScope& operator=(const PyBackendScope&) = delete;
    void enter() { scopes_.push_back(std::make_unique<BackendScope>(name_)); }
    void exit() {
        if (scopes_.empty()) throw_value("BackendScope must be entered before it is left");
        scopes_.pop_back();
    }

private:
    std::string name_;
    std::vector<std::unique_ptr<BackendScope>> scopes_;
};

}  // namespace

void register_cpu(py::module_& m) {
    m.def("cpu_info", [] {
        const CpuInfo found = cpu_info();
        py::dict result;
        result["backend"] = found.backend;
        result["supported"] = found.supported;
        result["left_out"] = found.left_out;
        result["features"] = found.features;
        result["threads"] = found.threads;
        return result;
    });
    m.def("matmul_kernels", [] {
        py::list result;
        for (const MatmulKernel& kernel : released(matmul_kernels))
            result.append(
                py::make_tuple(kernel.recipe, kernel.activations, kernel.prepared, kernel.rows, kernel.kernel));
        return result;
    });
    m.def("matmul_rules", [] {
        py::list result;
        for (const MatmulRule& rule : matmul_rules())
            result.append(
                py::make_tuple(rule.backend, rule.weights, rule.activations, rule.count, rule.kernel, rule.unless));
        return result;
    });
    m.def("set_backend", [](py::handle name) { set_backend(to_text(name, "name")); }, py::arg("name"));
    m.def(
        "set_num_threads",
        [](py::handle count) {
            constexpr std::int64_t most = std::numeric_limits<int>::max();
            set_num_threads(static_cast<int>(std::clamp<std::int64_t>(to_integer(count, "count"), -1, most)));
        },
        py::arg("count"));
    m.def("num_threads", &num_threads);
    py::class_<PyBackendScope>(m, "BackendScope")
        .def(py::init([](py::handle name) { return std::make_unique<PyBackendScope>(to_text(name, "name")); }),
             py::arg("name"))
        .def("__enter__", &PyBackendScope::enter)
        .def("__exit__", [](PyBackendScope& scope, const py::args&) { scope.exit(); });
}

}  // namespace breccia::python
