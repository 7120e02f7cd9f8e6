// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "breccia/recipes.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

using Kind = FieldSpec::Kind;

constexpr std::int64_t no_number = std::numeric_limits<std::int64_t>::min();
constexpr std::size_t most_fields = 8;

}  // namespace

class FieldNumbers {
public:
    explicit FieldNumbers(std::span<const FieldSpec> specs) : specs_(specs) {
        for (std::size_t i = 0; i < specs.size(); ++i)
            numbers_[i] = specs[i].kind == Kind::optional_positive ? no_number : specs[i].number;
    }
    std::int64_t& operator[](std::string_view field) { return numbers_[place_of(field)]; }
    std::int64_t operator[](std::string_view field) const { return numbers_[place_of(field)]; }

private:
    [[nodiscard]] std::size_t place_of(std::string_view field) const {
        return static_cast<std::size_t>(std::ranges::find(specs_, field, &FieldSpec::name) - specs_.begin());
    }
    std::span<const FieldSpec> specs_;
    std::array<std::int64_t, most_fields> numbers_{};
};

namespace {

// A field of some words, and what each of them stands for.
template <class T, std::size_t N>
struct Choice {
    FieldSpec spec;
    std::array<T, N> values;

    consteval Choice(std::string_view name, std::string_view words, const T (&of_words)[N], int first_words = 0)
        : spec{name, Kind::choice, words, 0, first_words}, values(std::to_array(of_words)) {
        if (std::ranges::count(words, '|') + 1 != N) throw std::logic_error("a value for each word");
    }
    T operator()(const FieldNumbers& f) const { return values[static_cast<std::size_t>(f[spec.name])]; }
};

// Names of fields and their first choices, the defaults, are public API.
// Elements of vendors have the names of ml_dtypes: a short one would leave open which E4M3 it is.
constexpr Choice fp8_format{
    "fp8_format",
    "E4M3|E5M2|float8_e4m3fnuz|float8_e5m2fnuz|float8_e4m3|float8_e3m4|float8_e4m3b11fnuz",
    {format_of<Float8E4M3FN>, format_of<Float8E5M2>, format_of<Float8E4M3FNUZ>, format_of<Float8E5M2FNUZ>,
     format_of<Float8E4M3>, format_of<Float8E3M4>, format_of<Float8E4M3B11FNUZ>},
    2};
constexpr Choice mxfp8_format{"fp8_format", "E4M3|E5M2", {format_of<Float8E4M3FN>, format_of<Float8E5M2>}};
constexpr Choice fp6_format{"fp6_format", "E2M3|E3M2", {format_of<Float6E2M3FN>, format_of<Float6E3M2FN>}};
constexpr Choice mxfp4_format{"fp4_format", "E2M1", {format_of<Float4E2M1FN>}};
constexpr Choice nvfp4_format{"fp4_format", "E2M1", {format_of<Float4E2M1FN>}};
constexpr Choice fp8_rule{"scale_rule", "torchao|transformer_engine", {ScaleRule::divide, ScaleRule::multiply}};
constexpr Choice nvfp4_rule{
    "scale_rule", "transformer_engine|torchao", {ScaleRule::nvfp4_te, ScaleRule::nvfp4_torchao}};
constexpr Choice mx_rounding{"scale_rounding",
                             "rceil|floor|ceil|even",
                             {ScaleRule::mx_rceil, ScaleRule::mx_floor, ScaleRule::mx_ceil, ScaleRule::mx_even}};
constexpr Choice scale_search{"scale_search", "amax|mse", {ScaleSearch::amax, ScaleSearch::mse}};
constexpr Choice granularity{"granularity", "tensor|row", {false, true}};
constexpr Choice global_scale_form{"global_scale_form", "multiplier|divisor", {false, true}};
constexpr Choice block_scale{
    "scale_format", "fp32|bf16|e8m0", {ScaleType::float32, ScaleType::bfloat16, ScaleType::e8m0}};
constexpr Choice nvfp4_scale{"scale_format", "E4M3", {ScaleType::e4m3}};
constexpr Choice int4_scale{
    "scale_dtype", "fp16|bf16|fp32", {ScaleType::float16, ScaleType::bfloat16, ScaleType::float32}};
constexpr Choice int8_scale{
    "scale_dtype", "fp32|fp16|bf16", {ScaleType::float32, ScaleType::float16, ScaleType::bfloat16}};
constexpr FieldSpec mx_block{"block_size", Kind::fixed, "MX block_size is fixed at 32 by the OCP MX spec", 32};

constexpr FieldSpec delayed_fields[] = {
    fp8_format.spec, {"amax_history_len", Kind::positive, "", 16}, {"margin", Kind::any_integer, "", 0}, fp8_rule.spec};
Recipe build_delayed(const FieldNumbers& f) {
    return {.element = fp8_format(f),
            .layout = Layout::per_tensor(),
            .rule = fp8_rule(f),
            .margin = static_cast<int>(std::clamp<std::int64_t>(f["margin"], -126, 126))};
}

constexpr FieldSpec current_fields[] = {fp8_format.spec, granularity.spec, fp8_rule.spec, scale_search.spec};
Recipe build_current(const FieldNumbers& f) {
    return {.element = fp8_format(f),
            .layout = granularity(f) ? Layout::per_channel() : Layout::per_tensor(),
            .rule = fp8_rule(f),
            .search = scale_search(f)};
}

constexpr FieldSpec block_fields[] = {fp8_format.spec,
                                      {"block_k", Kind::positive, "", 128},
                                      {"block_m", Kind::positive, "", 1},
                                      block_scale.spec,
                                      scale_search.spec};
Recipe build_block(const FieldNumbers& f) {
    const std::int64_t block_m = f["block_m"], block_k = f["block_k"];
    const ScaleType scale = block_scale(f);
    return {.element = fp8_format(f),
            .scale = scale,
            .layout = block_m == 1 ? Layout::per_block_k(block_k) : Layout::per_block_mn(block_m, block_k),
            .rule = scale == ScaleType::e8m0 ? ScaleRule::mx_rceil : ScaleRule::divide,
            .search = scale_search(f),
            .ragged = block_m != 1};
}

constexpr FieldSpec expanded_fields[] = {fp8_format.spec, {"group_size", Kind::positive, "", 128}};
Recipe build_expanded(const FieldNumbers& f) {
    return {.element = fp8_format(f), .layout = Layout::per_block_k(f["group_size"]), .rule = ScaleRule::expanded};
}

constexpr FieldSpec mxfp8_fields[] = {
    mxfp8_format.spec,
    {"block_size", Kind::fixed, "MXFP8 block_size is fixed at 32 by the OCP MX spec", 32},
    mx_rounding.spec,
    scale_search.spec};
constexpr FieldSpec mxfp6_fields[] = {fp6_format.spec, mx_block, mx_rounding.spec, scale_search.spec};
constexpr FieldSpec mxfp4_fields[] = {mxfp4_format.spec, mx_block, mx_rounding.spec, scale_search.spec};
template <const auto& Element>
Recipe build_mx(const FieldNumbers& f) {
    return {.element = Element(f),  // NOLINT(readability-redundant-parentheses): of an argument of the template
            .scale = ScaleType::e8m0,
            .layout = Layout::per_block_mn(1, 32),
            .rule = mx_rounding(f),
            .search = scale_search(f)};
}

constexpr FieldSpec nvfp4_fields[] = {
    nvfp4_format.spec,     {"block_size", Kind::fixed, "NVFP4 block_size is fixed at 16", 16},
    nvfp4_scale.spec,      {"two_level", Kind::boolean, "", 1},
    scale_search.spec,     nvfp4_rule.spec,
    global_scale_form.spec};
Recipe build_nvfp4(const FieldNumbers& f) {
    const bool divides = global_scale_form(f), two_level = f["two_level"] != 0;
    if (divides && !two_level)
        throw_value("global_scale_form='divisor' needs two_level=", true, ", got ", false,
                    ": there is no global scale to divide by");
    return {.element = nvfp4_format(f),
            .scale = nvfp4_scale(f),
            .layout = Layout::per_block_mn(1, 16),
            .rule = nvfp4_rule(f),
            .search = scale_search(f),
            .two_level = two_level,
            .global_divides = divides};
}

constexpr FieldSpec int4_fields[] = {{"group_size", Kind::positive, "", 128},
                                     {"signed", Kind::boolean, "", 1},
                                     int4_scale.spec,
                                     {"symmetric", Kind::boolean, "", 1},
                                     scale_search.spec};
Recipe build_int4(const FieldNumbers& f) {
    const bool is_signed = f["signed"] != 0, symmetric = f["symmetric"] != 0;
    if (is_signed && !symmetric)
        throw_value("symmetric=", false, " (a zero point) needs signed=", false, ", got signed=", true,
                    ": the zero point shifts unsigned codes 0 ... 15");
    return {.element = is_signed ? format_of<Int4> : format_of<UInt4>,
            .scale = int4_scale(f),
            .layout = Layout::per_block_k(f["group_size"]),
            .rule = symmetric ? ScaleRule::divide : ScaleRule::asymmetric,
            .search = scale_search(f)};
}

constexpr FieldSpec int8_fields[] = {{"group_size", Kind::optional_positive, ""},
                                     int8_scale.spec,
                                     {"symmetric", Kind::boolean, "", 1},
                                     scale_search.spec};
Recipe build_int8(const FieldNumbers& f) {
    const std::int64_t group_size = f["group_size"];
    return {.element = format_of<Int8>,
            .scale = int8_scale(f),
            .layout = group_size == no_number ? Layout::per_channel() : Layout::per_block_k(group_size),
            .rule = f["symmetric"] != 0 ? ScaleRule::divide : ScaleRule::asymmetric,
            .search = scale_search(f)};
}

constexpr FieldSpec int8_expanded_fields[] = {{"group_size", Kind::positive, "", 128}};
Recipe build_int8_expanded(const FieldNumbers& f) {
    return {.element = format_of<Int8>, .layout = Layout::per_block_k(f["group_size"]), .rule = ScaleRule::expanded};
}

constexpr RecipeRow rows[] = {
    {"DelayedScaling", "delayed", delayed_fields, build_delayed},
    {"Float8CurrentScaling", "current", current_fields, build_current},
    {"Float8BlockScaling", "block", block_fields, build_block},
    {"Float8ExpandedScaling", "expanded", expanded_fields, build_expanded},
    {"MXFP8BlockScaling", "mxfp8", mxfp8_fields, build_mx<mxfp8_format>},
    {"MXFP6BlockScaling", "mxfp6", mxfp6_fields, build_mx<fp6_format>},
    {"MXFP4BlockScaling", "mxfp4", mxfp4_fields, build_mx<mxfp4_format>},
    {"NVFP4BlockScaling", "nvfp4", nvfp4_fields, build_nvfp4},
    {"INT4Scaling", "int4", int4_fields, build_int4},
    {"INT8Scaling", "int8", int8_fields, build_int8},
    {"INT8ExpandedScaling", "int8_expanded", int8_expanded_fields, build_int8_expanded},
};
static_assert(std::ranges::all_of(rows, [](const RecipeRow& row) { return row.fields.size() <= most_fields; }));

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
    throw_value(spec.name, " must be ", requirement, ", got ", text_of(value));
}

