// SPDX-License-Identifier: Apache-2.0

#include "backends/avx512_bf16/vec.hpp"
