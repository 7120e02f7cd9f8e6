// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace breccia::python {
namespace {

// `with IeeeArithmetic():` around core calls on a thread that someone else set to flush subnormals to zero, as XLA
// does to those it calls back from.
class PyIeeeArithmetic {
public:
#if defined(__SSE2__) || defined(_M_X64)
    void enter() {
        saved_ = _mm_getcsr();
        _mm_setcsr(0x1F80);  // the power-on value: nearest even, subnormals, no traps
    }
    void exit() const { _mm_setcsr(saved_); }

private:
    unsigned saved_ = 0x1F80;
#elif defined(__aarch64__)
    void enter() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
    }
    void exit() const { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

private:
    std::uint64_t saved_ = 0;
#else
    void enter() {}
    void exit() const {}
#endif
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
        .def("__exit__", [](const PyIeeeArithmetic& scope, const py::args&) { scope.exit(); });
}

}  // namespace breccia::python
