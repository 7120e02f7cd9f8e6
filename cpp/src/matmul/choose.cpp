// SPDX-License-Identifier: Apache-2.0
#include "matmul/choose.hpp"

#include <algorithm>
#include <array>

#include "breccia/catalogue.hpp"
#include "breccia/cpu.hpp"
#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::string_view names[] = {"numbers",     "bytes",     "four_bits", "blocks_to_16",  "blocks_to_64",
                                      "long_blocks", "as_stored", "prepared",  "one_term",      "two_terms",
                                      "three_terms", "decoded",   "codes",     "codes_in_tiles"};

using namespace kinds;
constexpr Kinds groups[] = {any_weight, any_block, any_storage, any_activations};
constexpr Kinds any_product = (1 << std::size(names)) - 1;

// Products of the kinds named, and of any in groups of which none is.
constexpr Kinds only(Kinds some) {
    for (const Kinds group : groups)
        if ((some & group) == 0) some |= group;
    return some;
}

#include "matmul/rules.inl"

std::string text_of(Refusal refusal) {
    switch (refusal) {
        case Refusal::none: return "";
        case Refusal::zero_points: return "zero points beyond -8 ... 15";
        case Refusal::scales: return "scales out of range";
        case Refusal::range: return "activations out of range";
        case Refusal::digits: return "activations of more than six digits";
        case Refusal::terms: return "more than sixteen terms";
    }
    return "";
}

// "four bits, prepared": of each group that a rule is not for as a whole.
std::string text_of(Kinds of, std::span<const Kinds> groups) {
    std::string text;
    for (const Kinds group : groups) {
        if ((of & group) == group) continue;
        std::string kinds;
        for (std::size_t i = 0; i < std::size(names); ++i)
            if ((of & group & 1 << i) != 0) kinds += (kinds.empty() ? "" : " or ") + std::string(names[i]);
        text += (text.empty() ? "" : ", ") + kinds;
    }
    std::ranges::replace(text, '_', ' ');
    return text.empty() ? "any" : text;
}

// "1 to 24 rows"
std::string text_of(const Span& rows) {
    const std::string from = std::to_string(rows.from);
    if (rows.to == Span::any) return rows.from == 1 ? "any number" : from + " or more rows";
    if (rows.from == rows.to) return from + (rows.to == 1 ? " row" : " rows");
    return from + " to " + std::to_string(rows.to) + " rows";
}

}  // namespace

std::span<const RuleTable> rule_tables() { return tables; }

std::span<const std::string_view> kind_names() { return names; }

Kinds weight_kinds(const Product& product) {
    const ScaledMatrix* w = product.w.scaled_along_k();
    if (w == nullptr) return numbers | long_blocks | as_stored;
    const std::int64_t block = w->grid.grid_cols() == 1 ? Span::any : w->grid.block_cols;
    return static_cast<Kinds>((w->packed ? four_bits : bytes) |
                              (block > 64   ? long_blocks
                               : block > 16 ? blocks_to_64
                                            : blocks_to_16) |
                              (product.prepared.codes != nullptr ? prepared : as_stored));
}

const Rule& choose(const Product& product, const Rule* refused) {
    const std::span<const Rule> rules = std::ranges::find(tables, product.table.name, &RuleTable::backend)->rules;
    const Rule* rule = refused == nullptr ? rules.data() : refused;
    const Path* looked_at = refused == nullptr ? nullptr : refused->path;
    const Kinds of_weight = weight_kinds(product);
    std::optional<Kinds> of_activations;  // as the path looked at takes them
    for (;; ++rule) {
        if (!rule->rows.holds(product.total_rows()) || (of_weight & ~rule->kinds) != 0) continue;
        if (rule->path != looked_at) {
            looked_at = rule->path;
            of_activations = rule->path->suits(product);
        }
        if (of_activations && (*of_activations & ~rule->kinds) == 0) return *rule;
    }
}

Refusal multiply_by(const Rule& rule, const Product& product) {
    const bool of_three = (rule.kinds & (three_terms | decoded)) != 0;
    return rule.path->multiply(product, of_three ? 3 : 2);
}

std::string_view multiply(const Product& product) {
    const Rule* rule = &choose(product);
    while (multiply_by(*rule, product) != Refusal::none) rule = &choose(product, rule);
    return rule->path->name;
}

std::vector<MatmulRule> matmul_rules() {
    std::vector<MatmulRule> found;
    for (const RuleTable& table : tables)
        for (const Rule& rule : table.rules) {
            std::string unless;
            for (const Refusal refusal : rule.path->refusals)
                if (refusal != Refusal::none) unless += (unless.empty() ? "" : "; ") + text_of(refusal);
            found.push_back({.backend = std::string(table.backend),
                             .weights = text_of(rule.kinds, std::span(groups).first(3)),
                             .activations = text_of(rule.kinds, std::span(groups).last(1)),
                             .count = text_of(rule.rows),
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
