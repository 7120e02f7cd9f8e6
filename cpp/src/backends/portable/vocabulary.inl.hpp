// SPDX-License-Identifier: Apache-2.0
//
// What every unit of this backend is written with.
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/portable/vec.hpp"
#include "kernels/transpose.inl.hpp"
#include "kernels/lanes.inl.hpp"
#include "kernels/bfloat16.inl.hpp"
// clang-format on
