// SPDX-License-Identifier: Apache-2.0
//
// A recipe is plain data: element format, scale format, layout and scale rule. The named recipes are the rows of
// catalogue.hpp.
#pragma once

#include <tuple>

#include "breccia/layout.hpp"

namespace breccia::inline v0_4 {

/// How a block's scale follows from its statistics. Arithmetic: kernels/scale_rules.inl.hpp, docs/scale-rules.md.
enum class ScaleRule : std::uint8_t {
    divide,         ///< s = amax / max, codes = encode(x / s): torchao Float8Tensor, and the integer formats
    multiply,       ///< m = max / amax, codes = encode(x * m), stored 1 / m: TransformerEngine's FP8
    mx_rceil,       ///< E8M0 of amax / max rounded up: TransformerEngine, cuBLAS, torchao RCEIL
    mx_floor,       ///< exponent(amax) - emax: OCP MX v1.0 section 6.3, torchao FLOOR
    mx_ceil,        ///< one more unless amax is a power of two: torchao CEIL
    mx_even,        ///< amax rounded to the element's precision first: torchao EVEN
    nvfp4_te,       ///< E4M3 of amax * (2688 / global amax) / 6: TransformerEngine
    nvfp4_torchao,  ///< the same as a division, clamped to [2^-6, 448]: torchao
    asymmetric      ///< s = (max - min) / levels with an integer zero point
};

/// Whether scales follow from the rule alone, or the best of some beside it is taken: least squared error.
enum class ScaleSearch : std::uint8_t { amax, mse };

/// The types a scale array can have. Codes (e8m0, e4m3) are stored as bytes.
enum class ScaleType : std::uint8_t { float32, float64, float16, bfloat16, e8m0, e4m3 };

/// Whether scales of that type are codes.
constexpr bool is_coded(ScaleType type) { return type >= ScaleType::e8m0; }
/// What an array of such scales holds.
constexpr ElementType element_type(ScaleType type) {
    if (is_coded(type)) return ElementType::uint8();
    return static_cast<DType>(type);
}
/// Of scales that are codes.
constexpr Format format_of_scale(ScaleType type) {
    return type == ScaleType::e8m0 ? format_of<Float8E8M0FNU> : format_of<Float8E4M3FN>;
}

/// How a tensor is quantized, and what its parts mean afterwards. See make_recipe() and recipes.hpp.
struct Recipe {
    std::string_view name = {};              ///< the catalogue's name, e.g. "MXFP8BlockScaling"; it must stay alive
    Format element{};                        ///< of the codes
    ScaleType scale = ScaleType::float32;    ///< of the block scales
    Layout layout = {};                      ///< PerTensor, PerBlockK, …; block_n = 0 stands for the whole row
    ScaleRule rule = ScaleRule::divide;      ///< how a scale follows from its block
    ScaleSearch search = ScaleSearch::amax;  ///< which scales are tried
    bool two_level = false;                  ///< a float32 global scale over the block scales
    bool global_divides = false;             ///< the global scale divides block scales, as compressed-tensors stores it
    bool ragged = false;                     ///< the last block of an axis may be short
    int margin = 0;                          ///< the scale is multiplied by 2^margin (DelayedScaling)

    /// Whether tensors have a zero point for each scale.
    [[nodiscard]] bool has_zero_point() const { return rule == ScaleRule::asymmetric; }

    /// Whether they ask for the same, whatever their names.
    friend bool operator==(const Recipe& a, const Recipe& b) {
        const auto asked = [](const Recipe& r) {
            return std::tie(r.element, r.scale, r.layout, r.rule, r.search, r.two_level, r.global_divides, r.ragged,
                            r.margin);
        };
        return asked(a) == asked(b);
    }
};

/// Throws Error unless a cast can follow it: a rule that makes scales of that type for codes of that format, blocks
/// along the last axis, a global scale only where the rule has one, a margin from -126 to 126, and a short last block
/// only with PerBlockMN. A tensor that exists may have a recipe that no cast can follow.
BRECCIA_API void validate(const Recipe& recipe);

}  // namespace breccia::inline v0_4
