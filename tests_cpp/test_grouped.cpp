// SPDX-License-Identifier: Apache-2.0
//
// grouped_matmul: rows of many experts by the weight of each, against matmul of each expert's own tensors.
#include "support.hpp"

namespace breccia {
namespace {

using testing::HasSubstr;

constexpr std::int64_t experts = 9, rows = 20, n = 6, k = 128;
constexpr std::int64_t offsets[] = {0, 3, 3, 4, 4, 5, 9, 12, 12, 17};  // three have no rows, three rows no expert

std::vector<float> weights_of_experts() {
    std::vector<float> weights;
    for (std::int64_t e = 0; e < experts; ++e) {
        const std::vector<float> one = heavy_tailed(n, k, static_cast<unsigned>(e) + 2, 1);
        weights.insert(weights.end(), one.begin(), one.end());
    }
    return weights;
}

class Grouped : public testing::Test {
protected:
    ~Grouped() override { set_num_threads(1); }

    [[nodiscard]] Array rows_of(std::int64_t begin, std::int64_t end) const {
        return Array::borrow(
            std::span(x).subspan(static_cast<std::size_t>(begin * k), static_cast<std::size_t>((end - begin) * k)),
            {end - begin, k});
    }
    [[nodiscard]] Array weight_of(std::int64_t e) const {
        return Array::borrow(std::span(weights).subspan(static_cast<std::size_t>(e * n * k), n * k), {n, k});
    }

