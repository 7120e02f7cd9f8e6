// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace breccia {
namespace {

std::vector<float> importances(std::int64_t count, unsigned seed, float spread) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> h(static_cast<std::size_t>(count));
    for (float& x : h) x = std::exp(spread * normal(random));
    return h;
}

double weighted_error(const std::vector<float>& x, const ScaledTensor& scaled, const std::vector<float>& h) {
    const std::vector<float> y = to_vector(dequantize(scaled));
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double error = static_cast<double>(y[i]) - static_cast<double>(x[i]);
        sum += error * error * static_cast<double>(h[i % h.size()]);
    }
    return sum;
}

CastOptions by(std::vector<float>& h) {
    CastOptions options;
    options.importance = array_of(h, {static_cast<std::int64_t>(h.size())});
    return options;
}

// Nearest code by nearest value, in double.
double error_under(double scale, std::span<const float> x, std::span<const float> h,
                   const std::vector<double>& values) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        double least = INFINITY;
        for (const double v : values) least = std::min(least, std::abs(v * scale - static_cast<double>(x[i])));
        sum += least * least * static_cast<double>(h[i]);
    }
    return sum;
}

std::vector<double> values_of(Format format) {
    std::vector<double> values;
    for (int code = 0; code < 1 << info(format).bits; ++code) {
        const float v = info(format).decode(static_cast<std::uint8_t>(code));
        if (std::isfinite(v)) values.push_back(static_cast<double>(v));
    }
    return values;
}

TEST(Importance, NoRecipeLosesToItsUnweightedSearch) {
    constexpr std::int64_t rows = 20, cols = 384;
    std::vector<float> x = heavy_tailed(rows, cols, 1, 3), h = importances(cols, 2, 1.5F);
    for (const Recipe& recipe : all_recipes()) {
        if (recipe.is_expanded()) continue;
        SCOPED_TRACE(describe(recipe));
        const Array array = array_of(x, {rows, cols});
        const double weighted = weighted_error(x, cast(array, recipe, by(h)), h);
        EXPECT_LE(weighted, weighted_error(x, cast(array, recipe), h) * (1 + 1e-5));
    }
}

TEST(Importance, ScalesThatAreCodesAreTheBestOfAll) {
    std::vector<float> x = heavy_tailed(4, 64, 3, 1), h = importances(64, 4, 2);
    for (const char* name : {"NVFP4BlockScaling", "MXFP4BlockScaling", "MXFP8BlockScaling", "MXFP6BlockScaling"}) {
        const Recipe recipe = make_recipe(name);
        const ScaledTensor scaled = cast(array_of(x, {4, 64}), recipe, by(h));
        const std::vector<float> y = to_vector(dequantize(scaled));
        const std::vector<double> values = values_of(recipe.element);
        const double level = recipe.two_level ? static_cast<double>(*scaled.global_scale()->as<float>()) : 1.0;
        const std::int64_t block = recipe.layout.block_n;
        for (std::int64_t begin = 0; begin < 4 * 64; begin += block) {
            const auto at = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(block);
            const std::span<const float> values_x = std::span<const float>(x).subspan(at, n);
            const std::span<const float> weights = std::span<const float>(h).subspan(at % 64, n);
            double own = 0, best = INFINITY;
            for (std::size_t i = 0; i < n; ++i) {
                const double error = static_cast<double>(y[at + i]) - static_cast<double>(x[at + i]);
                own += error * error * static_cast<double>(weights[i]);
            }
            const FormatInfo& scales = info(format_of_scale(recipe.scale));
            for (int code = 1; code < 255; ++code) {
                const double scale = static_cast<double>(scales.decode(static_cast<std::uint8_t>(code))) * level;
                if (std::isfinite(scale) && scale > 0)
                    best = std::min(best, error_under(scale, values_x, weights, values));
            }
            EXPECT_LE(own, best * (1 + 2e-5)) << name << " at " << begin;
        }
    }
}

TEST(Importance, IntegersHaveTheBestScaleThatTheirTypeStores) {
    std::vector<float> x = heavy_tailed(2, 32, 5, 1), h = importances(32, 6, 2);
    Recipe recipe = make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}});
    const auto best = [&](std::int64_t row, bool asymmetric) {
        const auto values_x = std::span<const float>(x).subspan(static_cast<std::size_t>(row * 32), 32);
        double least = INFINITY;
        constexpr int step = sanitized ? 16 : 1;  // the search is the test's own
        for (int bits = 0x1000; bits < 0x5800; bits += step)
            for (int zero = 0; zero < (asymmetric ? 16 : 1); ++zero) {
                std::vector<double> values;
                for (int code = 0; code < 16; ++code) values.push_back(asymmetric ? code - zero : code - 8);
                const auto scale = static_cast<double>(to_float(Float16{static_cast<std::uint16_t>(bits)}));
                least = std::min(least, error_under(scale, values_x, h, values));
                if (!asymmetric) least = std::min(least, error_under(-scale, values_x, h, values));
            }
        return least;
    };
    for (const bool asymmetric : {false, true}) {
        if (asymmetric)
            recipe =
                make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}, {"signed", false}, {"symmetric", false}});
        for (std::int64_t row = 0; row < (asymmetric ? 1 : 2); ++row) {
            std::vector<float> one(x.begin() + row * 32, x.begin() + (row + 1) * 32);
            const double own = weighted_error(one, cast(array_of(one, {1, 32}), recipe, by(h)), h);
            EXPECT_LE(own, best(row, asymmetric) * (1 + 2e-5));
        }
    }
}

TEST(Importance, WhatIsNoImportanceIsTheMeanOfTheOthers) {
    std::vector<float> x = heavy_tailed(8, 128), h(128, 2.0F), filled(128, 2.0F), none(128, 0.0F), ones(128, 1.0F);
    h[3] = 0, h[50] = NAN, h[100] = INFINITY;
    for (const Recipe& recipe : all_recipes()) {
        if (recipe.is_expanded()) continue;
        const Array array = array_of(x, {8, 128});
        EXPECT_EQ(to_vector(dequantize(cast(array, recipe, by(h)))),
                  to_vector(dequantize(cast(array, recipe, by(filled)))));
        EXPECT_EQ(to_vector(dequantize(cast(array, recipe, by(none)))),
                  to_vector(dequantize(cast(array, recipe, by(ones)))));
    }
    h[7] = -1;
    EXPECT_THAT(message_of(Error::Kind::value, [&] { cast(array_of(x, {8, 128}), make_recipe("mxfp4"), by(h)); }),
                testing::HasSubstr("importance must not be negative"));
    for (const char* name : {"expanded", "int8_expanded"})
        EXPECT_THAT(message_of(Error::Kind::value, [&] { cast(array_of(x, {8, 128}), make_recipe(name), by(filled)); }),
                    testing::HasSubstr("importance needs a recipe without exponents"));
}

}  // namespace
}  // namespace breccia
