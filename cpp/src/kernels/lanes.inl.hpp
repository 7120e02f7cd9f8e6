// SPDX-License-Identifier: Apache-2.0
//
// How many numbers kernels take at a time: a vector F, or four.

inline constexpr std::int64_t lanes = 16, wide = 4 * lanes;
