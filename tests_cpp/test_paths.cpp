// SPDX-License-Identifier: Apache-2.0
//
// The tables choose between paths, never between right and wrong: every path keeps the error bound wherever it suits
// the operands. What is chosen is what runs, but for values that the table names.
#include <map>
#include <set>

#include "breccia/prepared.hpp"
#include "matmul/choose.hpp"
#include "support.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia {
namespace {

// Whether c is within the bound that ops.hpp states of the exact product of x and w^T.
testing::AssertionResult within_bound(const std::vector<float>& x, const std::vector<float>& w, const Array& c,
                                      std::int64_t m, std::int64_t n, std::int64_t k) {
    const std::int64_t roundings = std::min<std::int64_t>(k, 256) + k / 8 + 8;
    const double factor = static_cast<double>(roundings) * std::ldexp(1.0, -24);
    const ExactProduct exact = exact_product(x, w, m, n, k);
    for (std::size_t i = 0; i < exact.product.size(); ++i) {
        const double found = c.as<float>()[i];
        if (!(std::abs(found - exact.product[i]) <= factor * exact.size[i]))
            return testing::AssertionFailure() << "element " << i << ": " << found << ", exactly " << exact.product[i];
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

Product question_with(const Call& call, const Operand& a, const Operand& b, const Array& out,
                      Precision precision = Precision::exact) {
    Product product = question(call, a, b, precision);
    product.c.push_back(output_matrix(out, -1, {}, 0));
    return product;
}

// The path that the table has for a product.
std::string_view chosen_path(const Operand& a, const Operand& b, Precision precision = Precision::exact) {
    return choose(question(Call(), a, b, precision)).path->name;
}

// The one that multiplies it.
std::string_view matmul_path(const Operand& a, const Operand& b, Precision precision = Precision::exact) {
    const Call call;
    const Array out = Array::allocate(DType::float32, matmul_shape(a.shape(), b.shape()));
    return multiply(question_with(call, a, b, out, precision));
}

// The paths that are tried for it, the first that does not refuse being the last of them; each refusal is one that the
// path's row of the table names.
std::vector<std::string_view> tried_paths(const Operand& a, const Operand& b) {
    const Call call;
    const Array out = Array::allocate(DType::float32, matmul_shape(a.shape(), b.shape()));
    const Product product = question_with(call, a, b, out);
    std::vector<std::string_view> tried;
    const Rule* rule = nullptr;
    for (;;) {
        rule = &choose(product, rule);
        tried.push_back(rule->path->name);
        const Refusal refusal = multiply_by(*rule, product);
        if (refusal == Refusal::none) return tried;
        EXPECT_TRUE(std::ranges::count(rule->path->refusals, refusal)) << tried.back();
    }
}

// A bias is added to the sums, `plain`, before these are rounded to the type of the output.
void expect_bias_before_rounding(std::string_view path, const Operand& a, const Operand& b, const Array& plain) {
    const std::int64_t count = plain.shape[1];
    std::vector<float> numbers = heavy_tailed(1, count, 5, 1);
    std::vector<double> wide_numbers(numbers.begin(), numbers.end());
    for (double& x : wide_numbers) x *= 1.0000000001;  // of no float32 number
    const Array narrow = array_of(numbers, {count}), wide = Array::borrow(wide_numbers, {count});
    for (const Array& bias : {narrow, wide})
        for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
            const Array out = Array::allocate(dtype, plain.shape), expected = Array::allocate(dtype, plain.shape);
            ASSERT_TRUE(multiply_by(path, a, b, out, &bias));
            for (std::int64_t i = 0; i < plain.size(); ++i) {
                const double sum =
                    static_cast<double>(plain.as<float>()[i]) +
                    load_number<double>(bias.as<std::byte>() + i % count * bias.strides[0], bias.type.dtype());
                store_number(expected.as<std::byte>() + i * expected.strides[1], dtype, sum);
            }
            EXPECT_TRUE(same_bytes(out, expected)) << name_of(dtype) << " and a bias of " << bias.type.name();
        }
}

TEST_P(Paths, AreRightWhateverTheTableSays) {
    const BackendScope scope(GetParam());
    std::map<std::string_view, int> used;
    Sample cases;
    for (const Recipe& recipe : recipes()) {
        std::vector<float> values = heavy_tailed(n, k, 1, 1);
        const ScaledTensor scaled = cast(array_of(values, {n, k}), recipe), w = scaled.transposed();
        const PreparedWeight prepared = PreparedWeight(scaled).transposed();
        const std::vector<float> weights = to_vector(dequantize(scaled));
        for (const std::int64_t m : {1, 2, 3, 5, 8, 9, 17, 33, 50})
            for (const DType dtype : {DType::bfloat16, DType::float32}) {
                if (!cases.takes()) continue;
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
                    for (const Path* const one : every_path) {
                        const std::string_view path = one->name;
                        SCOPED_TRACE(describe(recipe) + " by " + std::string(path) + ", M = " + std::to_string(m));
                        const Array c = Array::allocate(DType::float32, {m, n});
                        if (!multiply_by(path, numbers, operand, c)) continue;
                        ++used[path];
                        ASSERT_TRUE(within_bound(x, weights, c, m, n, k)) << name_of(dtype);
                        expect_bias_before_rounding(path, numbers, operand, c);
                    }
                }
            }
    }
    EXPECT_GT(used["rows_f32"], 0);
    EXPECT_GT(used["panels_f32"], 0);
}

// Activations that are INT8 codes, a scale to a row, to blocks that weights' divide or are divided by, or to all: by
// every path, every kind of weight and length of a row. Codes are all there are, the ends included.
TEST_P(Paths, Int8ActivationsAreRightByEveryPath) {
    const BackendScope scope(GetParam());
    std::vector<Recipe> of_w = recipes();
    of_w.push_back(make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}, {"scale_dtype", "bf16"}}));
    of_w.push_back(make_recipe("INT4Scaling", {{"signed", false}}));
    for (const std::int64_t block : {16, 32, 64}) of_w.push_back(make_recipe("INT8Scaling", {{"group_size", block}}));
    of_w.push_back(make_recipe("INT8Scaling", {{"symmetric", false}}));
    Recipe whole = make_recipe("INT8Scaling");
    whole.layout.kind = LayoutKind::per_tensor;
    const Recipe of_x[] = {make_recipe("INT8Scaling"), make_recipe("INT8Scaling", {{"group_size", std::int64_t{32}}}),
                           make_recipe("INT8Scaling", {{"group_size", std::int64_t{16}}}),
                           make_recipe("INT8Scaling", {{"group_size", std::int64_t{256}}}), whole};
    std::map<std::string_view, int> used;
    Sample cases;
    for (const std::int64_t depth : {std::int64_t{512}, std::int64_t{1280}, std::int64_t{9472}, std::int64_t{100}})
        for (const Recipe& recipe : of_w) {
            if (depth == 100 && recipe.layout.kind != LayoutKind::per_channel) continue;
            const bool deep = depth > 4096;  // longer than what some kernels add up at a time
            const std::int64_t rows = deep ? 5 : 19;
            const std::vector<float> values = heavy_tailed(rows, depth, 1, 1);
            std::vector<float> of_weight = values;
            const ScaledTensor scaled = cast(array_of(of_weight, {rows, depth}), recipe), w = scaled.transposed();
            if (recipe.element == format_of<Int8>) {
                auto* codes = static_cast<std::int8_t*>(scaled.data().data);
                for (std::int64_t i = 0; i < rows * depth; i += 5) codes[i] = -128;
            }
            const std::vector<float> weights = to_vector(dequantize(scaled));
            for (const Recipe& recipe_x : of_x) {
                if (depth == 100 &&
                    (recipe_x.layout.kind != LayoutKind::per_channel && recipe_x.layout.kind != LayoutKind::per_tensor))
                    continue;
                for (const std::int64_t m : {1, 2, 5, 13, 50}) {
                    if (!cases.takes()) continue;
                    if (deep && (m == 2 || m > 5 || &recipe_x > of_x + 1)) continue;
                    std::vector<float> numbers = heavy_tailed(m, depth, 2, 1);
                    const ScaledTensor a = cast(array_of(numbers, {m, depth}), recipe_x);
                    auto* codes = static_cast<std::int8_t*>(a.data().data);
                    const std::int8_t least = m == 2 || depth == 1280 ? -127 : -128;  // which some kernels do not take
                    for (std::int64_t i = 0; i < m * depth; i += 7) codes[i] = i % 3 == 0 ? least : std::int8_t{127};
                    const std::vector<float> x = to_vector(dequantize(a));
                    EXPECT_EQ(tried_paths(a, w).back(), matmul_path(a, w));
                    for (const Path* const one : every_path) {
                        const std::string_view path = one->name;
                        SCOPED_TRACE(describe(recipe) + " by " + describe(recipe_x) + " by " + std::string(path) +
                                     ", M = " + std::to_string(m) + ", K = " + std::to_string(depth));
                        const Array c = Array::allocate(DType::float32, {m, rows});
                        if (!multiply_by(path, a, w, c)) continue;
                        ++used[path];
                        ASSERT_TRUE(within_bound(x, weights, c, m, rows, depth));
                    }
                }
            }
        }
    const bool has_integers = Call().kernels.matmul.integers != nullptr;
    EXPECT_EQ(used["panels_integer"] > 0, has_integers);
    EXPECT_EQ(used["in_place_integer"] > 0, has_integers);
}

