// SPDX-License-Identifier: Apache-2.0
//
// The tables choose between paths, never between right and wrong: every path keeps the error bound wherever it suits
// the operands. What is chosen is what runs, but for values that the table names.
#include <map>
#include <set>

#include "breccia/prepared.hpp"
#include "matmul/choose.hpp"
#include "support.hpp"

namespace breccia {
namespace {

// Whether c is within the bound that ops.hpp states of the exact product of x and w^T.
testing::AssertionResult within_bound(const std::vector<float>& x, const std::vector<float>& w, const Array& c,
                                      std::int64_t m, std::int64_t n, std::int64_t k) {
    const std::int64_t roundings = std::min<std::int64_t>(k, 256) + k / 8 + 8;
    const double factor = static_cast<double>(roundings) * std::ldexp(1.0, -24);
    for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
            double exact = 0, size = 0;
            for (std::int64_t e = 0; e < k; ++e) {
                const double product = static_cast<double>(x[static_cast<std::size_t>(i * k + e)]) *
                                       static_cast<double>(w[static_cast<std::size_t>(j * k + e)]);
                exact += product;
                size += std::abs(product);
            }
            const double found = c.as<float>()[i * n + j];
            if (!(std::abs(found - exact) <= factor * size))
                return testing::AssertionFailure() << "(" << i << ", " << j << "): " << found << ", exactly " << exact;
        }
    return testing::AssertionSuccess();
}

constexpr std::int64_t n = 40, k = 512;

std::vector<Recipe> recipes() {
    return {make_recipe("Float8BlockScaling"), make_recipe("MXFP8BlockScaling"),
            make_recipe("MXFP6BlockScaling"),  make_recipe("NVFP4BlockScaling"),
            make_recipe("MXFP4BlockScaling"),  make_recipe("INT8Scaling"),
            make_recipe("INT4Scaling"),        make_recipe("INT4Scaling", {{"signed", false}, {"symmetric", false}})};
}

class Paths : public testing::TestWithParam<std::string> {};

TEST_P(Paths, AreRightWhateverTheTableSays) {
    const BackendScope scope(GetParam());
    std::map<std::string_view, int> used;
    for (const Recipe& recipe : recipes()) {
        std::vector<float> values = heavy_tailed(n, k, 1, 1);
        const ScaledTensor scaled = cast(array_of(values, {n, k}), recipe), w = scaled.transposed();
        const PreparedWeight prepared = PreparedWeight(scaled).transposed();
        const std::vector<float> weights = to_vector(dequantize(scaled));
        for (const std::int64_t m : {1, 2, 3, 5, 8, 9, 17, 33, 50})
            for (const DType dtype : {DType::bfloat16, DType::float32}) {
                std::vector<float> x = heavy_tailed(m, k, 2, 1);
                Array numbers = array_of(x, {m, k});
                if (dtype == DType::bfloat16) {
                    numbers = Array::allocate(dtype, {m, k});
                    for (std::size_t i = 0; i < x.size(); ++i) {
                        numbers.as<BFloat16>()[i] = to_bfloat16(x[i]);
                        x[i] = to_float(numbers.as<BFloat16>()[i]);
                    }
                }
                for (const Operand& operand : {Operand(w), Operand(prepared)}) {
                    const Array chosen = Array::allocate(DType::float32, {m, n});
                    EXPECT_TRUE(multiply_by(matmul_path(numbers, operand), numbers, operand, chosen));
                    EXPECT_TRUE(same_bytes(chosen, matmul(numbers, operand)));
                    for (const std::string_view path : matmul_paths()) {
                        SCOPED_TRACE(describe(recipe) + " by " + std::string(path) + ", M = " + std::to_string(m));
                        const Array c = Array::allocate(DType::float32, {m, n});
                        if (!multiply_by(path, numbers, operand, c)) continue;
                        ++used[path];
                        ASSERT_TRUE(within_bound(x, weights, c, m, n, k)) << name_of(dtype);
                    }
                }
            }
    }
    EXPECT_GT(used["rows_f32"], 0);
    EXPECT_GT(used["panels_f32"], 0);
}

// The path that the table has for a product.
std::string_view chosen_path(const Operand& a, const Operand& b, Precision precision = Precision::exact) {
    return choose(question(kernels(), a, b, precision), Rows(b, -2, {}, 0)).path->name;
}

// The paths that are tried for it, the first that does not refuse being the last of them; each refusal is one that the
// path's row of the table names.
std::vector<std::string_view> tried_paths(const Operand& a, const Operand& b) {
    Product product = question(kernels(), a, b);
    const Array out = Array::allocate(DType::float32, {product.m, product.n});
    product.c.push_back(output_matrix(out, -1, {}, 0));
    const Rows w(b, -2, {}, 0);
    std::vector<std::string_view> tried;
    const Rule* rule = nullptr;
    for (;;) {
        rule = &choose(product, w, rule);
        tried.push_back(rule->path->name);
        const Refusal refusal = rule->path->multiply(product, w, limits_of(*rule));
        if (refusal == Refusal::none) return tried;
        EXPECT_TRUE(std::ranges::count(rule->path->refusals, refusal)) << tried.back();
    }
}

Array rounded(const std::vector<float>& x, DType dtype, std::int64_t m) {
    Array numbers = Array::allocate(dtype, {m, k});
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (dtype == DType::float32) numbers.as<float>()[i] = x[i];
        if (dtype == DType::float16) numbers.as<Float16>()[i] = to_float16(x[i]);
        if (dtype == DType::bfloat16) numbers.as<BFloat16>()[i] = to_bfloat16(x[i]);
    }
    return numbers;
}

