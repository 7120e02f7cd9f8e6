// SPDX-License-Identifier: Apache-2.0
//
// The version of these headers, that of the library, and what a declaration needs to be seen outside a shared one.
#pragma once

#if defined(_MSVC_LANG)
#define BRECCIA_CPLUSPLUS _MSVC_LANG  ///< the language's version, until the check below
#else
#define BRECCIA_CPLUSPLUS __cplusplus  ///< the language's version, until the check below
#endif
#if BRECCIA_CPLUSPLUS < 202002L
#error "breccia needs C++20: compile with -std=c++20, or set target_compile_features(your_target PRIVATE cxx_std_20)"
#endif
#undef BRECCIA_CPLUSPLUS

#include <string_view>

/// The version of these headers.
/// @{
#define BRECCIA_VERSION_MAJOR 0
#define BRECCIA_VERSION_MINOR 4
#define BRECCIA_VERSION_PATCH 0
/// @}

/// \def BRECCIA_API
/// Marks the public functions and classes. BRECCIA_SHARED is defined for a shared library of breccia and its users,
/// BRECCIA_BUILDING while it is built; CMake defines both. In a static library nothing is marked, so that a shared
/// library which it is linked into exports nothing of it.
#if !defined(BRECCIA_SHARED)
#define BRECCIA_API
#elif defined(_WIN32) && defined(BRECCIA_BUILDING)
#define BRECCIA_API __declspec(dllexport)
#elif defined(_WIN32)
#define BRECCIA_API __declspec(dllimport)
#else
#define BRECCIA_API __attribute__((visibility("default")))
#endif

/// Block-scaled low-precision tensors. Everything is in the inline namespace of the minor version: programs write
/// breccia::cast, and the linker sees breccia::v0_4::cast, so that one program may hold two versions and neither gets
/// the other's types.
namespace breccia::inline v0_4 {

/// Of the library that is linked, "0.4.0"; the macros are of the headers that were included.
BRECCIA_API std::string_view version();

}  // namespace breccia::inline v0_4
