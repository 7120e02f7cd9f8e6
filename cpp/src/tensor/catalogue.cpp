// SPDX-License-Identifier: Apache-2.0
#include "breccia/catalogue.hpp"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "breccia/error.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

using Kind = FieldSpec::Kind;

// Fields several recipes share. Their names and first choices (the defaults) are public API.
constexpr FieldSpec fp8_format{"fp8_format", Kind::choice, "E4M3|E5M2"};
constexpr FieldSpec fp8_rule{"scale_rule", Kind::choice, "torchao|transformer_engine"};
constexpr FieldSpec mx_rounding{"scale_rounding", Kind::choice, "rceil|floor|ceil|even"};
constexpr FieldSpec scale_search{"scale_search", Kind::choice, "amax|mse"};
constexpr FieldSpec mx_block{"block_size", Kind::fixed, "MX block_size is fixed at 32 by the OCP MX spec", 32};

constexpr FieldSpec delayed_fields[] = {
    fp8_format, {"amax_history_len", Kind::positive, "", 16}, {"margin", Kind::any_integer, "", 0}, fp8_rule};
constexpr FieldSpec current_fields[] = {
    fp8_format, {"granularity", Kind::choice, "tensor|row"}, fp8_rule, scale_search};
constexpr FieldSpec block_fields[] = {fp8_format,
                                      {"block_k", Kind::positive, "", 128},
                                      {"block_m", Kind::positive, "", 1},
                                      {"scale_format", Kind::choice, "fp32|bf16|e8m0"},
                                      scale_search};
constexpr FieldSpec mxfp8_fields[] = {
    fp8_format,
    {"block_size", Kind::fixed, "MXFP8 block_size is fixed at 32 by the OCP MX spec", 32},
    mx_rounding,
    scale_search};
constexpr FieldSpec mxfp6_fields[] = {{"fp6_format", Kind::choice, "E2M3|E3M2"}, mx_block, mx_rounding, scale_search};
constexpr FieldSpec mxfp4_fields[] = {{"fp4_format", Kind::choice, "E2M1"}, mx_block, mx_rounding, scale_search};
constexpr FieldSpec nvfp4_fields[] = {{"fp4_format", Kind::choice, "E2M1"},
                                      {"block_size", Kind::fixed, "NVFP4 block_size is fixed at 16", 16},
                                      {"scale_format", Kind::choice, "E4M3"},
                                      {"two_level", Kind::boolean, "", 1},
                                      scale_search,
                                      {"scale_rule", Kind::choice, "transformer_engine|torchao"},
                                      {"global_scale_form", Kind::choice, "multiplier|divisor"}};
constexpr FieldSpec int4_fields[] = {{"group_size", Kind::positive, "", 128},
                                     {"signed", Kind::boolean, "", 1},
                                     {"scale_dtype", Kind::choice, "fp16|bf16|fp32"},
                                     {"symmetric", Kind::boolean, "", 1},
                                     scale_search};
constexpr FieldSpec int8_fields[] = {{"group_size", Kind::optional_positive, ""},
                                     {"scale_dtype", Kind::choice, "fp32|fp16|bf16"},
                                     {"symmetric", Kind::boolean, "", 1},
                                     scale_search};

const std::string& text(const Fields& fields, std::string_view name) {
    return std::get<std::string>(fields.find(name)->second);
}
std::int64_t integer(const Fields& fields, std::string_view name) {
    return std::get<std::int64_t>(fields.find(name)->second);
}
bool boolean(const Fields& fields, std::string_view name) { return std::get<bool>(fields.find(name)->second); }

Format fp8(const Fields& fields) {
    return text(fields, "fp8_format") == "E4M3" ? format_of<Float8E4M3FN> : format_of<Float8E5M2>;
}
ScaleRule fp8_scale_rule(const Fields& fields) {
    return text(fields, "scale_rule") == "torchao" ? ScaleRule::divide : ScaleRule::multiply;
}
ScaleSearch search(const Fields& fields) {
    return text(fields, "scale_search") == "amax" ? ScaleSearch::amax : ScaleSearch::mse;
}
ScaleType scale_type(std::string_view name) {
    if (name == "fp32") return ScaleType::float32;
    if (name == "fp16") return ScaleType::float16;
    return name == "bf16" ? ScaleType::bfloat16 : ScaleType::e8m0;
}

Recipe build_delayed(const Fields& f) {
    return {.element = fp8(f),
            .layout = Layout::per_tensor(),
            .rule = fp8_scale_rule(f),
            .margin = static_cast<int>(std::clamp<std::int64_t>(integer(f, "margin"), -126, 126))};
}

