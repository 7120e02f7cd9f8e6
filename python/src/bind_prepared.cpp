// SPDX-License-Identifier: Apache-2.0
#include "register.hpp"

namespace breccia::python {

void register_prepared(py::module_& m) {
    // A prepared weight is a ScaledTensor to Python: the same values in memory of the core's own.
    m.def(
        "prepare",
        [](const ScaledTensor& weight) {
            const Released release;
            return PreparedWeight(weight).tensor();
        },
        py::arg("weight"));
}

}  // namespace breccia::python
