// SPDX-License-Identifier: Apache-2.0
#include "matmul/choose.hpp"

#include <algorithm>
#include <array>

#include "breccia/catalogue.hpp"
#include "breccia/cpu.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::string_view weight_names[] = {"any", "4-bit codes", "prepared", "prepared 4-bit codes"};
constexpr std::string_view activation_names[] = {"any",
                                                 "codes",
                                                 "codes, in blocks of a multiple of 64",
                                                 "of two or three terms",
                                                 "numbers of two or three terms",
                                                 "of three terms",
                                                 "of one or two terms",
                                                 "slow in panels"};

bool hold(Weights kind, const Product& product) {
    if (kind == Weights::any) return true;
    const ScaledMatrix* codes = product.w.scaled_along_k();
    return codes != nullptr && (kind == Weights::prepared || codes->packed) &&
           (kind == Weights::packed || product.prepared.codes != nullptr);
}

bool hold(Activations kind, const Entry& entry, const Product& product) {
    switch (kind) {
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

// Measured by benchmarks/cpp/bench_paths.cpp, which times every path at every number of activations whatever stands
// here: breccia_benchmarks --benchmark_filter=paths/<backend>/.

constexpr Rule of_portable[] = {
    {.path = &paths::rows_f32, .rows = {1, 3}},
    {.path = &paths::panels_f32},
};

// Of processors without dot products of bfloat16. `codes`: up to so many activations that are codes, in_place_integer
// is the quickest; `numbers`: up to so many others, in_place_f32 is.
constexpr std::array<Rule, 6> without_bf16(std::int64_t codes, std::int64_t numbers) {
    return {{{.path = &paths::in_place_integer, .activations = Activations::codes, .rows = {1, codes}},
             {.path = &paths::in_place_integer, .rows = {1, 1}},
             {.path = &paths::panels_integer},
             {.path = &paths::in_place_f32, .rows = {1, numbers}},
             {.path = &paths::rows_f32, .rows = {1, 3}},
             {.path = &paths::panels_f32}}};
}
constexpr auto of_avx2 = without_bf16(4, 8);
constexpr auto of_avx512 = without_bf16(2, 8);  // its panels of integers meet more activations at a time
constexpr auto of_neon = without_bf16(2, 4);    // measured under qemu alone

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
        if (entry && rule->vectors.holds(product.total_rows() * entry->terms) && hold(rule->weights, product) &&
            hold(rule->activations, *entry, product))
            return *rule;
    }
}

std::string_view multiply(const Product& product) {
    const Rule* rule = &choose(product);
    while (rule->path->multiply(product, limits_of(*rule)) != Refusal::none) rule = &choose(product, rule);
    return rule->path->name;
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
                             .weights = std::string(weight_names[static_cast<int>(rule.weights)]),
                             .activations = std::string(activation_names[static_cast<int>(rule.activations)]),
                             .count = count_of(rule),
                             .kernel = std::string(rule.path->name),
                             .unless = std::move(unless)});
        }
    return found;
}

std::vector<MatmulKernel> matmul_kernels() {
    constexpr std::int64_t n = 16, k = 256, most = 512;
    const Call call;
    const Array zeros = Array::allocate(DType::float32, {most, k}), bf16 = Array::allocate(DType::bfloat16, {most, k});
    std::fill_n(zeros.as<float>(), zeros.size(), 0.0F);
    const auto first_rows = [](Array array, std::int64_t rows) {
        array.shape[0] = rows;
        return array;
    };
    std::vector<MatmulKernel> found;
    for (const RecipeRow& row : catalogue()) {
        const ScaledTensor w = cast(first_rows(zeros, n), make_recipe(row.name)).transposed();
        const PreparedWeight prepared(w);
        for (const std::int64_t m : {std::int64_t{1}, std::int64_t{4}, std::int64_t{16}, most}) {
            const Array x_bf16 = first_rows(bf16, m), x_f32 = first_rows(zeros, m);
            const ScaledTensor fp8 = cast(x_f32, make_recipe("Float8BlockScaling"));
            const ScaledTensor int8 = cast(x_f32, make_recipe("INT8Scaling"));
            const std::pair<const char*, Operand> activations[] = {
                {"bfloat16", x_bf16}, {"float32", x_f32}, {"fp8", fp8}, {"int8", int8}};
            for (const auto& [name, a] : activations)
                for (const bool is_prepared : {false, true}) {
                    const Operand b = is_prepared ? Operand(prepared) : Operand(w);
                    found.push_back({.recipe = std::string(row.name),
                                     .activations = name,
                                     .prepared = is_prepared,
                                     .rows = m,
                                     .kernel = std::string(choose(question(call, a, b)).path->name)});
                }
        }
    }
    return found;
}

}  // namespace breccia::inline v0_4
