// SPDX-License-Identifier: Apache-2.0
//
// A target region: the functions between BEGIN and END may use the named instruction set extensions, whatever flags
// the file is compiled with. Nothing may be included inside but kernels (.inl.hpp, vec.hpp): code of the standard
// library compiled here could be the copy the linker keeps for every other file. Emulated backends have no extensions.
#pragma once

#define BRECCIA_PRAGMA(text) _Pragma(#text)
#if defined(BRECCIA_EMULATED_BACKEND)
#define BRECCIA_TARGET_BEGIN(isa)
#define BRECCIA_TARGET_END
#elif defined(__clang__)
// An unknown extension would make clang ignore the whole attribute; CMake turns that warning into an error.
#define BRECCIA_TARGET_BEGIN(isa) \
    BRECCIA_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define BRECCIA_TARGET_END BRECCIA_PRAGMA(clang attribute pop)
#elif defined(__GNUC__)
#define BRECCIA_TARGET_BEGIN(isa) BRECCIA_PRAGMA(GCC push_options) BRECCIA_PRAGMA(GCC target(isa))
#define BRECCIA_TARGET_END BRECCIA_PRAGMA(GCC pop_options)
#else
#error "breccia needs gcc or clang (on Windows clang-cl): its kernels are written with their vector types"
#endif
