// SPDX-License-Identifier: Apache-2.0
//
// The named recipes: one row each, with its fields, their defaults and what they may be. Python's recipe classes are
// checked against these rows; C++ users call make_recipe.
#pragma once

#include <map>
#include <span>
#include <variant>

#include "breccia/recipe.hpp"

namespace breccia::inline v0_4 {

/// A field's value. An absent optional integer is std::monostate. No field takes a double: it is there to be named in
/// the message that refuses it.
using FieldValue = std::variant<std::monostate, bool, std::int64_t, std::string, double>;
/// Fields of a recipe by name; those left out have their defaults.
using Fields = std::map<std::string, FieldValue, std::less<>>;

/// What a field of a recipe may be.
struct BRECCIA_API FieldSpec {
    /// One of some words; an integer from 1 up; one that only has its default; any integer; true or false; an
    /// integer from 1 up, or none.
    enum class Kind : std::uint8_t { choice, positive, fixed, any_integer, boolean, optional_positive };

    std::string_view name;    ///< "scale_rounding"
    Kind kind;                ///< what values it takes
    std::string_view text;    ///< the choices, separated by '|', the first the default; for `fixed`, who fixed it
    std::int64_t number = 0;  ///< default (integers, booleans), or the only value (`fixed`)
    int first_words = 0;      ///< how many choices a message names apart from the others, or 0

    /// What it is where it is left out.
    [[nodiscard]] FieldValue default_value() const;
    /// The same of a choice.
    [[nodiscard]] std::string_view default_choice() const { return text.substr(0, text.find('|')); }
};

/// A named recipe.
struct RecipeRow {
    std::string_view name;                ///< "NVFP4BlockScaling"
    std::string_view short_name;          ///< "nvfp4"
    std::span<const FieldSpec> fields;    ///< in the order of Python's dataclass
    Recipe (*make)(const Fields& given);  ///< what make_recipe() calls, all fields being the row's
};

/// All of them; the rows live as long as the program.
BRECCIA_API std::span<const RecipeRow> catalogue();

/// Builds a recipe by its name or short name, capitals or not; fields left out take their defaults. Throws Error,
/// naming the field, its value and what it must be, or the names close to one that is not known.
BRECCIA_API Recipe make_recipe(std::string_view name, const Fields& fields = {});

}  // namespace breccia::inline v0_4
