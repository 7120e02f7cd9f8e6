// SPDX-License-Identifier: Apache-2.0
//
// Rounding that makes good, in the columns still to be rounded, what rounding a column loses: GPTQ (Frantar et al.,
// "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023), with the columns
// ordered by activity and the scales chosen first.
#pragma once

#include <algorithm>

#include "breccia/ops.hpp"

namespace breccia::inline v0_4 {

/// How columns are gone through.
struct GptqOptions {
    bool act_order = true;  ///< by falling diagonal of the moments; else as they stand
    double damp = 0.02;     ///< what is added to the diagonal, in its mean; from 0 to 1
};

/// The damping to try where one below 1 leaves moments that are not positive definite.
[[nodiscard]] constexpr double more_damping(double damp) { return damp < 0.1 ? std::max(10 * damp, 0.01) : 1.0; }

/// What became of it.
struct GptqReport {
    double damp = 0;           ///< the largest that a matrix took: more than asked for where that was not enough
    std::int64_t dead = 0;     ///< columns of all matrices whose moment is zero: they are rounded to nearest
    std::int64_t nearest = 0;  ///< matrices whose moments no damping makes positive definite: rounded to nearest
};

/// Quantizes w (…, N, K) for products x @ transpose of w, given moments (K, K) or (…, K, K): sums or means of
/// transpose(x) @ x, symmetric, of which the lower half is read and the factor does not matter. Where only those of
/// runs of g neighbours are known they are (K / g, g, g) or (…, K / g, g, g), and count as zero elsewhere; that takes
/// memory for 128 K or g K numbers, whichever is more, beside what a cast takes. Scales and zero points are those of
/// cast(w, recipe, {importance = diagonal}), whose codes these are where the moments are diagonal. The bytes do not
/// depend on the number of threads; as those of matmul they may depend on the backend. Throws Error as cast_into does,
/// and where moments are not finite, not square, or negative on the diagonal.
BRECCIA_API GptqReport gptq_into(const Array& w, const Array& moments, const Recipe& recipe, const CastOutput& out,
                                 const GptqOptions& options = {});
/// Codes of a format that no recipe makes: element (n, k) is levels[codes[n, k]] * scale[n, k / run] + offset[n, k /
/// run].
struct LevelCodes {
    Array scale;   ///< float32 (N, K / run)
    Array offset;  ///< float32 of the same shape
    Array levels;  ///< float32 numbers in rising order, 256 at most
    Array codes;   ///< uint8 (N, K): the nearest, in whose place come others; those whose scale is zero stay
};

/// The same of w (N, K), whose scales and offsets stand, and are finite as w is. Throws Error where a shape does not
/// fit, a code has no level, or as the other does.
BRECCIA_API GptqReport gptq_into(const Array& w, const Array& moments, const LevelCodes& levels,
                                 const GptqOptions& options = {});
/// The same into memory of its own. `report`: where to, or null.
BRECCIA_API ScaledTensor gptq(const Array& w, const Array& moments, const Recipe& recipe,
                              const GptqOptions& options = {}, GptqReport* report = nullptr);

}  // namespace breccia::inline v0_4
