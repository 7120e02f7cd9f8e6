// SPDX-License-Identifier: Apache-2.0
//
// Thresholds choose between paths, never between right and wrong: every path keeps the error bound on either side.
#include <map>

#include "breccia/prepared.hpp"
#include "matmul/product.hpp"
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

TEST_P(Paths, AreRightWhateverTheThresholdsSay) {
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

INSTANTIATE_TEST_SUITE_P(Every, Paths, testing::ValuesIn(cpu_info().supported),
                         [](const auto& test) { return test.param; });

TEST(Thresholds, EveryBackendHasARow) {
    for (const std::string& name : cpu_info().supported) EXPECT_EQ(thresholds_of(name).backend, name);
}

TEST(Thresholds, AnUnknownPathIsNamed) {
    std::vector<float> x(4);
    const Array a = array_of(x, {2, 2}), c = Array::allocate(DType::float32, {2, 2});
    EXPECT_EQ(message_of(Error::Kind::value, [&] { multiply_by("abacus", a, a, c); }),
              "path must be one that there is, got 'abacus'");
}

}  // namespace
}  // namespace breccia
