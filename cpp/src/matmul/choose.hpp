// SPDX-License-Identifier: Apache-2.0
//
// Which path multiplies: one table for each backend, whose rows are tried in order. A row says for which weights, which
// activations and how many of them its path is the quickest, as measured; what the path can compute at all, its suits()
// says. Both look at shapes, formats and strides alone. Where a value stands in the way, such as a scale out of range,
// the path refuses when it comes to it, and the rows after it are tried.
#pragma once

#include <span>

#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {

/// Both ends included.
struct Span {
    std::int64_t from = 1, to = Limits::any;
    [[nodiscard]] constexpr bool holds(std::int64_t n) const { return from <= n && n <= to; }
};

/// A kind of weights.
enum class Weights : std::uint8_t { any, packed, prepared, prepared_packed };

/// A kind of activations.
///
/// A term is one of the bfloat16 numbers that add up to an activation: one for bfloat16, two for float16, three for
/// others; codes multiplied without their scales are one term, and so is all that Precision::fast rounds, but for
/// in_place_integer, where the type of the activations alone counts.
enum class Activations : std::uint8_t {
    any,
    codes,             ///< multiplied without their scales
    codes_in_tiles,    ///< the same, in blocks that matrix tiles of integers take: see Entry
    several_terms,     ///< two or three
    numbers_in_terms,  ///< numbers, not codes, of two or three
    three_terms,
    one_or_two_terms,  ///< once the values are known
    slow_in_panels     ///< see Entry::suits_panels
};

/// "These weights by these activations, so many of them, take this path."
struct Rule {
    const Path* path = nullptr;
    Weights weights = Weights::any;
    Activations activations = Activations::any;
    Span rows = {};                     ///< activations
    Span vectors = {};                  ///< terms of all activations together
    std::int64_t passes = Limits::any;  ///< over the weight, by the terms that activations turn out to have
};

/// What a rule leaves to the values.
constexpr Limits limits_of(const Rule& rule) {
    return {.passes = rule.passes, .terms = rule.activations == Activations::one_or_two_terms ? 2 : Limits::any};
}

/// A backend's rules.
struct RuleTable {
    std::string_view backend;
    std::span<const Rule> rules;
};
/// Of every backend, whether this build has it or not.
std::span<const RuleTable> rule_tables();

/// The first rule that holds for a product, or the first after the rules of the path that refused. Reads no value.
/// There always is one: the last path takes anything, and refuses nothing.
const Rule& choose(const Product& product, const Rule* refused = nullptr);

/// Multiplies by the path that is chosen, and where it refuses by the next. Returns the name of the one that did.
std::string_view multiply(const Product& product);

}  // namespace breccia::inline v0_4
