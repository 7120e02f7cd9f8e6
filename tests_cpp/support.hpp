// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "breccia/breccia.hpp"

namespace breccia {

/// What a field of the catalogue may be set to besides its default: other choices, the other truth value.
inline std::vector<FieldValue> other_values(const FieldSpec& spec) {
    std::vector<FieldValue> values;
    if (spec.kind == FieldSpec::Kind::boolean) values.emplace_back(spec.number == 0);
    if (spec.kind != FieldSpec::Kind::choice) return values;
    std::string_view rest = spec.text;
    while (rest.find('|') != std::string_view::npos) {
        rest.remove_prefix(rest.find('|') + 1);
        values.emplace_back(std::string(rest.substr(0, rest.find('|'))));
    }
    return values;
}

/// Every recipe of the catalogue: with default fields, with one field set to something else, and the combinations of
/// fields whose code differs.
inline std::vector<Recipe> all_recipes() {
    using namespace std::string_literals;
    std::vector<Recipe> recipes;
    const auto add = [&](std::string_view name, const Fields& fields) { recipes.push_back(make_recipe(name, fields)); };
    for (const RecipeRow& row : catalogue()) {
        add(row.name, {});
        for (const FieldSpec& spec : row.fields)
            for (const FieldValue& value : other_values(spec))
                if (row.name != "INT4Scaling" || spec.name != "symmetric")  // a zero point needs unsigned codes, below
                    add(row.name, {{std::string(spec.name), value}});
    }
    add("Float8BlockScaling", {{"block_m", std::int64_t{128}}});
    add("Float8BlockScaling", {{"scale_format", "e8m0"s}, {"scale_search", "mse"s}});
    add("INT4Scaling", {{"signed", false}, {"symmetric", false}});
    add("INT4Scaling", {{"scale_search", "mse"s}, {"scale_dtype", "bf16"s}});
    add("INT4Scaling", {{"group_size", std::int64_t{32}}, {"signed", false}});
    add("INT8Scaling", {{"group_size", std::int64_t{64}}, {"symmetric", false}});
    return recipes;
}

#ifdef BRECCIA_SANITIZED
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// Which of a test's many cases run: all, or about one of N where the environment has BRECCIA_TESTS_ONE_OF=N, as
/// scripts set it that run the tests where they take long. Each case has a share, drawn so that no loop's length is in
/// step with N; BRECCIA_TESTS_TURN says whose turn it is: after N turns in a row every case has run.
class Sample {
public:
    Sample() = default;
    /// Of a test that takes long in some builds alone: all of its cases run where it does not.
    explicit Sample(bool takes_long) : of_(takes_long ? number("BRECCIA_TESTS_ONE_OF", 1) : 1) {}
    [[nodiscard]] bool takes() { return random_() % of_ == turn_ % of_; }

private:
    using Number = std::mt19937::result_type;
    static Number number(const char* name, int least) {
        const char* text = std::getenv(name);
        return static_cast<Number>(std::max(text == nullptr ? least : std::atoi(text), least));
    }
    Number of_ = number("BRECCIA_TESTS_ONE_OF", 1), turn_ = number("BRECCIA_TESTS_TURN", 0);
    std::mt19937 random_;
};

inline std::string describe(const Recipe& r) {
    return std::string(r.name) + "/" + std::string(info(r.element).name) + "/rule" +
           std::to_string(static_cast<int>(r.rule)) + "/search" + std::to_string(static_cast<int>(r.search));
}

/// Heavy-tailed values whose rows differ in size by orders of magnitude.
inline std::vector<float> heavy_tailed(std::int64_t rows, std::int64_t cols, unsigned seed = 1, float spread = 6) {
    std::mt19937 random(seed);
    std::student_t_distribution<float> value(3.0F);
    std::uniform_real_distribution<float> exponent(-spread, spread);
    std::vector<float> x;
    for (std::int64_t r = 0; r < rows; ++r) {
        const float size = std::pow(10.0F, exponent(random));
        for (std::int64_t c = 0; c < cols; ++c) x.push_back(value(random) * size);
    }
    return x;
}

inline Array array_of(std::vector<float>& x, Shape shape) {
    return Array::borrow(x.data(), DType::float32, std::move(shape));
}

inline std::vector<float> to_vector(const Array& array) {
    const auto* p = array.as<const float>();
    return {p, p + array.size()};
}

/// Numbers rounded to a type.
inline Array rounded(const std::vector<float>& x, DType dtype, const Shape& shape) {
    const Array out = Array::allocate(dtype, shape);
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (dtype == DType::float32) out.as<float>()[i] = x[i];
        if (dtype == DType::float16) out.as<Float16>()[i] = to_float16(x[i]);
        if (dtype == DType::bfloat16) out.as<BFloat16>()[i] = to_bfloat16(x[i]);
    }
    return out;
}

/// What a product of rows of `a` by rows of `w` is, and the sum of its terms' magnitudes.
struct ExactProduct {
    std::vector<double> product, size;
};

inline ExactProduct exact_product(const std::vector<float>& a, const std::vector<float>& w, std::int64_t m,
                                  std::int64_t n, std::int64_t k) {
    ExactProduct r;
    for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
            double sum = 0, size = 0;
            const float *row = a.data() + i * k, *column = w.data() + j * k;
            for (std::int64_t l = 0; l < k; ++l) {
                const double term = static_cast<double>(row[l]) * static_cast<double>(column[l]);
                sum += term;
                size += term < 0 ? -term : term;  // a function's call takes longer without optimization
            }
            r.product.push_back(sum);
            r.size.push_back(size);
        }
    return r;
}

inline bool same_bytes(const Array& a, const Array& b) {
    return a.shape == b.shape && a.type == b.type &&
           std::memcmp(a.data, b.data, static_cast<std::size_t>(a.size()) * a.type.size()) == 0;
}

template <class F>
std::string message_of(Error::Kind kind, F f) {
    try {
        f();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind) << error.what();
        return error.what();
    }
    ADD_FAILURE() << "no error was thrown";
    return {};
}

}  // namespace breccia
