// SPDX-License-Identifier: Apache-2.0
//
// Every backend this machine supports against the portable one, byte for byte.
#include <algorithm>

#include "support.hpp"

namespace breccia {
namespace {

std::vector<std::string> faster_backends() {
    std::vector<std::string> names = cpu_info().supported;
    names.erase(names.begin());  // portable itself
    return names;
}

std::vector<float> with_specials(std::vector<float> x) {
    const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -0.0F,
                              -std::numeric_limits<float>::infinity(),
                              1e-42F,
                              std::numeric_limits<float>::max()};
    for (std::size_t i = 0; i < std::size(specials); ++i)
        if (x.size() > i * 37 + 5) x[i * 37 + 5] = specials[i];
    return x;
}

ScaledTensor portable_cast(const Array& x, const Recipe& recipe, const CastOptions& options = {}) {
    const BackendScope scope("portable");
    return cast(x, recipe, options);
}

void expect_same_bytes(const ScaledTensor& actual, const ScaledTensor& expected, const std::string& name) {
    EXPECT_TRUE(same_bytes(actual.data(), expected.data())) << name;
    EXPECT_TRUE(same_bytes(actual.scale(), expected.scale())) << name;
    EXPECT_TRUE(!expected.zero_point() || same_bytes(*actual.zero_point(), *expected.zero_point())) << name;
}

TEST(Backends, CastBytesEqualPortable) {
    constexpr std::int64_t rows = 131, cols = 384;
    for (const bool specials : {false, true}) {
        std::vector<float> x = heavy_tailed(rows, cols);
        if (specials) x = with_specials(x);
        const Array array = array_of(x, {rows, cols});
        for (const Recipe& recipe : all_recipes()) {
            SCOPED_TRACE(describe(recipe));
            const ScaledTensor expected = portable_cast(array, recipe);
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                const ScaledTensor actual = cast(array, recipe);
                expect_same_bytes(actual, expected, name);
                for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
                    const Array y = dequantize(actual, dtype);
                    const BackendScope portable("portable");
                    EXPECT_TRUE(same_bytes(y, dequantize(expected, dtype))) << name << " to " << name_of(dtype);
                }
            }
        }
    }
}

// Blocks of 6 and of what lies at, and one unit in the last place beside, every multiple of 1/8 up to it, zeros of both
// signs and numbers that underflow: where a scale is a power of two, these are all ties and all neighbours of ties.
TEST(Backends, TiesAndZerosEqualPortable) {
    std::vector<float> x;
    const auto add = [&](float value) {
        if (x.size() % 16 == 0) x.push_back(6.0F);
        x.push_back(value);
        x.push_back(-value);
        while (x.size() % 16 == 15) x.push_back(-6.0F);
    };
    for (int eighth = 0; eighth <= 48; ++eighth) {
        const float at = static_cast<float>(eighth) * 0.125F;
        for (const float value : {std::nextafter(at, -1.0F), at, std::nextafter(at, 8.0F)}) add(value);
    }
    for (const float tiny : {1e-45F, 1e-38F, 1e-30F, 0.0F}) add(tiny);
    constexpr std::int64_t cols = 512;
    ASSERT_LE(x.size(), static_cast<std::size_t>(cols));
    x.resize(cols, 0.25F);
    std::vector<float> rows;
    for (const float scale : {1.0F, 0x1p-20F, 0x1p-38F, 0x1p37F, 0.3F})
        for (const float value : x) rows.push_back(value * scale);
    const Array array = array_of(rows, {5, cols});
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        const ScaledTensor expected = portable_cast(array, recipe);
        for (const std::string& name : faster_backends()) {
            const BackendScope scope(name);
            expect_same_bytes(cast(array, recipe), expected, name);
        }
    }
}

TEST(Backends, RequantizedBytesEqualPortable) {
    constexpr std::int64_t rows = 130, cols = 640;
    std::vector<float> x = heavy_tailed(rows, cols);
    const Array array = array_of(x, {rows, cols});
    std::vector<Recipe> sources;  // how scales were chosen makes no other kind of source
    for (const Recipe& recipe : all_recipes()) {
        const auto alike = [&](const Recipe& r) {
            return r.element == recipe.element && r.scale == recipe.scale && r.layout == recipe.layout &&
                   r.two_level == recipe.two_level && r.global_divides == recipe.global_divides &&
                   r.has_zero_point() == recipe.has_zero_point();
        };
        if (std::ranges::none_of(sources, alike)) sources.push_back(recipe);
    }
    Sample cases;
    for (const Recipe& from : sources) {
        const ScaledTensor source = portable_cast(array, from);
        for (const Recipe& to : all_recipes()) {
            if (!cases.takes()) continue;
            SCOPED_TRACE(describe(from) + " to " + describe(to));
            const ScaledTensor expected = [&] {
                const BackendScope scope("portable");
                return requantize(source, to);
            }();
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                expect_same_bytes(requantize(source, to), expected, name);
            }
        }
    }
}

