// SPDX-License-Identifier: Apache-2.0
//
// Every shared kernel, in dependency order. Included inside `namespace breccia::<target> { namespace {`, after vec.hpp.
// clang-format off: sorting would break the order
#include "kernels/bfloat16.inl.hpp"
#include "kernels/scale_rules.inl.hpp"
#include "kernels/encode.inl.hpp"
#include "kernels/stochastic.inl.hpp"
#include "kernels/quantize.inl.hpp"
#include "kernels/group_scales.inl.hpp"
#include "kernels/quantize_group.inl.hpp"
#include "kernels/dequantize.inl.hpp"
#include "kernels/convert.inl.hpp"
#include "kernels/gemm.inl.hpp"
#include "kernels/table.inl.hpp"
// clang-format on
