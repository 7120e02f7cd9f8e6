// SPDX-License-Identifier: Apache-2.0
//
// What a step of AdamW asks of a backend. Written once in kernels/adamw_kernels.inl.hpp over the vocabulary; every
// backend's bytes are equal.
#pragma once

#include <array>
#include <cstdint>

#include "breccia/codecs/registry.hpp"
#include "contract/random.hpp"

namespace breccia::inline v0_4 {

struct ScaleParams;

/// What all numbers of a step have in common.
struct AdamWFactors {
    float beta1 = 0, beta2 = 0;  ///< of the moments
    float rest1 = 1, rest2 = 1;  ///< 1 - beta
    float keep = 1;              ///< of a weight: 1 - lr * weight_decay
    float rate = 0;              ///< lr / (1 - beta1^step)
    float correction = 1;        ///< 1 / sqrt(1 - beta2^step)
    float eps = 0;
};

/// One moment of consecutive groups.
struct MomentGroups {
    std::uint8_t* codes = nullptr;
    std::uint8_t* scales = nullptr;      ///< of the type in ScaleParams, at any address
    std::uint16_t* exponents = nullptr;  ///< float16; null where moments are not expanded
    RandomKey key;                       ///< of draws, where moments are rounded stochastically
};

/// Consecutive groups: everything is read and written in place but for gradients.
struct AdamWGroups {
    float* weights = nullptr;
    const float* gradients = nullptr;
    std::int64_t groups = 0, group = 0;  ///< how many, and numbers in each: a multiple of 16, at most 256
    MomentGroups first, second;
    std::uint32_t position = 0;  ///< of the first draw
};

/// The longest group.
inline constexpr std::int64_t adamw_group = 256;

using AdamWKernel = void (*)(const AdamWGroups&, const AdamWFactors&, const ScaleParams&);

/// By format of the codes; null where no moment is kept in it.
struct AdamWKernels {
    std::array<AdamWKernel, Codecs::size> expanded;    ///< with an exponent for each group
    std::array<AdamWKernel, Codecs::size> stochastic;  ///< the first moment and the root of the second
};

}  // namespace breccia::inline v0_4