// 'a', 'b' or 'c'.
std::string one_of(std::span<const std::string_view> words) {
    std::string text;
    for (std::size_t i = 0; i < words.size(); ++i)
        text += (i == 0 ? "'" : (i + 1 == words.size() ? " or '" : ", '")) + std::string(words[i]) + "'";
    return text;
}

std::int64_t choice_of(const FieldSpec& spec, const FieldValue& value) {
    const auto* given = std::get_if<std::string>(&value);
    std::vector<std::string_view> words;
    for (std::string_view rest = spec.text; !rest.empty();
         rest.remove_prefix(std::min(rest.size(), words.back().size() + 1)))
        words.push_back(rest.substr(0, rest.find('|')));
    if (given != nullptr)
        if (const auto found = std::ranges::find(words, *given); found != words.end()) return found - words.begin();
    const std::span all(words);
    const std::size_t first = spec.first_words > 0 ? static_cast<std::size_t>(spec.first_words) : all.size();
    reject(spec, one_of(all.first(first)) + (first < all.size() ? ", or " + one_of(all.subspan(first)) : ""), value);
}

std::int64_t integer_of(const FieldSpec& spec, const FieldValue& value, std::int64_t lowest) {
    const auto* number = std::get_if<std::int64_t>(&value);
    if (number == nullptr) throw_type(spec.name, " must be an integer, got ", text_of(value));
    if (*number >= lowest) return *number;
    // The message for a length says ">= 1", that for a block size "> 0": both texts are public.
    reject(spec, spec.name == "amax_history_len" ? ">= 1" : "> 0", value);
}

