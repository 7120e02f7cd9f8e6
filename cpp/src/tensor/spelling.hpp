// SPDX-License-Identifier: Apache-2.0
//
// Messages, and values in them as the language of the caller writes them.
#pragma once

#include <atomic>
#include <string>
#include <type_traits>

#include "breccia/array.hpp"
#include "breccia/error.hpp"

namespace breccia::inline v0_4 {

enum class Spelling { cpp, python };
/// Of all messages, on every thread. The Python module sets its own.
inline std::atomic<Spelling> spelling{Spelling::cpp};

template <class T>
std::string spelled(const T& value) {
    if constexpr (std::is_same_v<T, bool>)
        return spelling == Spelling::python ? (value ? "True" : "False") : (value ? "true" : "false");
    else if constexpr (std::is_arithmetic_v<T>)
        return std::to_string(value);
    else if constexpr (std::is_same_v<T, Shape>)
        return to_string(value);
    else
        return std::string(value);
}
inline std::string spelled_none() { return spelling == Spelling::python ? "None" : "left out"; }

/// Throw an Error whose message is these one after the other.
/// @{
template <class First, class Second, class... More>
[[noreturn]] void throw_value(const First& first, const Second& second, const More&... more) {
    throw_value(((spelled(first) + spelled(second)) + ... + spelled(more)));
}
template <class First, class Second, class... More>
[[noreturn]] void throw_type(const First& first, const Second& second, const More&... more) {
    throw_type(((spelled(first) + spelled(second)) + ... + spelled(more)));
}
/// @}

}  // namespace breccia::inline v0_4
