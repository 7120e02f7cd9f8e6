// SPDX-License-Identifier: Apache-2.0
//
// Values in messages as the language of the caller writes them.
#pragma once

#include <atomic>
#include <string>

#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

enum class Spelling { cpp, python };
/// Of all messages, on every thread. The Python module sets its own.
inline std::atomic<Spelling> spelling{Spelling::cpp};

inline std::string spelled(bool value) {
    if (spelling == Spelling::python) return value ? "True" : "False";
    return value ? "true" : "false";
}
inline std::string spelled_none() { return spelling == Spelling::python ? "None" : "left out"; }

}  // namespace breccia::inline v0_4
