// SPDX-License-Identifier: Apache-2.0
//
// The stride of an axis of one element may be any number, as NumPy and torch let it be: no verb computes with it.
#include "matmul/paths/paths.hpp"
#include "support.hpp"

namespace breccia {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max(), huge = std::int64_t{1} << 62;
constexpr std::int64_t any_numbers[] = {0, 3, -1, huge, -huge, most, -most - 1};

Array with_stride(Array array, std::int64_t stride) {
    for (std::size_t i = 0; i < array.rank(); ++i)
        if (array.shape[i] == 1) array.strides[i] = stride;
    return array;
}

std::optional<Array> with_stride(const std::optional<Array>& array, std::int64_t stride) {
    return array ? std::optional(with_stride(*array, stride)) : std::nullopt;
}

ScaledTensor with_stride(const ScaledTensor& scaled, std::int64_t stride) {
    return {with_stride(scaled.data(), stride),
            with_stride(scaled.scale(), stride),
            scaled.recipe(),
            scaled.layout(),
            {.zero_point = with_stride(scaled.zero_point(), stride),
             .global_scale = with_stride(scaled.global_scale(), stride),
             .shape = scaled.shape()}};
}

/// Calls body(x, the tensor of each recipe that takes the shape).
template <class Body>
void for_each_tensor(const Shape& shape, Body body) {
    std::vector<float> values = heavy_tailed(1, element_count(shape), 1, 1);
    const Array x = array_of(values, shape);
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe) + " of " + to_string(shape));
        try {
            plan_cast(shape, recipe);
        } catch (const Error&) {
            continue;
        }
        body(x, cast(x, recipe));
    }
}

class Strides : public testing::TestWithParam<std::string> {
protected:
    const BackendScope scope_{GetParam()};
};

const Shape shapes[] = {{1, 256}, {1, 3, 256}, {3, 1}, {1, 1}};

TEST_P(Strides, OfOneElementInAnOperand) {
    const Recipe whole = make_recipe("DelayedScaling");
    for (const Shape& shape : shapes)
        for_each_tensor(shape, [&](const Array& x, const ScaledTensor& scaled) {
            const ScaledTensor turned = scaled.transposed(), other = requantize(scaled, whole);
            const std::vector<std::int64_t> codes = count_codes(scaled);
            const Comparison compared = compare(x, scaled);
            for (const std::int64_t stride : any_numbers) {
                SCOPED_TRACE(stride);
                const Array view = with_stride(x, stride);
                const ScaledTensor same = with_stride(scaled, stride);
                EXPECT_TRUE(same_bytes(cast(view, scaled.recipe()).data(), scaled.data()));
                EXPECT_TRUE(same_bytes(dequantize(same), dequantize(scaled)));
                EXPECT_TRUE(same_bytes(dequantize(same.transposed()), dequantize(turned)));
                EXPECT_TRUE(same_bytes(dequantize(with_stride(turned, stride)), dequantize(turned)));
                EXPECT_TRUE(same_bytes(requantize(same, whole).data(), other.data()));
                const CastOutput copied = allocate(plan_cast(shape, scaled.recipe()));
                requantize_into(same, scaled.recipe(), copied);
                EXPECT_TRUE(same_bytes(copied.scale, scaled.scale()));
                EXPECT_EQ(compare(view, same), compared);
                EXPECT_EQ(count_codes(same), codes);
                EXPECT_TRUE(same_bytes(dequantize(PreparedWeight(same).tensor()), dequantize(scaled)));
            }
        });
}

TEST_P(Strides, OfOneElementInAProduct) {
    Sample cases;
    for (const Shape& shape : shapes)
        for_each_tensor(shape, [&](const Array&, const ScaledTensor& w) {
            const std::int64_t n = shape[shape.size() - 2], k = shape.back();
            for (const std::int64_t m : {1, 2, 40}) {
                if (!cases.takes()) continue;
                std::vector<float> values = heavy_tailed(m, k, 2, 1);
                const Array x = array_of(values, {m, k});
                Shape result = shape;
                result[result.size() - 2] = m, result.back() = n;
                const Array expected = matmul(x, w.transposed()), y = Array::allocate(DType::float32, result);
                for (const std::int64_t stride : any_numbers) {
                    SCOPED_TRACE("M = " + std::to_string(m) + ", " + std::to_string(stride));
                    const ScaledTensor b = with_stride(w, stride).transposed();
                    const Array a = with_stride(x, stride), out = with_stride(y, stride);
                    matmul_into(a, b, out);
                    EXPECT_TRUE(same_bytes(y, expected));
                    EXPECT_TRUE(same_bytes(matmul(a, PreparedWeight(b)), matmul(x, PreparedWeight(w.transposed()))));
                    for (const Path* const one : every_path) {
                        const std::string_view path = one->name;
                        const bool plain = multiply_by(path, x, w.transposed(), y);
                        const std::vector<float> by_path = to_vector(y);
                        EXPECT_EQ(multiply_by(path, a, b, out), plain) << path;
                        if (plain) {
                            EXPECT_EQ(to_vector(y), by_path) << path;
                        }
                    }
                }
            }
        });
}

TEST_P(Strides, OfOneElementInABiasAndAnExpert) {
    std::vector<float> x = heavy_tailed(1, 256, 2, 1), w = heavy_tailed(1, 256, 3, 1), bias{0.5F}, y(1);
    const Array a = array_of(x, {1, 256}), row = array_of(bias, {1}), out = array_of(y, {1, 1});
    const ScaledTensor weight = cast(array_of(w, {1, 256}), recipes::mxfp8{}),
                       stack = cast(array_of(w, {1, 1, 256}), recipes::mxfp8{});
    const std::vector<float> expected = to_vector(linear(a, weight, &row));
    const std::vector<float> of_expert = to_vector(matmul(a, weight.transposed()));
    for (const std::int64_t stride : any_numbers) {
        SCOPED_TRACE(stride);
        const Array one = with_stride(row, stride);
        linear_into(with_stride(a, stride), with_stride(weight, stride), &one, with_stride(out, stride));
        EXPECT_EQ(y, expected);
        for (const std::vector<std::int64_t>& offsets : {std::vector<std::int64_t>{0, 1}, {0, 0}}) {
            grouped_matmul_into(with_stride(a, stride), with_stride(stack, stride), offsets, with_stride(out, stride));
            EXPECT_EQ(y, offsets[1] == 1 ? of_expert : std::vector<float>{0});
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Every, Strides, testing::ValuesIn(cpu_info().supported),
                         [](const auto& test) { return test.param; });

// Work is shared out by how much there is to read, not by how far apart rows lie: a view of columns, or one row many
// times over.
TEST(Strides, OfRowsFarApartChangeNoByte) {
    constexpr std::int64_t n = 200, k = 256;
    std::vector<float> values = heavy_tailed(n, k, 1, 1), x = heavy_tailed(1, k, 2, 1);
    const ScaledTensor w = cast(array_of(values, {n, k}), recipes::int4{});
    const Array wide = Array::allocate(ElementType::uint8(), {n, 1 << 16});
    for (std::int64_t i = 0; i < n; ++i)
        std::copy_n(w.data().as<std::uint8_t>() + i * k / 2, k / 2, wide.as<std::uint8_t>() + i * (1 << 16));
    Array view = wide;
    view.shape[1] = k / 2;
    const ScaledTensor apart(view, w.scale(), w.recipe(), w.layout());
    const Array a = array_of(x, {1, k});
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        EXPECT_TRUE(same_bytes(linear(a, apart), linear(a, w))) << name;
    }
}

}  // namespace
}  // namespace breccia