// Every recipe, by activations of every kind and number. Numbers that are ordinary are refused nowhere; those that come
// of codes and scales may have more terms or digits than a path takes.
TEST_P(Paths, WhatIsChosenIsWhatRuns) {
    const BackendScope scope(GetParam());
    for (const RecipeRow& row : catalogue()) {
        std::vector<float> values(static_cast<std::size_t>(n * k));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) - 8;
        const ScaledTensor scaled = cast(array_of(values, {n, k}), make_recipe(row.name)), w = scaled.transposed();
        const PreparedWeight prepared = PreparedWeight(scaled).transposed();
        for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 10, 11, 16, 17, 24, 25, 32, 33, 48, 49}) {
            std::vector<float> x(static_cast<std::size_t>(m * k));
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1 + static_cast<float>(i % 29) / 32;
            for (const Operand& b : {Operand(w), Operand(prepared)}) {
                SCOPED_TRACE(std::string(row.name) + ", M = " + std::to_string(m));
                for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
                    for (const Precision precision : {Precision::exact, Precision::fast}) {
                        const Array a = rounded(x, dtype, m);
                        EXPECT_EQ(chosen_path(a, b, precision), matmul_path(a, b, precision)) << name_of(dtype);
                    }
                if (m != 1 && m != 5 && m != 17 && m != 33) continue;
                for (const RecipeRow& of_x : catalogue()) {
                    const ScaledTensor a = cast(array_of(x, {m, k}), make_recipe(of_x.name));
                    const std::vector<std::string_view> tried = tried_paths(a, b);
                    EXPECT_EQ(tried.front(), chosen_path(a, b)) << of_x.name;
                    EXPECT_EQ(tried.back(), matmul_path(a, b)) << of_x.name;
                }
            }
        }
    }
}

