// SPDX-License-Identifier: Apache-2.0
//
// All headers but that of C.
#pragma once

// First, so that its error for an older language comes before any other.
// clang-format off
#include "breccia/version.hpp"
// clang-format on

#include "breccia/adamw.hpp"
#include "breccia/catalogue.hpp"
#include "breccia/codecs/registry.hpp"
#include "breccia/compare.hpp"
#include "breccia/cpu.hpp"
#include "breccia/error.hpp"
#include "breccia/formats.hpp"
#include "breccia/gptq.hpp"
#include "breccia/ops.hpp"
#include "breccia/print.hpp"
#include "breccia/recipes.hpp"
#include "breccia/scaled_tensor.hpp"
#include "breccia/six_bits.hpp"
#include "breccia/transpose.hpp"
#include "breccia/word_layouts.hpp"