TEST(Backends, StochasticCodesEqualPortable) {
    constexpr std::int64_t rows = 35, cols = 384;
    for (const bool specials : {false, true}) {
        std::vector<float> x = heavy_tailed(rows, cols);
        if (specials) x = with_specials(x);
        const Array array = array_of(x, {rows, cols});
        CastOptions options, other;
        options.seed = 0x1'0000'0003U;
        other.seed = 3;
        options.hadamard_block = other.hadamard_block = 16;
        for (const Recipe& recipe : all_recipes()) {
            SCOPED_TRACE(describe(recipe));
            const ScaledTensor expected = portable_cast(array, recipe, options);
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                EXPECT_TRUE(same_bytes(cast(array, recipe, options).data(), expected.data())) << name;
            }
            if (!specials) {
                EXPECT_FALSE(same_bytes(cast(array, recipe, other).data(), expected.data()));
            }
        }
    }
}

// Each length from 0 to three vectors, each format, at an odd address.
TEST(Backends, EncodeAndDecodeEqualPortableAtAnyLength) {
    std::mt19937 random(3);
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        for (std::size_t n = 0; n <= 48; ++n) {
            std::vector<float> x(n);
            for (float& value : x) value = float_from_bits(static_cast<std::uint32_t>(random()));
            std::vector<std::uint8_t> expected(n), buffer(n + 1);
            const std::span<std::uint8_t> actual = std::span(buffer).subspan(1);
            std::vector<float> decoded(n), decoded_here(n);
            {
                const BackendScope scope("portable");
                encode(x, format, expected);
                decode(expected, format, decoded);
            }
            for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(expected[i], info(format).encode(x[i])) << info(format).name;
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                encode(x, format, actual);
                ASSERT_TRUE(std::ranges::equal(actual, expected)) << info(format).name << ' ' << name << ' ' << n;
                decode(actual, format, decoded_here);
                ASSERT_TRUE(std::ranges::equal(decoded, decoded_here, {}, bits_of, bits_of)) << info(format).name;
            }
        }
    }
}

// For well-behaved divisors the vector backends replace the division; the quotient must be the same.
TEST(Backends, DivisionIsCorrectlyRounded) {
    std::mt19937 random(11);
    const Recipe recipe = make_recipe("Float8BlockScaling", {{"block_k", std::int64_t{16}}});
    std::vector<float> x(1 << 16);
    for (int round = 0; round < 16; ++round) {
        for (float& value : x) {
            const auto exponent = static_cast<std::uint32_t>(127 - 40 + random() % 80);
            value = float_from_bits((static_cast<std::uint32_t>(random()) & 0x807F'FFFFU) | exponent << 23);
        }
        for (std::size_t i = 0; i < x.size(); i += 7) x[i] = std::copysign(0.0F, x[i]);
        const Array array = array_of(x, {1 << 8, 1 << 8});
        const ScaledTensor expected = [&] {
            const BackendScope scope("portable");
            return cast(array, recipe);
        }();
        for (const std::string& name : faster_backends()) {
            const BackendScope scope(name);
            ASSERT_TRUE(same_bytes(cast(array, recipe).data(), expected.data())) << name;
        }
    }
}

TEST(Backends, UnknownNamesAreRefused) {
    EXPECT_THAT(message_of(Error::Kind::value, [] { set_backend("mmx"); }), testing::HasSubstr("'portable'"));
    for (const std::string& name : cpu_info().supported) {
        set_backend(name);
        EXPECT_EQ(cpu_info().backend, name);
    }
    for (const std::string& name : cpu_info().left_out)
        EXPECT_THAT(message_of(Error::Kind::value, [&] { set_backend(name); }), testing::HasSubstr("BRECCIA_BACKENDS"));
    set_backend("");
}

TEST(Threads, ResultsDoNotDependOnTheirNumber) {
    std::vector<float> x = heavy_tailed(512, 512);
    // Of so small numbers the later bfloat16 terms have subnormal products, which some kernels round to zero.
    std::vector<float> small(x.begin(), x.begin() + 512);
    for (float& value : small) value = std::copysign(std::ldexp(1 + std::abs(value) / 1024, -99), value);
    Sample cases(sanitized);
    for (const Recipe& recipe : all_recipes()) {
        if (!cases.takes()) continue;
        set_num_threads(1);
        const ScaledTensor one = cast(array_of(x, {512, 512}), recipe);
        const Array y_one = matmul(one, one.transposed());
        const Array small_one = matmul(array_of(small, {1, 512}), one.transposed());
        set_num_threads(3);
        const ScaledTensor three = cast(array_of(x, {512, 512}), recipe);
        EXPECT_TRUE(same_bytes(one.data(), three.data())) << describe(recipe);
        EXPECT_TRUE(same_bytes(one.scale(), three.scale())) << describe(recipe);
        EXPECT_TRUE(same_bytes(y_one, matmul(three, three.transposed()))) << describe(recipe);
        EXPECT_TRUE(same_bytes(small_one, matmul(array_of(small, {1, 512}), three.transposed()))) << describe(recipe);
    }
    message_of(Error::Kind::value, [] { set_num_threads(0); });
    set_num_threads(1);
}

}  // namespace
}  // namespace breccia
