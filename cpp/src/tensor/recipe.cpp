// SPDX-License-Identifier: Apache-2.0
#include "breccia/recipe.hpp"

#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

bool is_mx(ScaleRule rule) { return traits_of(rule).scales == RuleScales::powers_of_two; }
bool is_nvfp4(ScaleRule rule) { return traits_of(rule).scales == RuleScales::e4m3; }

template <class Value>
[[noreturn]] void reject(std::string_view field, std::string_view requirement, const Value& value) {
    throw_value("recipe.", field, " must be ", requirement, ", got ", value);
}

void check_element(const Recipe& recipe) {
    const FormatInfo& element = info(recipe.element);
    if (!element.is_target) reject("element", "a format that recipes quantize to", element.name);
    if (is_nvfp4(recipe.rule) && recipe.element != format_of<Float4E2M1FN>)
        reject("element", "float4_e2m1fn for a rule of NVFP4", element.name);
    if (traits_of(recipe.rule).floats && element.family != CodecFamily::minifloat)
        reject("element", "a floating-point format for this rule", element.name);
    if (recipe.has_zero_point() && element.family != CodecFamily::integer)
        reject("element", "an integer format for a rule with zero points", element.name);
    if (recipe.is_expanded() && (element.bits != 8 || element.lowest >= 0))
        reject("element", "a signed format of 8 bits for a rule with exponents", element.name);
}

void check_scale(const Recipe& recipe) {
    if (recipe.scale == ScaleType::float64)
        reject("scale", "float32, float16, bfloat16, e8m0 or e4m3", "float64: scales are worked out in float32");
    const auto check_pair = [&](bool rule_has_it, ScaleType type, const char* rules) {
        if (rule_has_it == (recipe.scale == type)) return;
        reject("scale",
               (rule_has_it ? "" : "other than ") + name_of(type) + (rule_has_it ? " with " : " without ") + rules,
               name_of(recipe.scale));
    };
    check_pair(is_mx(recipe.rule), ScaleType::e8m0, "a rule of MX");
    check_pair(is_nvfp4(recipe.rule), ScaleType::e4m3, "a rule of NVFP4");
    if (recipe.two_level && !is_nvfp4(recipe.rule))
        reject("two_level", "false unless the rule is one of NVFP4", "true");
    if (recipe.global_divides && !recipe.two_level) reject("global_divides", "false without a global scale", "true");
    if (recipe.is_expanded() && recipe.scale != ScaleType::float32)
        reject("scale", "float32 for a rule with exponents", name_of(recipe.scale));
    if (recipe.is_expanded() && recipe.search != ScaleSearch::amax)
        reject("search", "amax for a rule with exponents", "mse");
    if (recipe.margin < -126 || recipe.margin > 126) reject("margin", "between -126 and 126", recipe.margin);
}

void check_layout(const Recipe& recipe) {
    validate(recipe.layout);
    if (recipe.layout.axis != -1) reject("layout.axis", "-1: a cast packs codes along the last axis", "-2");
    if (recipe.is_expanded() && recipe.layout.kind != LayoutKind::per_block_k)
        reject("layout", "PerBlockK for a rule with exponents", name_of(recipe.layout.kind));
    if (recipe.ragged && recipe.layout.kind != LayoutKind::per_block_mn)
        reject("ragged", "false unless the layout is PerBlockMN", "true");
}

}  // namespace

void check_enumerators(const Recipe& recipe) {
    const auto check = [](const char* field, auto value, auto last) {
        if (value > last) reject(field, "at most " + std::to_string(static_cast<int>(last)), static_cast<int>(value));
    };
    check("element", recipe.element, Format{static_cast<std::uint8_t>(format_table.size() - 1)});
    check("scale", recipe.scale, ScaleType::e4m3);
    check("rule", recipe.rule, last_scale_rule);
    check("search", recipe.search, ScaleSearch::mse);
}

void validate(const Recipe& recipe) {
    check_enumerators(recipe);
    check_element(recipe);
    check_scale(recipe);
    check_layout(recipe);
}

}  // namespace breccia::inline v0_4
