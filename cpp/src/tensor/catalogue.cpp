// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "breccia/recipes.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

using Kind = FieldSpec::Kind;

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
std::optional<std::int64_t> number_of(const FieldSpec& spec, const FieldValue& value) {
    switch (spec.kind) {
        case Kind::choice: return choice_of(spec, value);
        case Kind::positive: return integer_of(spec, value, 1);
        case Kind::any_integer: return integer_of(spec, value, std::numeric_limits<std::int64_t>::min());
        case Kind::optional_positive:
            if (std::holds_alternative<std::monostate>(value)) return {};
            return integer_of(spec, value, 1);
        case Kind::boolean:
            if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
            throw_type(spec.name, " must be ", true, " or ", false, ", got ", text_of(value));
        case Kind::fixed:
            if (value != FieldValue(spec.number)) throw_value(spec.text, ", got ", text_of(value));
            break;
    }
    return spec.number;
}

// A field of a row, and the member of the row's type that holds it: none where there is one value alone.
template <class T>
struct Field {
    FieldSpec spec;
    std::optional<std::int64_t> (*get)(const T&) = nullptr;
    void (*set)(T&, std::optional<std::int64_t>) = nullptr;
};

template <class T, class M>
T owner_of(M T::* member);

// Enumerators stand for the words in their order.
template <auto Member, Kind OfNumbers = Kind::positive, class T = decltype(owner_of(Member))>
consteval Field<T> field(std::string_view name, std::string_view words = {}, int first_words = 0) {
    using M = std::remove_cvref_t<decltype(T{}.*Member)>;
    constexpr bool is_optional = std::is_same_v<M, std::optional<std::int64_t>>;
    constexpr Kind kind = std::is_enum_v<M>         ? Kind::choice
                          : std::is_same_v<M, bool> ? Kind::boolean
                          : is_optional             ? Kind::optional_positive
                                                    : OfNumbers;
    constexpr auto get = [](const T& x) -> std::optional<std::int64_t> {
        if constexpr (is_optional)
            return x.*Member;
        else
            return static_cast<std::int64_t>(x.*Member);
    };
    constexpr auto set = [](T& x, std::optional<std::int64_t> number) {
        if constexpr (is_optional)
            x.*Member = number;
        else
            x.*Member = static_cast<M>(*number);
    };
    return {{name, kind, words, get(T{}).value_or(0), first_words}, get, set};
}

// Throws where the number of a type's member is none that the field takes.
void check(const FieldSpec& spec, std::optional<std::int64_t> number) {
    if (!number) return;
    if (spec.kind == Kind::choice && *number > std::ranges::count(spec.text, '|'))
        choice_of(spec, "choice " + std::to_string(*number));
    if (spec.kind == Kind::positive || spec.kind == Kind::optional_positive) integer_of(spec, *number, 1);
}

// A row's names and fields, and the Recipe that values of them stand for, but for its name.
template <class T, std::size_t N>
struct Description {
    std::string_view name, short_name;
    std::array<Field<T>, N> fields;
    Recipe (*build)(const T&);
    std::array<FieldSpec, N> specs = {};

    consteval Description(std::string_view of, std::string_view of_short, const Field<T> (&all)[N],
                          std::type_identity_t<Recipe (*)(const T&)> how)
        : name(of), short_name(of_short), fields(std::to_array(all)), build(how) {
        std::ranges::transform(all, specs.begin(), &Field<T>::spec);
    }
    [[nodiscard]] Recipe named(const T& values) const {
        Recipe recipe = build(values);
        recipe.name = name;
        return recipe;
    }
    [[nodiscard]] Recipe make(const Fields& given) const {
        T values;
        for (const Field<T>& one : fields)
            if (const auto value = given.find(one.spec.name); value != given.end())
                if (const auto number = number_of(one.spec, value->second); one.set != nullptr) one.set(values, number);
        return named(values);
    }
    [[nodiscard]] Recipe checked(const T& values) const {
        for (const Field<T>& one : fields)
            if (one.get != nullptr) check(one.spec, one.get(values));
        return named(values);
    }
};

// A choice's words, and what the enumerator of each stands for.
template <class T, std::size_t N>
struct Choice {
    std::string_view words;
    std::array<T, N> values;