Recipe build_current(const Fields& f) {
    return {.element = fp8(f),
            .layout = text(f, "granularity") == "row" ? Layout::per_channel() : Layout::per_tensor(),
            .rule = fp8_scale_rule(f),
            .search = search(f)};
}

Recipe build_block(const Fields& f) {
    const std::int64_t block_m = integer(f, "block_m");
    const std::int64_t block_k = integer(f, "block_k");
    const ScaleType scale = scale_type(text(f, "scale_format"));
    return {.element = fp8(f),
            .scale = scale,
            .layout = block_m == 1 ? Layout::per_block_k(block_k) : Layout::per_block_mn(block_m, block_k),
            .rule = scale == ScaleType::e8m0 ? ScaleRule::mx_rceil : ScaleRule::divide,
            .search = search(f),
            .ragged = block_m != 1};
}

Recipe build_mx(const Fields& f, Format element) {
    const std::string& rounding = text(f, "scale_rounding");
    const ScaleRule rule = rounding == "rceil"   ? ScaleRule::mx_rceil
                           : rounding == "floor" ? ScaleRule::mx_floor
                           : rounding == "ceil"  ? ScaleRule::mx_ceil
                                                 : ScaleRule::mx_even;
    return {.element = element,
            .scale = ScaleType::e8m0,
            .layout = Layout::per_block_mn(1, 32),
            .rule = rule,
            .search = search(f)};
}
Recipe build_mxfp8(const Fields& f) { return build_mx(f, fp8(f)); }
Recipe build_mxfp6(const Fields& f) {
    return build_mx(f, text(f, "fp6_format") == "E2M3" ? format_of<Float6E2M3FN> : format_of<Float6E3M2FN>);
}
Recipe build_mxfp4(const Fields& f) { return build_mx(f, format_of<Float4E2M1FN>); }

Recipe build_nvfp4(const Fields& f) {
    const bool divides = text(f, "global_scale_form") == "divisor";
    if (divides && !boolean(f, "two_level"))
        throw_value("global_scale_form='divisor' needs two_level=" + spelled(true) + ", got " + spelled(false) +
                    ": there is no global scale to divide by");
    return {.element = format_of<Float4E2M1FN>,
            .scale = ScaleType::e4m3,
            .layout = Layout::per_block_mn(1, 16),
            .rule = text(f, "scale_rule") == "torchao" ? ScaleRule::nvfp4_torchao : ScaleRule::nvfp4_te,
            .search = search(f),
            .two_level = boolean(f, "two_level"),
            .global_divides = divides};
}

Recipe build_int4(const Fields& f) {
    const bool is_signed = boolean(f, "signed");
    const bool symmetric = boolean(f, "symmetric");
    if (is_signed && !symmetric)
        throw_value("symmetric=" + spelled(false) + " (a zero point) needs signed=" + spelled(false) +
                    ", got signed=" + spelled(true) + ": the zero point shifts unsigned codes 0 ... 15");
    return {.element = is_signed ? format_of<Int4> : format_of<UInt4>,
            .scale = scale_type(text(f, "scale_dtype")),
            .layout = Layout::per_block_k(integer(f, "group_size")),
            .rule = symmetric ? ScaleRule::divide : ScaleRule::asymmetric,
            .search = search(f)};
}

Recipe build_int8(const Fields& f) {
    const auto* group_size = std::get_if<std::int64_t>(&f.find("group_size")->second);
    return {.element = format_of<Int8>,
            .scale = scale_type(text(f, "scale_dtype")),
            .layout = group_size != nullptr ? Layout::per_block_k(*group_size) : Layout::per_channel(),
            .rule = boolean(f, "symmetric") ? ScaleRule::divide : ScaleRule::asymmetric,
            .search = search(f)};
}

constexpr RecipeRow rows[] = {
    {"DelayedScaling", "delayed", delayed_fields, build_delayed},
    {"Float8CurrentScaling", "current", current_fields, build_current},
    {"Float8BlockScaling", "block", block_fields, build_block},
    {"MXFP8BlockScaling", "mxfp8", mxfp8_fields, build_mxfp8},
    {"MXFP6BlockScaling", "mxfp6", mxfp6_fields, build_mxfp6},
    {"MXFP4BlockScaling", "mxfp4", mxfp4_fields, build_mxfp4},
    {"NVFP4BlockScaling", "nvfp4", nvfp4_fields, build_nvfp4},
    {"INT4Scaling", "int4", int4_fields, build_int4},
    {"INT8Scaling", "int8", int8_fields, build_int8},
};

