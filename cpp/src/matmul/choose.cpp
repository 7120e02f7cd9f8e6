// SPDX-License-Identifier: Apache-2.0
#include "matmul/choose.hpp"

#include <algorithm>

#include "breccia/cpu.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {
namespace {

// Measured by benchmarks/cpp/bench_paths.cpp, which times every path at every number of activations whatever stands
// here: breccia_benchmarks --benchmark_filter=paths/<backend>/.

constexpr Rule of_portable[] = {
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_f32},
};

constexpr Rule of_avx2[] = {
    {.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, 4}},
    {.path = &paths::in_place_integer, .rows = {1, 1}},
    {.path = &paths::panels_integer},
    {.path = &paths::in_place_f32, .rows = {1, 8}},
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_f32},
};

// Its panels of integers meet more activations at a time.
constexpr Rule of_avx512[] = {
    {.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, 2}},
    {.path = &paths::in_place_integer, .rows = {1, 1}},
    {.path = &paths::panels_integer},
    {.path = &paths::in_place_f32, .rows = {1, 8}},
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_f32},
};

// Measured under qemu alone.
constexpr Rule of_neon[] = {
    {.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, 2}},
    {.path = &paths::in_place_integer, .rows = {1, 1}},
    {.path = &paths::panels_integer},
    {.path = &paths::in_place_f32, .rows = {1, 4}},
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_f32},
};

constexpr Rule of_avx512_bf16[] = {
    {.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, 4}},
    {.path = &paths::in_place_integer, .activations = Activations::several_terms, .rows = {1, 2}},
    {.path = &paths::panels_integer},
    {.path = &paths::lanes, .weights = Weights::prepared_packed, .vectors = {1, 24}},
    {.path = &paths::lanes, .weights = Weights::prepared, .activations = Activations::codes, .vectors = {1, 24}},
    {.path = &paths::lanes, .weights = Weights::prepared, .vectors = {2, 24}},
    {.path = &paths::lanes, .rows = {3}, .vectors = {3, 24}},  // rows in place are turned for every pass
    {.path = &paths::lanes,
     .weights = Weights::prepared,
     .activations = Activations::slow_in_panels,
     .vectors = {25, 48}},
    {.path = &paths::lanes, .weights = Weights::packed, .activations = Activations::three_terms, .vectors = {25, 48}},
    {.path = &paths::in_place_bf16, .rows = {1, 8}, .passes = 2},
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_bf16, .activations = Activations::one_or_two_terms},
    {.path = &paths::panels_f32},
};

// vdpbf16ps issues every other cycle there, vpdpbusd twice in each.
constexpr Rule of_amx[] = {
    {.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, 4}},
    {.path = &paths::in_place_integer, .rows = {1, 2}},
    {.path = &paths::panels_integer,
     .weights = Weights::packed,
     .activations = Activations::codes_in_tiles,
     .rows = {16}},
    {.path = &paths::panels_integer, .activations = Activations::codes_in_tiles, .rows = {17}},
    {.path = &paths::tiles, .activations = Activations::numbers_in_terms, .vectors = {3, 32}},
    {.path = &paths::tiles, .vectors = {3, 16}},
    {.path = &paths::lanes, .weights = Weights::prepared_packed, .vectors = {1, 4}},
    {.path = &paths::lanes, .weights = Weights::prepared, .activations = Activations::codes, .vectors = {1, 4}},
    {.path = &paths::lanes, .weights = Weights::prepared, .vectors = {2, 4}},
    {.path = &paths::lanes, .rows = {3}, .vectors = {3, 4}},
    {.path = &paths::in_place_bf16, .rows = {1, 8}, .passes = 2},
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_bf16},
    {.path = &paths::panels_f32},
};

constexpr RuleTable tables[] = {
    {"portable", of_portable},       {"avx2", of_avx2}, {"avx512", of_avx512},
    {"avx512_bf16", of_avx512_bf16}, {"amx", of_amx},   {"neon", of_neon},
};

bool holds(Weights weights, const Product& product) {
    const ScaledMatrix* codes = product.w.scaled_along_k();
    const bool packed = codes != nullptr && codes->packed;
    const bool prepared = codes != nullptr && product.prepared.codes != nullptr;
    switch (weights) {
        case Weights::any: return true;
        case Weights::packed: return packed;
        case Weights::prepared: return prepared;
        case Weights::prepared_packed: return prepared && packed;
    }
    return false;
}

