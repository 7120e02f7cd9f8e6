// SPDX-License-Identifier: Apache-2.0
//
// Tensors that no cast made, as checkpoints hold them: any byte as a code, any number as a scale.
#include "states.hpp"

namespace breccia {
namespace {

std::vector<std::string> faster_backends() {
    std::vector<std::string> names = cpu_info().supported;
    std::erase(names, "portable");
    return names;
}

template <class F>
auto on_portable(F f) {
    const BackendScope scope("portable");
    return f();
}

constexpr DType number_types[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};

TEST(States, DequantizedBytesEqualPortable) {
    for (const State& state : all_states(37, 384))
        for (const ScaledTensor& scaled : {state.tensor, state.tensor.transposed()}) {
            SCOPED_TRACE(state.name);
            for (const DType dtype : number_types) {
                const Array expected = on_portable([&] { return with_one_nan(dequantize(scaled, dtype)); });
                for (const std::string& name : faster_backends()) {
                    const BackendScope scope(name);
                    EXPECT_TRUE(same_bytes(with_one_nan(dequantize(scaled, dtype)), expected))
                        << name << ' ' << name_of(dtype);
                }
            }
        }
}

TEST(States, RequantizedBytesEqualPortable) {
    const std::vector<Recipe> targets = all_recipes();
    std::size_t next = 0;
    for (const State& state : all_states(8, 384)) {
        if (state.scales == Scales::extreme) continue;  // the codes of NaNs have their signs
        const Recipe& to = targets[next++ % targets.size()];
        SCOPED_TRACE(state.name + " to " + describe(to));
        const ScaledTensor expected = on_portable([&] { return requantize(state.tensor, to); });
        for (const std::string& name : faster_backends()) {
            const BackendScope scope(name);
            const ScaledTensor actual = requantize(state.tensor, to);
            EXPECT_TRUE(same_bytes(actual.data(), expected.data())) << name;
            EXPECT_TRUE(same_bytes(actual.scale(), expected.scale())) << name;
        }
    }
}

// The sign of a zero is that of the product.
TEST(States, ScalesOfMinusZero) {
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        for (const std::int64_t cols : {16, 32, 64, 384}) {
            const Recipe recipe = make_recipe("Float8BlockScaling", {{"block_k", cols}});
            const Array data = Array::allocate(ElementType::uint8(), {1, cols});
            std::fill_n(data.as<std::uint8_t>(), cols, std::uint8_t{0x38});  // 1
            std::vector<float> scale{-0.0F};
            const ScaledTensor scaled(data, array_of(scale, {1, 1}), recipe, recipe.layout);
            for (const float x : to_vector(dequantize(scaled))) ASSERT_TRUE(x == 0 && std::signbit(x)) << name;
        }
    }
}

// What is above a code's bits in its byte does not count, on any backend and in any kernel.
TEST(States, BitsAboveACodeAreIgnored) {
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        const auto mask = static_cast<std::uint8_t>((1U << info(format).bits) - 1U);
        for (const std::string& name : cpu_info().supported) {
            const BackendScope scope(name);
            std::vector<std::uint8_t> codes(256);
            std::vector<float> values(256);
            for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
            decode(codes, format, values);
            for (std::size_t i = 0; i < 256; ++i)
                ASSERT_EQ(bits_of(values[i]), bits_of(info(format).decode(codes[i] & mask)))
                    << info(format).name << ' ' << name << ' ' << i;
        }
    }
}

TEST(States, BitsAboveACodeAreIgnoredByProducts) {
    constexpr std::int64_t n = 48, k = 512;
    std::mt19937 random(5);
    Sample cases;
    for (const Recipe& recipe : all_recipes()) {
        const int bits = info(recipe.element).bits;
        if (bits == 8 || recipe.layout.kind == LayoutKind::per_tensor) continue;
        std::vector<float> w = heavy_tailed(n, k, 3, 1);
        const ScaledTensor made = cast(array_of(w, {n, k}), recipe);
        const Array clean = Array::allocate(ElementType::uint8(), {n, k}), dirty = Array::allocate(clean.type, {n, k});
        for (std::int64_t i = 0; i < n * k; ++i) {
            const auto byte = static_cast<std::uint8_t>(random());
            dirty.as<std::uint8_t>()[i] = byte;
            clean.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(byte & ((1U << bits) - 1U));
        }
        const auto tensor_of = [&](const Array& data) {
            return ScaledTensor(
                data, made.scale(), recipe, recipe.layout,
                {.zero_point = made.zero_point(), .global_scale = made.global_scale(), .shape = {{n, k}}});
        };
        const ScaledTensor a = tensor_of(clean).transposed(), b = tensor_of(dirty).transposed();
        for (const std::string& name : cpu_info().supported) {
            const BackendScope scope(name);
            const PreparedWeight prepared_a(a), prepared_b(b);
            for (const std::int64_t m : {1, 4, 17, 300}) {
                if (!cases.takes()) continue;
                SCOPED_TRACE(describe(recipe) + " on " + name + ", M = " + std::to_string(m));
                std::vector<float> values = heavy_tailed(m, k, 2, 1);
                const Array x = array_of(values, {m, k});
                EXPECT_TRUE(same_bytes(matmul(x, a), matmul(x, b)));
                EXPECT_TRUE(same_bytes(matmul(x, prepared_a), matmul(x, prepared_b)));
            }
        }
    }
}

}  // namespace
}  // namespace breccia
