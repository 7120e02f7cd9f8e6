// SPDX-License-Identifier: Apache-2.0
#include "breccia/recipes.hpp"

#include <algorithm>

namespace breccia::inline v0_4::recipes {
namespace {

// The fields of a row, set one by one: an enumerator stands for the choice at its place in the row.
class Row {
public:
    explicit Row(std::string_view short_name)
        : row_(*std::ranges::find(catalogue(), short_name, &RecipeRow::short_name)) {}

    template <class E>
    requires std::is_enum_v<E>
    Row& set(std::string_view field, E value) {
        std::string_view choices = std::ranges::find(row_.fields, field, &FieldSpec::name)->text;
        for (auto place = static_cast<int>(value); place > 0; --place) {
            const std::size_t bar = choices.find('|');
            if (bar == std::string_view::npos) return put(field, "choice " + std::to_string(static_cast<int>(value)));
            choices.remove_prefix(bar + 1);
        }
        return put(field, std::string(choices.substr(0, choices.find('|'))));
    }
    Row& set(std::string_view field, bool value) { return put(field, value); }
    Row& set(std::string_view field, std::int64_t value) { return put(field, value); }
    Row& set(std::string_view field, std::optional<std::int64_t> value) {
        return value ? put(field, *value) : put(field, std::monostate{});
    }
    [[nodiscard]] Recipe recipe() const { return make_recipe(row_.short_name, fields_); }

private:
    Row& put(std::string_view field, FieldValue value) {
        fields_.emplace(field, std::move(value));
        return *this;
    }
    const RecipeRow& row_;
    Fields fields_;
};

}  // namespace

delayed::operator Recipe() const {
    return Row("delayed")
        .set("fp8_format", fp8_format)
        .set("amax_history_len", amax_history_len)
        .set("margin", margin)
        .set("scale_rule", scale_rule)
        .recipe();
}
current::operator Recipe() const {
    return Row("current")
        .set("fp8_format", fp8_format)
        .set("granularity", granularity)
        .set("scale_rule", scale_rule)
        .set("scale_search", scale_search)
        .recipe();
}
block::operator Recipe() const {
    return Row("block")
        .set("fp8_format", fp8_format)
        .set("block_k", block_k)
        .set("block_m", block_m)
        .set("scale_format", scale_format)
        .set("scale_search", scale_search)
        .recipe();
}
mxfp8::operator Recipe() const {
    return Row("mxfp8")
        .set("fp8_format", fp8_format)
        .set("scale_rounding", scale_rounding)
        .set("scale_search", scale_search)
        .recipe();
}
mxfp6::operator Recipe() const {
    return Row("mxfp6")
        .set("fp6_format", fp6_format)
        .set("scale_rounding", scale_rounding)
        .set("scale_search", scale_search)
        .recipe();
}
mxfp4::operator Recipe() const {
    return Row("mxfp4").set("scale_rounding", scale_rounding).set("scale_search", scale_search).recipe();
}
nvfp4::operator Recipe() const {
    return Row("nvfp4")
        .set("two_level", two_level)
        .set("scale_search", scale_search)
        .set("scale_rule", scale_rule)
        .set("global_scale_form", global_scale_form)
        .recipe();
}
int4::operator Recipe() const {
    return Row("int4")
        .set("group_size", group_size)
        .set("signed", is_signed)
        .set("scale_dtype", scale_dtype)
        .set("symmetric", symmetric)
        .set("scale_search", scale_search)
        .recipe();
}
int8::operator Recipe() const {
    return Row("int8")
        .set("group_size", group_size)
        .set("scale_dtype", scale_dtype)
        .set("symmetric", symmetric)
        .set("scale_search", scale_search)
        .recipe();
}

}  // namespace breccia::inline v0_4::recipes
