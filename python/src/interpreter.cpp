// SPDX-License-Identifier: Apache-2.0
#include "interpreter.hpp"

#include <chrono>
#include <thread>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "breccia/cpu.hpp"

namespace breccia::python {
namespace {

namespace py = pybind11;

// Only Python's main thread runs handlers of signals; others need not wait for the lock.
unsigned long main_thread = 0;

void run_signal_handlers() {
    if (PyThread_get_thread_ident() != main_thread) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

[[noreturn]] void stop_for_good() {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

Released::~Released() {
    if (is_finalizing()) stop_for_good();
#if defined(__GLIBCXX__)
    // Finalization may begin here: before 3.14 Python then ends the thread by unwinding it.
    try {
        PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
        stop_for_good();
    }
#else
    PyEval_RestoreThread(state_);
#endif
}

void watch_signals() {
    main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
    set_interrupt_check(run_signal_handlers);
}

}  // namespace breccia::python
