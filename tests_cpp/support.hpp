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

/// Which of a test's many cases run: all, or about one of N where the environment has BRECCIA_TESTS_ONE_OF=N, as
/// scripts set it that run the tests in emulation. Drawn, the same ones each time, so that no loop's length is in step
/// with N.
class Sample {
public:
    [[nodiscard]] bool takes() { return random_() % one_of() == 0; }

private:
    static std::mt19937::result_type one_of() {
        const char* n = std::getenv("BRECCIA_TESTS_ONE_OF");
        return n == nullptr ? 1 : static_cast<std::mt19937::result_type>(std::max(std::atoi(n), 1));
    }
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