    std::vector<float> x = heavy_tailed(rows, k, 1, 1), weights = weights_of_experts();
    const Array activations = Array::borrow(x, {rows, k}), stack = Array::borrow(weights, {experts, n, k});
};

// What a stack and a matrix alone share: recipes with one scale, or one global scale, for a whole tensor differ.
bool is_of_blocks(const Recipe& recipe) { return recipe.layout.kind != LayoutKind::per_tensor && !recipe.two_level; }

TEST_F(Grouped, RowsAreThoseOfMatmulByEachExpert) {
    for (const int threads : {1, 2}) {  // nine experts: one by one for three threads and more, whole ones for fewer
        set_num_threads(threads);
        for (const Recipe& recipe : all_recipes()) {
            SCOPED_TRACE(describe(recipe));
            const ScaledTensor w = cast(stack, recipe);
            const std::vector<float> values = to_vector(dequantize(w));
            const std::vector<float> got = to_vector(grouped_matmul(activations, w, offsets));
            for (std::int64_t e = 0; e < experts; ++e)
                for (std::int64_t row = offsets[e]; row < offsets[e + 1]; ++row)
                    for (std::int64_t j = 0; j < n; ++j) {
                        double sum = 0, magnitude = 0;
                        for (std::int64_t i = 0; i < k; ++i) {
                            const double product = static_cast<double>(x[static_cast<std::size_t>(row * k + i)]) *
                                                   values[static_cast<std::size_t>((e * n + j) * k + i)];
                            sum += product;
                            magnitude += std::abs(product);
                        }
                        EXPECT_NEAR(got[static_cast<std::size_t>(row * n + j)], sum, 1e-5 * magnitude);
                    }
            for (std::size_t i = static_cast<std::size_t>(offsets[experts] * n); i < got.size(); ++i)
                EXPECT_EQ(got[i], 0) << "a row of no expert";
        }
    }
}

TEST_F(Grouped, BytesAreThoseOfMatmul) {
    const ScaledTensor scaled_rows = cast(activations, recipes::block{});
    for (const Recipe& recipe : all_recipes()) {
        if (!is_of_blocks(recipe)) continue;
        SCOPED_TRACE(describe(recipe));
        const ScaledTensor w = cast(stack, recipe);
        const Array of_numbers = grouped_matmul(activations, w, offsets, DType::bfloat16);
        const Array of_codes = grouped_matmul(scaled_rows, w, offsets);
        for (std::int64_t e = 0; e < experts; ++e) {
            const std::int64_t begin = offsets[e], end = offsets[e + 1];
            if (begin == end) continue;
            const ScaledTensor one = cast(weight_of(e), recipe).transposed();
            const Array numbers = matmul(rows_of(begin, end), one, DType::bfloat16);
            const Array codes = matmul(cast(rows_of(begin, end), recipes::block{}), one);
            const auto bytes = [&](const Array& whole) { return whole.as<std::byte>() + begin * whole.strides[0]; };
            EXPECT_EQ(std::memcmp(bytes(of_numbers), numbers.data, static_cast<std::size_t>(numbers.size()) * 2), 0);
            EXPECT_EQ(std::memcmp(bytes(of_codes), codes.data, static_cast<std::size_t>(codes.size()) * 4), 0);
        }
    }
}

TEST_F(Grouped, TakesViewsAndWritesThem) {
    const ScaledTensor w = cast(stack, recipes::mxfp8{});
    const std::vector<float> expected = to_vector(grouped_matmul(activations, w, offsets));
    std::vector<float> columns_first(x.size());
    for (std::int64_t i = 0; i < rows * k; ++i)
        columns_first[static_cast<std::size_t>(i % k * rows + i / k)] = x[static_cast<std::size_t>(i)];
    const Array turned = Array::borrow(columns_first, {k, rows}).transposed();
    const Array out = Array::allocate(DType::float32, {n, rows}).transposed();
    std::fill_n(out.as<float>(), out.size(), 7.0F);
    grouped_matmul_into(turned, w, offsets, out);
    for (std::int64_t i = 0; i < rows * n; ++i)
        EXPECT_EQ(out.as<float>()[i % n * rows + i / n], expected[static_cast<std::size_t>(i)]);
}

TEST_F(Grouped, WithoutRows) {
    const ScaledTensor w = cast(stack, recipes::nvfp4{});
    const std::vector<std::int64_t> none(experts + 1, 0);
    EXPECT_EQ(grouped_matmul(Array::borrow(nullptr, DType::float32, {0, k}), w, none).shape, (Shape{0, n}));
    const std::vector<float> zeros = to_vector(grouped_matmul(activations, w, none));
    EXPECT_EQ(zeros, std::vector<float>(zeros.size()));
}

TEST_F(Grouped, RefusesWhatDoesNotFit) {
    const ScaledTensor w = cast(stack, recipes::mxfp8{});
    const auto message = [](auto verb) { return message_of(Error::Kind::value, verb); };
    EXPECT_THAT(message([&] { grouped_matmul(activations, cast(weight_of(0), recipes::mxfp8{}), offsets); }),
                HasSubstr("w_stack must be (E, N, K) of one expert or more, got shape (6, 128)"));
    EXPECT_THAT(message([&] { grouped_matmul(Array::borrow(x, {2 * rows, k / 2}), w, offsets); }),
                HasSubstr("x must be (T, 128), got shape (40, 64)"));
    EXPECT_THAT(message([&] { grouped_matmul(activations, w, std::span(offsets).first(experts)); }),
                HasSubstr("offsets must have 10 numbers, one more than experts, got 9"));
    for (const std::size_t wrong : {std::size_t{0}, std::size_t{5}, std::size_t{experts}}) {
        std::vector<std::int64_t> changed(std::begin(offsets), std::end(offsets));
        changed[wrong] = wrong == 5 ? 2 : rows + 1;
        EXPECT_THAT(message([&] { grouped_matmul(activations, w, changed); }),
                    HasSubstr("offsets must rise from 0 to at most 20"));
    }
    const ScaledTensor tiles = cast(activations, recipes::block{.block_m = 128});
    EXPECT_THAT(message([&] { grouped_matmul(tiles, w, offsets); }), HasSubstr("x must be scaled along its rows"));
    std::vector<float> square(k * k);
    const ScaledTensor turned = cast(Array::borrow(square, {k, k}), recipes::block{}).transposed();
    const std::vector<std::int64_t> none(experts + 1, 0);
    EXPECT_THAT(message([&] { grouped_matmul(turned, w, none); }), HasSubstr("x must be scaled along its rows"));
    std::vector<float> y(rows * n);
    EXPECT_THAT(message([&] { grouped_matmul_into(activations, w, offsets, Array::borrow(y, {n, rows})); }),
                HasSubstr("out.shape must be (20, 6)"));
    EXPECT_THAT(message([&] {
                    grouped_matmul_into(activations, w, offsets,
                                        Array::borrow(std::span(x).first(rows * n), {rows, n}));
                }),
                HasSubstr("out must not overlap"));
}

}  // namespace
}  // namespace breccia