bool holds(Activations activations, const Entry& entry, const Product& product) {
    switch (activations) {
        case Activations::any: return true;
        case Activations::codes: return entry.coded;
        case Activations::codes_in_tiles: return entry.in_tiles;
        case Activations::several_terms: return entry.terms > 1;
        case Activations::numbers_in_terms: return entry.terms > 1 && product.a.front().scaled_along_k() == nullptr;
        case Activations::three_terms: return entry.terms == 3;
        case Activations::one_or_two_terms: return entry.terms <= 2;
        case Activations::slow_in_panels: return !entry.suits_panels;
    }
    return false;
}

std::string text_of(Weights weights) {
    switch (weights) {
        case Weights::any: return "any";
        case Weights::packed: return "4-bit codes";
        case Weights::prepared: return "prepared";
        case Weights::prepared_packed: return "prepared 4-bit codes";
    }
    return "";
}

std::string text_of(Activations activations) {
    switch (activations) {
        case Activations::any: return "any";
        case Activations::codes: return "codes";
        case Activations::codes_in_tiles: return "codes, in blocks of a multiple of 64";
        case Activations::several_terms: return "of two or three terms";
        case Activations::numbers_in_terms: return "numbers of two or three terms";
        case Activations::three_terms: return "of three terms";
        case Activations::one_or_two_terms: return "of one or two terms";
        case Activations::slow_in_panels: return "slow in panels";
    }
    return "";
}

std::string text_of(Refusal refusal) {
    switch (refusal) {
        case Refusal::none: return "";
        case Refusal::zero_points: return "zero points beyond -8 ... 15";
        case Refusal::scales: return "scales out of range";
        case Refusal::range: return "activations out of range";
        case Refusal::digits: return "activations of more than six digits";
        case Refusal::passes: return "terms for more than two passes";
    }
    return "";
}

// "1 to 24 terms"
std::string text_of(const Span& span, const std::string& unit) {
    if (span.to == Limits::any) return std::to_string(span.from) + " or more " + unit + "s";
    if (span.from == span.to) return std::to_string(span.from) + " " + unit + (span.to == 1 ? "" : "s");
    return std::to_string(span.from) + " to " + std::to_string(span.to) + " " + unit + "s";
}

std::string count_of(const Rule& rule) {
    const auto is_all = [](const Span& span) { return span.from == Span{}.from && span.to == Span{}.to; };
    if (is_all(rule.rows)) return is_all(rule.vectors) ? "any number" : text_of(rule.vectors, "term");
    return text_of(rule.rows, "row") + (is_all(rule.vectors) ? "" : ", " + text_of(rule.vectors, "term"));
}

}  // namespace

std::span<const RuleTable> rule_tables() { return tables; }

const Rule& choose(const Product& product, const Rule* refused) {
    const std::span<const Rule> rules = std::ranges::find(tables, product.table.name, &RuleTable::backend)->rules;
    const Rule* rule = refused == nullptr ? rules.data() : refused;
    const Path* looked_at = refused == nullptr ? nullptr : refused->path;
    std::optional<Entry> entry;  // of the path looked at
    for (;; ++rule) {
        if (!rule->rows.holds(product.total_rows())) continue;
        if (rule->path != looked_at) {
            looked_at = rule->path;
            entry = rule->path->suits(product);
        }
        if (entry && rule->vectors.holds(product.total_rows() * entry->terms) && holds(rule->weights, product) &&
            holds(rule->activations, *entry, product))
            return *rule;
    }
}

std::vector<MatmulRule> matmul_rules() {
    std::vector<MatmulRule> found;
    for (const RuleTable& table : tables)
        for (const Rule& rule : table.rules) {
            std::string unless;
            for (const Refusal refusal : rule.path->refusals) {
                if (refusal == Refusal::none || (refusal == Refusal::passes && rule.passes == Limits::any)) continue;
                unless += (unless.empty() ? "" : "; ") + text_of(refusal);
            }
            found.push_back({.backend = std::string(table.backend),
                             .weights = text_of(rule.weights),
                             .activations = text_of(rule.activations),
                             .count = count_of(rule),
                             .kernel = std::string(rule.path->name),
                             .unless = std::move(unless)});
        }
    return found;
}

}  // namespace breccia::inline v0_4