// The number that stands for a value, which may be none that the field takes.
std::int64_t number_of(const FieldSpec& spec, const FieldValue& value) {
    switch (spec.kind) {
        case Kind::choice: return choice_of(spec, value);
        case Kind::positive: return integer_of(spec, value, 1);
        case Kind::any_integer: return integer_of(spec, value, std::numeric_limits<std::int64_t>::min());
        case Kind::optional_positive:
            return std::holds_alternative<std::monostate>(value) ? no_number : integer_of(spec, value, 1);
        case Kind::boolean:
            if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
            throw_type(spec.name, " must be ", true, " or ", false, ", got ", text_of(value));
        case Kind::fixed:
            if (value != FieldValue(spec.number)) throw_value(spec.text, ", got ", text_of(value));
            break;
    }
    return spec.number;
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

static Recipe named(const RecipeRow& row, const FieldNumbers& numbers) {
    Recipe recipe = row.build(numbers);
    recipe.name = row.name;
    return recipe;
}

std::span<const RecipeRow> catalogue() { return rows; }

Recipe make_recipe(std::string_view name, const Fields& fields) {
    const auto* row = std::ranges::find_if(
        rows, [&](const RecipeRow& r) { return same_letters(r.name, name) || same_letters(r.short_name, name); });
    if (row == std::end(rows)) throw_value("there is no recipe named '", name, "'", suggestion(name));
    FieldNumbers numbers(row->fields);
    for (const FieldSpec& spec : row->fields)
        if (const auto given = fields.find(spec.name); given != fields.end())
            numbers[spec.name] = number_of(spec, given->second);
    for (const auto& [field, value] : fields)
        if (std::ranges::find(row->fields, field, &FieldSpec::name) == row->fields.end())
            throw_type(name, " has no field named '", field, "'");
    return named(*row, numbers);
}

// ---- The rows as types ----

namespace {

// A field of a type: enumerators stand for the choices in their order.
struct TypedField {
    std::string_view name;
    FieldValue value;

    template <class T>
    TypedField(std::string_view field, T x) : name(field) {
        if constexpr (std::is_enum_v<T>)
            value = std::int64_t{static_cast<std::uint8_t>(x)};
        else
            value = x;
    }
    TypedField(std::string_view field, std::optional<std::int64_t> x) : name(field) {
        if (x) value = *x;
    }
};

std::int64_t number_of(const FieldSpec& spec, const TypedField& field) {
    if (spec.kind != Kind::choice) return number_of(spec, field.value);
    const std::int64_t place = std::get<std::int64_t>(field.value);
    if (place <= std::ranges::count(spec.text, '|')) return place;
    return choice_of(spec, "choice " + std::to_string(place));
}

Recipe recipe_of(std::string_view short_name, std::initializer_list<TypedField> fields) {
    const RecipeRow& row = *std::ranges::find(rows, short_name, &RecipeRow::short_name);
    FieldNumbers numbers(row.fields);
    for (const FieldSpec& spec : row.fields)
        if (const auto* given = std::ranges::find(fields, spec.name, &TypedField::name); given != fields.end())
            numbers[spec.name] = number_of(spec, *given);
    return named(row, numbers);
}

}  // namespace

namespace recipes {

delayed::operator Recipe() const {
    return recipe_of("delayed", {{"fp8_format", fp8_format},
                                 {"amax_history_len", amax_history_len},
                                 {"margin", margin},
                                 {"scale_rule", scale_rule}});
}
current::operator Recipe() const {
    return recipe_of("current", {{"fp8_format", fp8_format},
                                 {"granularity", granularity},
                                 {"scale_rule", scale_rule},
                                 {"scale_search", scale_search}});
}
block::operator Recipe() const {
    return recipe_of("block", {{"fp8_format", fp8_format},
                               {"block_k", block_k},
                               {"block_m", block_m},
                               {"scale_format", scale_format},
                               {"scale_search", scale_search}});
}
expanded::operator Recipe() const {
    return recipe_of("expanded", {{"fp8_format", fp8_format}, {"group_size", group_size}});
}
mxfp8::operator Recipe() const {
    return recipe_of("mxfp8",
                     {{"fp8_format", fp8_format}, {"scale_rounding", scale_rounding}, {"scale_search", scale_search}});
}
mxfp6::operator Recipe() const {
    return recipe_of("mxfp6",
                     {{"fp6_format", fp6_format}, {"scale_rounding", scale_rounding}, {"scale_search", scale_search}});
}
mxfp4::operator Recipe() const {
    return recipe_of("mxfp4", {{"scale_rounding", scale_rounding}, {"scale_search", scale_search}});
}
nvfp4::operator Recipe() const {
    return recipe_of("nvfp4", {{"two_level", two_level},
                               {"scale_search", scale_search},
                               {"scale_rule", scale_rule},
                               {"global_scale_form", global_scale_form}});
}
int4::operator Recipe() const {
    return recipe_of("int4", {{"group_size", group_size},
                              {"signed", is_signed},
                              {"scale_dtype", scale_dtype},
                              {"symmetric", symmetric},
                              {"scale_search", scale_search}});
}
int8::operator Recipe() const {
    return recipe_of("int8", {{"group_size", group_size},
                              {"scale_dtype", scale_dtype},
                              {"symmetric", symmetric},
                              {"scale_search", scale_search}});
}

int8_expanded::operator Recipe() const { return recipe_of("int8_expanded", {{"group_size", group_size}}); }

}  // namespace recipes

}  // namespace breccia::inline v0_4