// Sums of integers are exact, and every kernel rounds the units in the same order: tiles return the bits that dot
// products do, of any number of activations and rows, units that are a whole row, several blocks or a part of one.
TEST(IntegerTiles, HaveTheBitsOfDotProducts) {
    const std::vector<std::string> supported = cpu_info().supported;
    if (std::ranges::count(supported, "amx") == 0) GTEST_SKIP() << "this machine or build has no tiles";
    const auto int8 = [](std::int64_t group) { return make_recipe("INT8Scaling", {{"group_size", group}}); };
    const auto int4 = [](std::int64_t group) { return make_recipe("INT4Scaling", {{"group_size", group}}); };
    const Recipe of_w[] = {make_recipe("INT8Scaling"),
                           int8(64),
                           int8(192),
                           int8(256),
                           int4(64),
                           make_recipe("INT4Scaling"),
                           make_recipe("INT4Scaling", {{"signed", false}, {"symmetric", false}})};
    const Recipe of_x[] = {make_recipe("INT8Scaling"), int8(64), int8(192), int8(256)};
    Sample cases;
    int compared = 0;
    for (const std::int64_t depth : {std::int64_t{100}, std::int64_t{768}, std::int64_t{2304}, std::int64_t{17'152}})
        for (const Recipe& recipe : of_w)
            for (const Recipe& recipe_x : of_x)
                for (const std::int64_t m : {1, 16, 17, 33, 65})
                    for (const std::int64_t rows :
                         {std::int64_t{5}, std::int64_t{16}, std::int64_t{39}, std::int64_t{300}}) {
                        const auto fits = [&](const Recipe& of) {
                            return of.layout.kind == LayoutKind::per_channel || depth % of.layout.block_n == 0;
                        };
                        if (!fits(recipe) || !fits(recipe_x) || (depth > 4096 && (m > 17 || rows != 39))) continue;
                        if (rows == 300 && (depth != 768 || m != 33)) continue;
                        if (!cases.takes()) continue;
                        std::vector<float> values = heavy_tailed(rows, depth, 1, 1), x = heavy_tailed(m, depth, 2, 1);
                        const ScaledTensor scaled = cast(array_of(values, {rows, depth}), recipe),
                                           w = scaled.transposed();
                        const ScaledTensor a = cast(array_of(x, {m, depth}), recipe_x);
                        auto* codes = static_cast<std::int8_t*>(a.data().data);
                        for (std::int64_t i = 0; i < m * depth; i += 7) codes[i] = i % 3 == 0 ? -128 : 127;
                        const Array by_tiles = Array::allocate(DType::float32, {m, rows}),
                                    by_dots = Array::allocate(DType::float32, {m, rows});
                        {
                            const BackendScope scope("amx");
                            if (!multiply_by("panels_integer", a, w, by_tiles)) continue;
                        }
                        const BackendScope scope("avx512_bf16");
                        ASSERT_TRUE(multiply_by("panels_integer", a, w, by_dots));
                        ASSERT_EQ(to_vector(by_tiles), to_vector(by_dots))
                            << describe(recipe) << " by " << describe(recipe_x) << ", M = " << m << ", N = " << rows
                            << ", K = " << depth;
                        ++compared;
                    }
    EXPECT_GT(compared, 0);
}

// The table of amx sends to tiles of integers what they are quicker at: many activations by blocks of a multiple of 64,
// and leaves shorter blocks to tiles of bfloat16.
TEST(IntegerTiles, TakeLongBlocks) {
    const std::vector<std::string> supported = cpu_info().supported;
    if (std::ranges::count(supported, "amx") == 0) GTEST_SKIP() << "this machine or build has no tiles";
    const BackendScope scope("amx");
    if (!Call().kernels.matmul.bf16->integer_tiles->supported())
        GTEST_SKIP() << "this machine has no tiles of integers";
    const auto path_of = [](const Recipe& recipe, const Recipe& recipe_x, std::int64_t m) {
        std::vector<float> values = heavy_tailed(n, k, 1, 1), x = heavy_tailed(m, k, 2, 1);
        const ScaledTensor w = cast(array_of(values, {n, k}), recipe).transposed(),
                           a = cast(array_of(x, {m, k}), recipe_x);
        EXPECT_EQ(tried_paths(a, w).back(), matmul_path(a, w));
        return std::string(matmul_path(a, w));
    };
    const Recipe int8 = make_recipe("INT8Scaling"), int4 = make_recipe("INT4Scaling");
    const Recipe blocks_of_32 = make_recipe("INT8Scaling", {{"group_size", std::int64_t{32}}});
    EXPECT_EQ(path_of(int8, int8, 17), "panels_integer");
    EXPECT_EQ(path_of(int8, int8, 16), "tiles");
    EXPECT_EQ(path_of(int4, int8, 16), "panels_integer");
    EXPECT_EQ(path_of(int4, int8, 512), "panels_integer");
    EXPECT_EQ(path_of(int8, blocks_of_32, 512), "panels_bf16");
    EXPECT_EQ(path_of(make_recipe("MXFP4BlockScaling"), int8, 512), "panels_bf16");
    EXPECT_EQ(path_of(make_recipe("NVFP4BlockScaling"), int8, 512), "panels_bf16");
}

// Every code of a scale, NaN, negative and subnormal ones included, each in a row of its own whose other scales are
// ordinary, at all places of a row that ends within a step. Activations have scales at both ends of what is multiplied.
void meet_every_code_of_a_scale(const char* name, std::int64_t depth, float times,
                                std::map<std::string_view, int>& used) {
    constexpr std::int64_t rows = 256, m = 3;
    std::vector<float> values = heavy_tailed(rows, depth, 1, 1), numbers = heavy_tailed(m, depth, 2, 1);
    for (float& x : numbers) x *= times;
    const ScaledTensor scaled = cast(array_of(values, {rows, depth}), make_recipe(name));
    const bool powers = scaled.scale_type() == ScaleType::e8m0;
    const std::int64_t blocks = scaled.scale().shape.back();
    for (std::int64_t row = 0; row < rows; ++row) {
        auto* codes = scaled.scale().as<std::uint8_t>() + row * blocks;
        for (std::int64_t b = 0; b < blocks; ++b)
            codes[b] = static_cast<std::uint8_t>(powers ? 120 + (row + 3 * b) % 17 : 8 + (7 * row + b) % 119);
        codes[row % blocks] = static_cast<std::uint8_t>(row);
    }
    const std::vector<float> all_weights = to_vector(dequantize(scaled));
    const ScaledTensor a = cast(array_of(numbers, {m, depth}), make_recipe("INT8Scaling"));
    const std::vector<float> x = to_vector(dequantize(a));
    for (const Path* const one : every_path) {
        const std::string_view path = one->name;
        SCOPED_TRACE(std::string(name) + " by " + std::string(path) + ", K = " + std::to_string(depth));
        const Array c = Array::allocate(DType::float32, {m, rows});
        if (!multiply_by(path, a, scaled.transposed(), c)) continue;
        ++used[path];
        std::vector<float> weights = all_weights;
        for (std::int64_t row = 0; row < rows; ++row) {
            const auto of_row = std::span(weights).subspan(static_cast<std::size_t>(row * depth), depth);
            const bool is_nan = std::ranges::any_of(of_row, [](float w) { return std::isnan(w); });
            const auto too_large = [&](float w) { return std::abs(w) * times > 0x1p+110F; };
            if (!is_nan && std::ranges::none_of(of_row, too_large)) continue;
            std::ranges::fill(of_row, 0.0F);  // a row whose results are looked at here
            for (std::int64_t i = 0; i < m; ++i) {
                float& found = c.as<float>()[i * rows + row];
                EXPECT_FALSE(is_nan && !std::isnan(found)) << "row " << row << ": " << found;
                found = 0;
            }
        }
        EXPECT_TRUE(within_bound(x, weights, c, m, rows, depth)) << "times " << times;
    }
}

TEST_P(Paths, Int8ActivationsMeetEveryCodeOfAScale) {
    const BackendScope scope(GetParam());
    std::map<std::string_view, int> used;
    for (const char* name : {"NVFP4BlockScaling", "MXFP4BlockScaling"})
        for (const std::int64_t depth : {416, 1184})
            for (const float times : {0x1p-62F, 1.0F, 0x1p+62F}) meet_every_code_of_a_scale(name, depth, times, used);
    EXPECT_EQ(used["in_place_integer"] > 0, Call().kernels.matmul.integers != nullptr);
}

// Scales at the ends of float32 and zero points that no byte holds lead to another path, and to the right numbers.
TEST_P(Paths, Int8ActivationsOfOddScalesAreRight) {
    const BackendScope scope(GetParam());
    for (const Recipe& recipe : recipes())
        for (const std::int64_t m : {1, 5, 20})
            for (const float times : {1e-33F, 1.0F, 1e25F}) {
                std::vector<float> values = heavy_tailed(n, k, 1, 1), numbers = heavy_tailed(m, k, 2, 1);
                for (std::size_t i = 0; i < values.size(); i += 3) values[i] /= times;
                for (float& x : numbers) x *= times;
                const ScaledTensor scaled = cast(array_of(values, {n, k}), recipe);
                if (const auto& zero_points = scaled.zero_point())
                    std::fill_n(zero_points->as<std::uint8_t>(), zero_points->size() / 2, std::uint8_t{21});
                const ScaledTensor a = cast(array_of(numbers, {m, k}), make_recipe("INT8Scaling"));
                const Array c = matmul(a, scaled.transposed());
                SCOPED_TRACE(describe(recipe) + ", M = " + std::to_string(m) + ", times " + std::to_string(times));
                const std::vector<float> weights = to_vector(dequantize(scaled));
                if (std::ranges::all_of(weights, [](float x) { return std::isfinite(x); })) {
                    EXPECT_TRUE(within_bound(to_vector(dequantize(a)), weights, c, m, n, k));
                }
            }
}

// Every recipe, by activations of every kind and number. Numbers that are ordinary are refused nowhere; those that come
// of codes and scales may have more terms or digits than a path takes.
TEST_P(Paths, WhatIsChosenIsWhatRuns) {
    const BackendScope scope(GetParam());
    Sample cases;
    for (const RecipeRow& row : catalogue()) {
        std::vector<float> values(static_cast<std::size_t>(n * k));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) - 8;
        const ScaledTensor scaled = cast(array_of(values, {n, k}), make_recipe(row.name)), w = scaled.transposed();
        const PreparedWeight prepared = PreparedWeight(scaled).transposed();
        for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 10, 11, 16, 17, 24, 25, 32, 33, 48, 49}) {
            if (!cases.takes()) continue;
            std::vector<float> x(static_cast<std::size_t>(m * k));
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1 + static_cast<float>(i % 29) / 32;
            for (const Operand& b : {Operand(w), Operand(prepared)}) {
                SCOPED_TRACE(std::string(row.name) + ", M = " + std::to_string(m));
                for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
                    for (const Precision precision : {Precision::exact, Precision::fast}) {
                        const Array a = rounded(x, dtype, {m, k});
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
        const auto every_kind = static_cast<Kinds>((1 << kind_names().size()) - 1);
        EXPECT_TRUE(last.path == &paths::panels_f32 && last.kinds == every_kind && last.rows.from == 1 &&
                    last.rows.to == Span::any)
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
