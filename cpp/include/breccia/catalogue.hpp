// SPDX-License-Identifier: Apache-2.0
//
// The named recipes: one row each, with its fields, their defaults and what they may be. Python's recipe classes are
// checked against these rows; C++ users call make_recipe.
#pragma once

#include <map>
#include <span>
#include <variant>

#include "breccia/recipe.hpp"

namespace breccia::inline v0_3 {

/// A field's value. An absent optional integer is std::monostate. No field takes a double: it is there to be named in
/// the message that refuses it.
using FieldValue = std::variant<std::monostate, bool, std::int64_t, std::string, double>;
using Fields = std::map<std::string, FieldValue, std::less<>>;

struct BRECCIA_API FieldSpec {
    enum class Kind : std::uint8_t { choice, positive, fixed, any_integer, boolean, optional_positive };

    std::string_view name;
    Kind kind;
    std::string_view text;    ///< the choices, separated by '|', the first the default; for `fixed`, who fixed it
    std::int64_t number = 0;  ///< default (integers, booleans), or the only value (`fixed`)

    [[nodiscard]] FieldValue default_value() const;
    [[nodiscard]] std::string_view default_choice() const { return text.substr(0, text.find('|')); }
};

struct RecipeRow {
    std::string_view name;        ///< "NVFP4BlockScaling"
    std::string_view short_name;  ///< "nvfp4"
    std::span<const FieldSpec> fields;
    Recipe (*build)(const Fields& all_fields);  ///< every field present and checked
};

BRECCIA_API std::span<const RecipeRow> catalogue();

/// Builds a recipe by its name or short name, capitals or not; fields left out take their defaults. Throws Error,
/// naming the field, its value and what it must be, or the names close to one that is not known.
BRECCIA_API Recipe make_recipe(std::string_view name, const Fields& fields = {});

}  // namespace breccia::inline v0_3
