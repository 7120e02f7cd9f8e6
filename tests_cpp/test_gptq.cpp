// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace breccia {
namespace {

TEST(Gptq, DiagonalMomentsGiveTheNearestCodesAndOthersABetterOutput) {
    constexpr std::int64_t rows = 16, cols = 256;
    std::vector<float> w = heavy_tailed(rows, cols, 7, 1), inputs = heavy_tailed(300, cols, 8, 1);
    for (std::int64_t t = 0; t < 300; ++t)  // neighbours go together
        for (std::int64_t k = 1; k < cols; ++k)
            inputs[static_cast<std::size_t>(t * cols + k)] += 0.9F * inputs[static_cast<std::size_t>(t * cols + k - 1)];
    const Array x = array_of(inputs, {300, cols});
    Array turned = x;
    std::swap(turned.shape[0], turned.shape[1]);
    std::swap(turned.strides[0], turned.strides[1]);
    const Array full = matmul(turned, x);
    std::vector<float> h = to_vector(full), diagonal(h.size(), 0.0F), line;
    for (std::int64_t k = 0; k < cols; ++k) {
        const auto at = static_cast<std::size_t>(k * (cols + 1));
        diagonal[at] = h[at];
        line.push_back(h[at]);
    }
    const auto output_error = [&](const ScaledTensor& q) {
        const std::vector<float> y = to_vector(dequantize(q));
        double sum = 0;
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < cols; ++i)
                for (std::int64_t j = 0; j < cols; ++j) {
                    const auto a = static_cast<std::size_t>(r * cols + i), b = static_cast<std::size_t>(r * cols + j);
                    sum += static_cast<double>(y[a] - w[a]) * static_cast<double>(y[b] - w[b]) *
                           static_cast<double>(h[static_cast<std::size_t>(i * cols + j)]);
                }
        return sum;
    };
    const Array weight = array_of(w, {rows, cols});
    CastOptions by_diagonal;
    by_diagonal.importance = array_of(line, {cols});
    for (const char* name : {"NVFP4BlockScaling", "MXFP4BlockScaling", "INT4Scaling"}) {
        const Recipe recipe = make_recipe(name);
        const ScaledTensor near = cast(weight, recipe, by_diagonal);
        EXPECT_EQ(to_vector(dequantize(gptq(weight, array_of(diagonal, {cols, cols}), recipe))),
                  to_vector(dequantize(near)));
        GptqReport report;
        EXPECT_LT(output_error(gptq(weight, full, recipe, {}, &report)), 0.8 * output_error(near)) << name;
        EXPECT_EQ(report.nearest, 0);
        EXPECT_EQ(report.dead, 0);
        EXPECT_EQ(report.damp, GptqOptions{}.damp);
    }
}

TEST(Gptq, RefusesMomentsInTheMemoryOfTheOutput) {
    const Recipe recipe = make_recipe("INT8Scaling");
    std::vector<float> w = heavy_tailed(2, 32, 7, 1), moments(32 * 32);
    for (std::size_t k = 0; k < 32; ++k) moments[k * 33] = 1;
    CastOutput out = allocate(plan_cast({2, 32}, recipe));
    out.data = Array::borrow(static_cast<void*>(moments.data()), ElementType::uint8(), {2, 32});
    message_of(Error::Kind::value, [&] { gptq_into(array_of(w, {2, 32}), array_of(moments, {32, 32}), recipe, out); });
    EXPECT_EQ(moments[0], 1);
}

TEST(Gptq, RefusesRecipesWithExponents) {
    std::vector<float> w(2 * 128, 1.0F), moments(128 * 128, 1.0F);
    for (const char* name : {"expanded", "int8_expanded"})
        EXPECT_THAT(message_of(Error::Kind::value,
                               [&] { gptq(array_of(w, {2, 128}), array_of(moments, {128, 128}), make_recipe(name)); }),
                    testing::HasSubstr("gptq needs a recipe without exponents"));
}

}  // namespace
}  // namespace breccia
