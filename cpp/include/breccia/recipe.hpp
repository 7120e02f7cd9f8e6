// SPDX-License-Identifier: Apache-2.0
//
// A recipe is plain data: element format, scale format, layout and scale rule. The named recipes are the rows of
// catalogue.hpp.
#pragma once

#include <tuple>

#include "breccia/layout.hpp"

namespace breccia::inline v0_4 {

/// How a block's scale follows from its statistics: docs/design/0010-scale-rules.md, kernels/scale_rules.inl.hpp.
enum class ScaleRule : std::uint8_t {
    divide,         ///< s = amax / max, codes = encode(x / s): torchao Float8Tensor, and the integer formats
    multiply,       ///< m = max / amax, codes = encode(x * m), stored 1 / m: TransformerEngine's FP8
    mx_rceil,       ///< E8M0 of amax / max rounded up: TransformerEngine, cuBLAS, torchao RCEIL
    mx_floor,       ///< exponent(amax) - emax: OCP MX v1.0 section 6.3, torchao FLOOR
    mx_ceil,        ///< one more unless amax is a power of two: torchao CEIL
    mx_even,        ///< amax rounded to the element's precision first: torchao EVEN
    nvfp4_te,       ///< E4M3 of amax * (2688 / global amax) / 6: TransformerEngine
    nvfp4_torchao,  ///< the same as a division, clamped to [2^-6, 448]: torchao
    asymmetric,     ///< s = (max - min) / levels with an integer zero point
    expanded        ///< s = amax / max, codes = encode(sign(x) max (|x| / amax)^k), k of each block: COAT
};
/// The one with the largest number.
inline constexpr ScaleRule last_scale_rule = ScaleRule::expanded;

/// Whether scales, and zero points, follow from the least and the greatest value of a block, not from its amax.
constexpr bool takes_range(ScaleRule rule) { return rule == ScaleRule::asymmetric; }

/// What a rule makes.
enum class RuleScales : std::uint8_t { numbers, powers_of_two, e4m3 };

/// What there is to know of a rule beside its arithmetic.
struct ScaleRuleTraits {
    RuleScales scales;            ///< what it makes
    bool floats = false;          ///< whether it is for floating-point codes alone
    std::uint8_t least_code = 0;  ///< of E4M3: what smaller codes become
};
/// The row of a rule. A compiler refuses it where a rule has none.
constexpr ScaleRuleTraits traits_of(ScaleRule rule) {
    switch (rule) {
        case ScaleRule::divide:
        case ScaleRule::asymmetric:
        case ScaleRule::expanded: return {RuleScales::numbers};
        case ScaleRule::multiply: return {RuleScales::numbers, true};
        case ScaleRule::mx_rceil:
        case ScaleRule::mx_floor:
        case ScaleRule::mx_ceil:
        case ScaleRule::mx_even: return {RuleScales::powers_of_two, true};
        case ScaleRule::nvfp4_te: return {RuleScales::e4m3, true};
        case ScaleRule::nvfp4_torchao: return {RuleScales::e4m3, true, 8};  // 2^-6
    }
    return {};
}

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
    [[nodiscard]] bool has_zero_point() const { return takes_range(rule); }
    /// Whether tensors have an exponent for each scale, which they keep in the place of zero points.
    [[nodiscard]] bool is_expanded() const { return rule == ScaleRule::expanded; }
    /// Whether tensors have one of the two.
    [[nodiscard]] bool has_second_number() const { return has_zero_point() || is_expanded(); }

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