    consteval Choice(std::string_view all, const T (&of_words)[N]) : words(all), values(std::to_array(of_words)) {
        if (std::ranges::count(words, '|') + 1 != N) throw std::logic_error("a value for each word");
    }
    template <class Enum>
    T operator()(Enum one) const {
        return values[static_cast<std::size_t>(one)];
    }
};

}  // namespace

namespace recipes {
namespace {

// Names of fields and their first choices, the defaults, are public API.
// Elements of vendors have the names of ml_dtypes: a short one would leave open which E4M3 it is.
constexpr Choice fp8_format{
    "E4M3|E5M2|float8_e4m3fnuz|float8_e5m2fnuz|float8_e4m3|float8_e3m4|float8_e4m3b11fnuz",
    {format_of<Float8E4M3FN>, format_of<Float8E5M2>, format_of<Float8E4M3FNUZ>, format_of<Float8E5M2FNUZ>,
     format_of<Float8E4M3>, format_of<Float8E3M4>, format_of<Float8E4M3B11FNUZ>}};
constexpr int of_ocp = 2;  // the first of them
constexpr Choice mxfp8_format{"E4M3|E5M2", {format_of<Float8E4M3FN>, format_of<Float8E5M2>}};
constexpr Choice fp6_format{"E2M3|E3M2", {format_of<Float6E2M3FN>, format_of<Float6E3M2FN>}};
constexpr Choice fp4_format{"E2M1", {format_of<Float4E2M1FN>}};
constexpr Choice fp8_rule{"torchao|transformer_engine", {ScaleRule::divide, ScaleRule::multiply}};
constexpr Choice nvfp4_rule{"transformer_engine|torchao", {ScaleRule::nvfp4_te, ScaleRule::nvfp4_torchao}};
constexpr Choice mx_rounding{"rceil|floor|ceil|even",
                             {ScaleRule::mx_rceil, ScaleRule::mx_floor, ScaleRule::mx_ceil, ScaleRule::mx_even}};
constexpr Choice block_scale{"fp32|bf16|e8m0", {ScaleType::float32, ScaleType::bfloat16, ScaleType::e8m0}};
constexpr Choice int4_scale{"fp16|bf16|fp32", {ScaleType::float16, ScaleType::bfloat16, ScaleType::float32}};
constexpr Choice int8_scale{"fp32|fp16|bf16", {ScaleType::float32, ScaleType::float16, ScaleType::bfloat16}};
constexpr std::string_view search_words = "amax|mse";

constexpr Description delayed_row("DelayedScaling", "delayed",
                                  {field<&delayed::fp8_format>("fp8_format", fp8_format.words, of_ocp),
                                   field<&delayed::amax_history_len>("amax_history_len"),
                                   field<&delayed::margin, Kind::any_integer>("margin"),
                                   field<&delayed::scale_rule>("scale_rule", fp8_rule.words)},
                                  [](const delayed& r) -> Recipe {
                                      return {
                                          .element = fp8_format(r.fp8_format),
                                          .layout = Layout::per_tensor(),
                                          .rule = fp8_rule(r.scale_rule),
                                          .margin = static_cast<int>(std::clamp<std::int64_t>(r.margin, -126, 126))};
                                  });

constexpr Description current_row("Float8CurrentScaling", "current",
                                  {field<&current::fp8_format>("fp8_format", fp8_format.words, of_ocp),
                                   field<&current::granularity>("granularity", "tensor|row"),
                                   field<&current::scale_rule>("scale_rule", fp8_rule.words),
                                   field<&current::scale_search>("scale_search", search_words)},
                                  [](const current& r) -> Recipe {
                                      return {.element = fp8_format(r.fp8_format),
                                              .layout = r.granularity == Granularity::row ? Layout::per_channel()
                                                                                          : Layout::per_tensor(),
                                              .rule = fp8_rule(r.scale_rule),
                                              .search = r.scale_search};
                                  });

constexpr Description block_row("Float8BlockScaling", "block",
                                {field<&block::fp8_format>("fp8_format", fp8_format.words, of_ocp),
                                 field<&block::block_k>("block_k"), field<&block::block_m>("block_m"),
                                 field<&block::scale_format>("scale_format", block_scale.words),
                                 field<&block::scale_search>("scale_search", search_words)},
                                [](const block& r) -> Recipe {
                                    const ScaleType scale = block_scale(r.scale_format);
                                    return {.element = fp8_format(r.fp8_format),
                                            .scale = scale,
                                            .layout = r.block_m == 1 ? Layout::per_block_k(r.block_k)
                                                                     : Layout::per_block_mn(r.block_m, r.block_k),
                                            .rule = scale == ScaleType::e8m0 ? ScaleRule::mx_rceil : ScaleRule::divide,
                                            .search = r.scale_search,
                                            .ragged = r.block_m != 1};
                                });

constexpr Description expanded_row("Float8ExpandedScaling", "expanded",
                                   {field<&expanded::fp8_format>("fp8_format", fp8_format.words, of_ocp),
                                    field<&expanded::group_size>("group_size")},
                                   [](const expanded& r) -> Recipe {
                                       return {.element = fp8_format(r.fp8_format),
                                               .layout = Layout::per_block_k(r.group_size),
                                               .rule = ScaleRule::expanded};
                                   });

// OCP MX: `Format` is the member that names the element.
template <auto Format, const auto& Elements>
consteval auto mx_row(std::string_view name, std::string_view short_name, std::string_view format_field,
                      std::string_view block_text = "MX block_size is fixed at 32 by the OCP MX spec") {
    using T = decltype(owner_of(Format));
    // clang-tidy takes template arguments that are objects for parentheses.
    // NOLINTBEGIN(readability-redundant-parentheses)
    return Description(
        name, short_name,
        {field<Format>(format_field, Elements.words), Field<T>{{"block_size", Kind::fixed, block_text, 32}},
         field<&T::scale_rounding>("scale_rounding", mx_rounding.words),
         field<&T::scale_search>("scale_search", search_words)},
        [](const T& r) -> Recipe {
            return {.element = Elements(r.*Format),
                    .scale = ScaleType::e8m0,
                    .layout = Layout::per_block_mn(1, 32),
                    .rule = mx_rounding(r.scale_rounding),
                    .search = r.scale_search};
        });
    // NOLINTEND(readability-redundant-parentheses)
}
constexpr auto mxfp8_row = mx_row<&mxfp8::fp8_format, mxfp8_format>(
    "MXFP8BlockScaling", "mxfp8", "fp8_format", "MXFP8 block_size is fixed at 32 by the OCP MX spec");
constexpr auto mxfp6_row = mx_row<&mxfp6::fp6_format, fp6_format>("MXFP6BlockScaling", "mxfp6", "fp6_format");
constexpr auto mxfp4_row = mx_row<&mxfp4::fp4_format, fp4_format>("MXFP4BlockScaling", "mxfp4", "fp4_format");

constexpr Description nvfp4_row("NVFP4BlockScaling", "nvfp4",
                                {Field<nvfp4>{{"fp4_format", Kind::choice, "E2M1"}},
                                 Field<nvfp4>{{"block_size", Kind::fixed, "NVFP4 block_size is fixed at 16", 16}},
                                 Field<nvfp4>{{"scale_format", Kind::choice, "E4M3"}},
                                 field<&nvfp4::two_level>("two_level"),
                                 field<&nvfp4::scale_search>("scale_search", search_words),
                                 field<&nvfp4::scale_rule>("scale_rule", nvfp4_rule.words),
                                 field<&nvfp4::global_scale_form>("global_scale_form", "multiplier|divisor")},
                                [](const nvfp4& r) -> Recipe {
                                    const bool divides = r.global_scale_form == GlobalScaleForm::divisor;
                                    if (divides && !r.two_level)
                                        throw_value("global_scale_form='divisor' needs two_level=", true, ", got ",
                                                    false, ": there is no global scale to divide by");
                                    return {.element = format_of<Float4E2M1FN>,
                                            .scale = ScaleType::e4m3,
                                            .layout = Layout::per_block_mn(1, 16),
                                            .rule = nvfp4_rule(r.scale_rule),
                                            .search = r.scale_search,
                                            .two_level = r.two_level,
                                            .global_divides = divides};
                                });

constexpr Description int4_row("INT4Scaling", "int4",
                               {field<&int4::group_size>("group_size"), field<&int4::is_signed>("signed"),
                                field<&int4::scale_dtype>("scale_dtype", int4_scale.words),
                                field<&int4::symmetric>("symmetric"),
                                field<&int4::scale_search>("scale_search", search_words)},
                               [](const int4& r) -> Recipe {
                                   if (r.is_signed && !r.symmetric)
                                       throw_value("symmetric=", false, " (a zero point) needs signed=", false,
                                                   ", got signed=", true,
                                                   ": the zero point shifts unsigned codes 0 ... 15");
                                   return {.element = r.is_signed ? format_of<Int4> : format_of<UInt4>,
                                           .scale = int4_scale(r.scale_dtype),
                                           .layout = Layout::per_block_k(r.group_size),
                                           .rule = r.symmetric ? ScaleRule::divide : ScaleRule::asymmetric,
                                           .search = r.scale_search};
                               });

constexpr Description int8_row(
    "INT8Scaling", "int8",
    {field<&int8::group_size>("group_size"), field<&int8::scale_dtype>("scale_dtype", int8_scale.words),
     field<&int8::symmetric>("symmetric"), field<&int8::scale_search>("scale_search", search_words)},
    [](const int8& r) -> Recipe {
        return {.element = format_of<Int8>,
                .scale = int8_scale(r.scale_dtype),
                .layout = r.group_size ? Layout::per_block_k(*r.group_size) : Layout::per_channel(),
                .rule = r.symmetric ? ScaleRule::divide : ScaleRule::asymmetric,
                .search = r.scale_search};
    });

constexpr Description int8_expanded_row("INT8ExpandedScaling", "int8_expanded",
                                        {field<&int8_expanded::group_size>("group_size")},
                                        [](const int8_expanded& r) -> Recipe {
                                            return {.element = format_of<Int8>,
                                                    .layout = Layout::per_block_k(r.group_size),
                                                    .rule = ScaleRule::expanded};
                                        });

template <const auto& Row>
// NOLINTNEXTLINE(readability-redundant-parentheses): see mx_row
constexpr RecipeRow row{Row.name, Row.short_name, Row.specs, [](const Fields& given) { return Row.make(given); }};

}  // namespace

delayed::operator Recipe() const { return delayed_row.checked(*this); }
current::operator Recipe() const { return current_row.checked(*this); }
block::operator Recipe() const { return block_row.checked(*this); }
expanded::operator Recipe() const { return expanded_row.checked(*this); }
mxfp8::operator Recipe() const { return mxfp8_row.checked(*this); }
mxfp6::operator Recipe() const { return mxfp6_row.checked(*this); }
mxfp4::operator Recipe() const { return mxfp4_row.checked(*this); }
nvfp4::operator Recipe() const { return nvfp4_row.checked(*this); }
int4::operator Recipe() const { return int4_row.checked(*this); }
int8::operator Recipe() const { return int8_row.checked(*this); }
int8_expanded::operator Recipe() const { return int8_expanded_row.checked(*this); }

}  // namespace recipes

namespace {

constexpr RecipeRow rows[] = {
    recipes::row<recipes::delayed_row>,  recipes::row<recipes::current_row>,       recipes::row<recipes::block_row>,
    recipes::row<recipes::expanded_row>, recipes::row<recipes::mxfp8_row>,         recipes::row<recipes::mxfp6_row>,
    recipes::row<recipes::mxfp4_row>,    recipes::row<recipes::nvfp4_row>,         recipes::row<recipes::int4_row>,
    recipes::row<recipes::int8_row>,     recipes::row<recipes::int8_expanded_row>,
};

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
    if (row == std::end(rows)) throw_value("there is no recipe named '", name, "'", suggestion(name));
    for (const auto& [field, value] : fields)
        if (std::ranges::find(row->fields, field, &FieldSpec::name) == row->fields.end())
            throw_type(name, " has no field named '", field, "'");
    return row->make(fields);
}

}  // namespace breccia::inline v0_4
