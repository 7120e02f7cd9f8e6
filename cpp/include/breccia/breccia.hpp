// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "breccia/catalogue.hpp"
#include "breccia/codecs/registry.hpp"
#include "breccia/compare.hpp"
#include "breccia/cpu.hpp"
#include "breccia/error.hpp"
#include "breccia/formats.hpp"
#include "breccia/ops.hpp"
#include "breccia/scaled_tensor.hpp"
#include "breccia/word_layouts.hpp"
