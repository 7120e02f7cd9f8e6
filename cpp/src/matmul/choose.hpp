// SPDX-License-Identifier: Apache-2.0
//
// Which path multiplies: one table for each backend, whose rules are tried in order. A rule says for which kinds of
// products, and for how many activations, its path is the quickest, as measured; what the path can compute at all, its
// suits() says. Both look at shapes, formats and strides alone. Where a value stands in the way, such as a scale out of
// range, the path refuses when it comes to it, and the rules of the paths after it are tried.
#pragma once

#include <limits>
#include <span>

#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {

/// Both ends included.
struct Span {
    static constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
    std::int64_t from = 1, to = any;
    [[nodiscard]] constexpr bool holds(std::int64_t n) const { return from <= n && n <= to; }
};

/// "Products of these kinds with so many activations take this path."
struct Rule {
    const Path* path;
    Kinds kinds;
    Span rows;
};

/// A backend's rules.
struct RuleTable {
    std::string_view backend;
    std::span<const Rule> rules;
};
/// Of every backend, whether this build has it or not.
std::span<const RuleTable> rule_tables();

/// Of which kinds a product's weight is.
Kinds weight_kinds(const Product& product);

/// Names of kinds, in the order of their bits.
std::span<const std::string_view> kind_names();

/// The first rule that holds for a product, or the first after the rules of the path that refused. Reads no value.
/// There always is one: the last path takes anything, and refuses nothing.
const Rule& choose(const Product& product, const Rule* refused = nullptr);

/// Multiplies by a rule's path.
Refusal multiply_by(const Rule& rule, const Product& product);

/// Multiplies by the path that is chosen, and where it refuses by the next. Returns the name of the one that did.
std::string_view multiply(const Product& product);

}  // namespace breccia::inline v0_4
