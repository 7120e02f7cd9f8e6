// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arguments.hpp"
#include "buffers.hpp"
#include "interpreter.hpp"

namespace breccia::python {

void register_tensors(py::module_& m);
void register_recipes(py::module_& m);
void register_ops(py::module_& m);
void register_compare(py::module_& m);
void register_formats(py::module_& m);
void register_word_layouts(py::module_& m);
void register_cpu(py::module_& m);
void register_launches(py::module_& m);

#ifdef BRECCIA_XLA
void register_xla(py::module_& m);
#endif

/// "exact" or "fast". Throws Error(value).
Precision parse_precision(std::string_view name);

}  // namespace breccia::python
