// SPDX-License-Identifier: Apache-2.0
//
// Sums and counts of two tensors against plain loops, on every backend.
#include <cmath>
#include <limits>

#include "support.hpp"

namespace breccia {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();

TEST(Compare, SumsOfSmallIntegersAreExact) {
    for (const std::int64_t n : {0, 1, 7, 8, 9, 63, 2047, 2048, 2049, 70'001}) {
        std::vector<float> x, y;
        Comparison expected;
        for (std::int64_t i = 0; i < n; ++i) {
            x.push_back(static_cast<float>(i % 17 - 8));
            y.push_back(static_cast<float>(i % 5 - 2));
            const double a = x.back(), b = y.back();
            expected.signal += a * a;
            expected.other += b * b;
            expected.dot += a * b;
            expected.noise += (a - b) * (a - b);
            if (std::abs(a - b) > expected.max_error) {
                expected.max_error = std::abs(a - b);
                expected.max_error_at = i;
            }
            expected.equal = expected.equal && a == b;
        }
        expected.count = n;
        for (const std::string& name : cpu_info().supported) {
            const BackendScope scope(name);
            EXPECT_EQ(compare(array_of(x, {n}), array_of(y, {n})), expected) << name << ' ' << n;
        }
    }
}

TEST(Compare, NansAndInfinities) {
    std::vector<float> x{1, nan, 2, infinity, 5}, y{1, nan, 2, infinity, 5}, z{1, 0, nan, infinity, 5};
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        const Comparison same = compare(array_of(x, {5}), array_of(y, {5}));
        EXPECT_TRUE(same.equal);
        EXPECT_EQ(same.reference_nans, 1);
        EXPECT_EQ(same.nans, 1);
        EXPECT_EQ(same.sqnr_db(), infinity);
        const Comparison other = compare(array_of(x, {5}), array_of(z, {5}));
        EXPECT_FALSE(other.equal);
        EXPECT_TRUE(std::isnan(other.noise));
        EXPECT_TRUE(std::isnan(other.max_error));
        EXPECT_EQ(other.max_error_at, 1);
        EXPECT_EQ(other.sqnr_db(), -infinity);
    }
}

// Bins by comparison with powers of two and of its square root in double.
TEST(Compare, MagnitudesByHalfOctave) {
    std::vector<float> x{0, -0.0F, nan, infinity, -infinity};
    for (int e = -149; e < 128; ++e)
        for (const double edge : {std::ldexp(1.0, e), std::ldexp(std::sqrt(2.0), e)}) {
            const auto at = static_cast<float>(edge);
            for (const float v : {at, std::nextafter(at, 0.0F), -std::nextafter(at, infinity)}) x.push_back(v);
        }
    Magnitudes expected;
    for (const float v : x) {
        const double size = std::abs(static_cast<double>(v));
        if (!std::isfinite(size)) {
            ++expected.not_finite;
        } else if (size == 0) {
            ++expected.zeros;
        } else {
            int exponent = 0;
            const double mantissa = 2 * std::frexp(size, &exponent);
            const int half = 2 * (exponent - 1) + (mantissa >= std::sqrt(2.0) ? 1 : 0);
            ++expected.counts[static_cast<std::size_t>(half - Magnitudes::first)];
            expected.largest = std::max(expected.largest, static_cast<float>(size));
        }
    }
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        EXPECT_EQ(magnitudes(array_of(x, {static_cast<std::int64_t>(x.size())})), expected) << name;
    }
}

TEST(Compare, Messages) {
    std::vector<float> x(6);
    EXPECT_EQ(
        message_of(Error::Kind::value, [&] { static_cast<void>(compare(array_of(x, {2, 3}), array_of(x, {3, 2}))); }),
        "tensor.shape must be that of reference, (2, 3), got (3, 2)");
    EXPECT_EQ(message_of(Error::Kind::value,
                         [&] { static_cast<void>(error_magnitudes(array_of(x, {6}), array_of(x, {6}), 0)); }),
              "unit must be positive and finite, got 0.000000");
    const Array bytes = Array::allocate(ElementType::uint8(), {6});
    EXPECT_THAT(message_of(Error::Kind::type, [&] { static_cast<void>(magnitudes(bytes)); }),
                testing::StartsWith("x must be a ScaledTensor or a float32"));
}

}  // namespace
}  // namespace breccia
