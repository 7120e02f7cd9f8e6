// SPDX-License-Identifier: Apache-2.0
//
// The lock of the interpreter and its signals, while the core works.
#pragma once

#include <pybind11/pybind11.h>

namespace breccia::python {

/// Lets other Python threads run while it lives. A thread that ends its work when the interpreter is being finalized,
/// as a daemon thread may, stops there for good: Python would unwind it through C++ frames that cannot be unwound.
class Released {
public:
    Released() : state_(PyEval_SaveThread()) {}
    ~Released();
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

private:
    PyThreadState* state_;
};

/// Calls f() while other Python threads run.
template <class F>
auto released(F f) {
    const Released release;
    return f();
}

bool is_finalizing();

/// Lets signals interrupt long work: Python's handlers run between its pieces, and what they raise ends it.
void watch_signals();

}  // namespace breccia::python
