// SPDX-License-Identifier: Apache-2.0
//
// Values in messages as the language of the caller writes them.
#pragma once

#include <string>

#include "breccia/error.hpp"

namespace breccia::inline v0_4 {

inline std::string spelled(bool value) {
    if (spelling() == Spelling::python) return value ? "True" : "False";
    return value ? "true" : "false";
}
inline std::string spelled_none() { return spelling() == Spelling::python ? "None" : "left out"; }

}  // namespace breccia::inline v0_4
