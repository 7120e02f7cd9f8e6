// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "buffers.hpp"

namespace breccia::python {

void register_tensors(py::module_& m);
void register_recipes(py::module_& m);
void register_ops(py::module_& m);
void register_formats(py::module_& m);
void register_cpu(py::module_& m);

}  // namespace breccia::python
