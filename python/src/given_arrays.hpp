// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "register.hpp"

namespace breccia::python {

inline constexpr int rows_and_aligned =
    static_cast<int>(py::array::c_style) | static_cast<int>(py::detail::npy_api::NPY_ARRAY_ALIGNED_);

/// An array of a caller, in rows without gaps that begin where its type may. Others are copied: tensors of a mapped
/// file begin at any byte.
template <class T>
using Given = py::array_t<T, rows_and_aligned>;

template <class T>
std::span<const T> read(const Given<T>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}
template <class T>
std::span<T> write(Given<T>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

using Extents = std::vector<py::ssize_t>;

/// A new array that convert(items of `array`, its items) fills while other Python threads run.
template <class To, class From, class Convert>
Given<To> converted(const Given<From>& array, const Extents& shape, Convert convert) {
    Given<To> made(shape);
    const auto from = read(array);
    const auto to = write(made);
    const Released release;
    convert(from, to);
    return made;
}

}  // namespace breccia::python