// Values that a path refuses: what runs is the first path after it that does not.
TEST_P(Paths, ARefusalLeadsToALaterPathOfTheTable) {
    const BackendScope scope(GetParam());
    for (const Recipe& recipe : recipes())
        for (const std::int64_t m : {1, 3, 8, 17, 50}) {
            std::vector<float> values = heavy_tailed(n, k, 1, 1);
            ScaledTensor scaled = cast(array_of(values, {n, k}), recipe);
            if (const auto& zero_points = scaled.zero_point())
                std::fill_n(zero_points->as<std::uint8_t>(), zero_points->size() / 2, std::uint8_t{99});
            if (recipe.scale == ScaleType::e8m0) scaled.scale().as<std::uint8_t>()[3] = 2;
            const ScaledTensor w = scaled.transposed();
            std::vector<float> x = heavy_tailed(m, k, 2, 1);
            x.front() = 1e-35F;
            x.back() = 1e35F;
            const Array a = array_of(x, {m, k});
            SCOPED_TRACE(describe(recipe) + ", M = " + std::to_string(m));
            const std::vector<std::string_view> tried = tried_paths(a, w);
            EXPECT_EQ(tried.back(), matmul_path(a, w));
            EXPECT_EQ(std::set(tried.begin(), tried.end()).size(), tried.size());
            EXPECT_EQ(tried.front(), chosen_path(a, w));
        }
}

// An address where nothing can be read.
Array unreadable(const Shape& shape, ElementType type) {
    return Array::borrow(reinterpret_cast<void*>(std::uintptr_t{64}), type, shape);
}

TEST_P(Paths, AChoiceReadsNoValue) {
    const BackendScope scope(GetParam());
    for (const Recipe& recipe : recipes()) {
        const CastPlan plan = plan_cast({n, k}, recipe);
        Extras extras{.shape = Shape{n, k}};
        if (plan.has_zero_point) extras.zero_point = unreadable(plan.scale_shape, plan.zero_point_type);
        std::vector<float> one{1};
        if (plan.has_global_scale) extras.global_scale = Array::borrow(one, {});
        const ScaledTensor w(unreadable(plan.data_shape, plan.data_type), unreadable(plan.scale_shape, plan.scale_type),
                             recipe, recipe.layout, extras);
        for (const std::int64_t m : {1, 3, 8, 17, 50})
            for (const DType dtype : {DType::float32, DType::bfloat16})
                EXPECT_FALSE(chosen_path(unreadable({m, k}, dtype), w.transposed()).empty());
    }
}

TEST(MatmulRules, EveryBackendHasATable) {
    std::set<std::string_view> backends;
    for (const RuleTable& table : rule_tables()) backends.insert(table.backend);
    for (const std::string& name : cpu_info().supported) EXPECT_TRUE(backends.contains(name)) << name;
    for (const MatmulRule& rule : matmul_rules()) {
        EXPECT_TRUE(backends.contains(rule.backend));
        EXPECT_FALSE(rule.weights.empty() || rule.activations.empty() || rule.count.empty() || rule.kernel.empty());
    }
}

// A path that refused is not tried again, so its rules stand together; and the last one takes anything.
TEST(MatmulRules, StandInOrder) {
    for (const RuleTable& table : rule_tables()) {
        std::set<const Path*> done;
        const Path* before = nullptr;
        for (const Rule& rule : table.rules) {
            const bool again = rule.path != before && !done.insert(rule.path).second;
            EXPECT_FALSE(again) << table.backend;
            before = rule.path;
        }
        const Rule& last = table.rules.back();
        EXPECT_TRUE(last.path == &paths::panels_f32 && last.weights == Weights::any &&
                    last.activations == Activations::any && last.rows.holds(1) && last.rows.to == Limits::any &&
                    last.vectors.to == Limits::any)
            << table.backend;
    }
}

TEST(MatmulRules, AnUnknownPathIsNamed) {
    std::vector<float> x(4);
    const Array a = array_of(x, {2, 2}), c = Array::allocate(DType::float32, {2, 2});
    EXPECT_EQ(message_of(Error::Kind::value, [&] { multiply_by("abacus", a, a, c); }),
              "path must be one that there is, got 'abacus'");
}

INSTANTIATE_TEST_SUITE_P(Every, Paths, testing::ValuesIn(cpu_info().supported),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace breccia