std::string text_of(const FieldValue& value) {
    if (const auto* flag = std::get_if<bool>(&value)) return spelled(*flag);
    if (const auto* number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
    if (const auto* string = std::get_if<std::string>(&value)) return "'" + *string + "'";
    if (const auto* real = std::get_if<double>(&value)) {
        std::ostringstream text;
        text << *real;
        return text.str() + (text.str().find_first_not_of("-0123456789") == std::string::npos ? ".0" : "");
    }
    return spelled_none();
}

[[noreturn]] void reject(const FieldSpec& spec, const std::string& requirement, const FieldValue& value) {
    throw_value(std::string(spec.name) + " must be " + requirement + ", got " + text_of(value));
}

void check_choice(const FieldSpec& spec, const FieldValue& value) {
    std::string allowed;
    for (std::string_view rest = spec.text; !rest.empty();) {
        const std::string_view choice = rest.substr(0, rest.find('|'));
        if (const auto* given = std::get_if<std::string>(&value); given != nullptr && *given == choice) return;
        rest.remove_prefix(std::min(rest.size(), choice.size() + 1));
        allowed += (allowed.empty() ? "'" : (rest.empty() ? " or '" : ", '")) + std::string(choice) + "'";
    }
    reject(spec, allowed, value);
}

void check_integer(const FieldSpec& spec, const FieldValue& value, std::int64_t lowest) {
    const auto* number = std::get_if<std::int64_t>(&value);
    if (number == nullptr) throw_type(std::string(spec.name) + " must be an integer, got " + text_of(value));
    if (*number >= lowest) return;
    // The message for a length says ">= 1", that for a block size "> 0": both texts are public.
    reject(spec, spec.name == "amax_history_len" ? ">= 1" : "> 0", value);
}

void check(const FieldSpec& spec, const FieldValue& value) {
    switch (spec.kind) {
        case Kind::choice: return check_choice(spec, value);
        case Kind::positive: return check_integer(spec, value, 1);
        case Kind::any_integer: return check_integer(spec, value, std::numeric_limits<std::int64_t>::min());
        case Kind::optional_positive:
            if (std::holds_alternative<std::monostate>(value)) return;
            return check_integer(spec, value, 1);
        case Kind::boolean:
            if (!std::holds_alternative<bool>(value))
                throw_type(std::string(spec.name) + " must be " + spelled(true) + " or " + spelled(false) + ", got " +
                           text_of(value));
            return;
        case Kind::fixed:
            if (value != FieldValue(spec.number)) throw_value(std::string(spec.text) + ", got " + text_of(value));
            return;
    }
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same_letters(std::string_view a, std::string_view b) { return std::ranges::equal(a, b, {}, lower, lower); }

// Letters to insert, delete or replace to make one name of the other (Levenshtein).
std::size_t edits(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t diagonal = std::exchange(row[0], i + 1);
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::size_t replaced = diagonal + (lower(a[i]) == lower(b[j]) ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row.back();
}

std::string suggestion(std::string_view name) {
    const std::string_view compared = name.substr(0, 64);
    std::string close, all;
    for (const RecipeRow& row : rows) {
        const std::string quoted = "'" + std::string(row.short_name) + "'";
        all += (all.empty() ? "" : ", ") + quoted;
        if (edits(row.short_name, compared) <= 1 || edits(row.name, compared) <= 3)
            close += (close.empty() ? "" : " or ") + quoted;
    }
    return close.empty() ? ": known are " + all : ": did you mean " + close + "?";
}

}  // namespace

FieldValue FieldSpec::default_value() const {
    switch (kind) {
        case Kind::choice: return std::string(default_choice());
        case Kind::boolean: return number != 0;
        case Kind::optional_positive: return std::monostate{};
        default: return number;
    }
}

std::span<const RecipeRow> catalogue() { return rows; }

Recipe make_recipe(std::string_view name, const Fields& fields) {
    const auto* row = std::ranges::find_if(
        rows, [&](const RecipeRow& r) { return same_letters(r.name, name) || same_letters(r.short_name, name); });
    if (row == std::end(rows)) throw_value("there is no recipe named '" + std::string(name) + "'" + suggestion(name));
    Fields all;
    for (const FieldSpec& spec : row->fields) {
        const auto given = fields.find(spec.name);
        const FieldValue value = given == fields.end() ? spec.default_value() : given->second;
        check(spec, value);
        all.emplace(spec.name, value);
    }
    for (const auto& [field, value] : fields)
        if (!all.contains(field)) throw_type(std::string(name) + " has no field named '" + field + "'");
    Recipe recipe = row->build(all);
    recipe.name = row->name;
    return recipe;
}

}  // namespace breccia::inline v0_4
