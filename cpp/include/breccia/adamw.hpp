// SPDX-License-Identifier: Apache-2.0
//
// A step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) whose two moments are codes, in one pass over the weights.
#pragma once

#include <optional>

#include "breccia/array.hpp"
#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// One moment of weights, in groups of consecutive ones; the last is filled up with zeros, and groups that follow it
/// are left as they are. C-contiguous memory.
struct Moment {
    Array codes;                     ///< a byte each, of whole groups: at least as many as hold the weights
    Array scale;                     ///< float32, or bytes of E8M0, one for each group
    std::optional<Array> exponents;  ///< float16, one for each group, of moments whose groups are expanded
};

/// Numbers of a step.
struct AdamWOptions {
    double lr = 1e-3;            ///< learning rate
    double beta1 = 0.9;          ///< of the running average of gradients
    double beta2 = 0.999;        ///< of that of their squares
    double eps = 1e-8;           ///< added to the denominator
    double weight_decay = 1e-2;  ///< times lr, what a weight loses of itself
    std::int64_t step = 1;       ///< how many steps there are with this one
};

/// Updates weights and both moments in place; with m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2 before
/// they are rounded, w becomes w (1 - lr weight_decay) - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps),
/// in float32. Where beta1^2 < beta2, |m| / sqrt(v / (1 - beta2^step)) is kept to the most that any gradients give
/// before rounding, by the inequality of Cauchy and Schwarz: (1 - beta1) sqrt((1 - beta2^step) (1 - r^step) / ((1 -
/// beta2) (1 - r))) with r = beta1^2 / beta2.
///
/// With exponents a moment's parts are those of a ScaledTensor of recipes::expanded of E4M3, or of
/// recipes::int8_expanded, and codes are those of a cast to it, but that a NaN has no sign. Without exponents `second`
/// holds the square root of v, and codes are rounded stochastically, by draws that step and place decide. Recipes: E4M3
/// with E8M0 scales.
///
/// Bytes depend neither on the number of threads nor on the backend. Throws Error where weights and gradients are not
/// C-contiguous arrays of numbers of one size, moments are not as above, or memory overlaps.
BRECCIA_API void adamw_step(const Array& weights, const Array& gradients, const Moment& first, const Moment& second,
                            const Recipe& recipe, const AdamWOptions& options);

}  // namespace breccia::inline v0_4
