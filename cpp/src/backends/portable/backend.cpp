// SPDX-License-Identifier: Apache-2.0
//
// The reference backend: the shared kernels over plain C++, for every machine.
#include "backends/begin.hpp"

namespace breccia::portable {
namespace {
// clang-format off: sorting would break the order
#include "kernels/decode_table.inl.hpp"
#include "backends/portable/vec.hpp"
#include "kernels/transpose.inl.hpp"
#include "kernels/all.inl.hpp"
// clang-format on
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels = make_table("portable");

}  // namespace breccia::portable
