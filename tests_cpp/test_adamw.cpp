// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "breccia/adamw.hpp"
#include "support.hpp"

namespace breccia {
namespace {

// Weights and both moments, of zeros at first.
struct Trained {
    Recipe recipe;
    bool expanded;
    std::vector<float> weights;
    std::vector<std::uint8_t> codes[2];
    std::vector<float> scales[2];
    std::vector<std::uint8_t> exponents_of_two[2];
    std::vector<std::uint16_t> exponents[2];

    Trained(const char* name, std::int64_t count, std::int64_t group)
        : recipe(make_recipe(name,
                             name == std::string_view("MXFP8BlockScaling") ? Fields{} : Fields{{"group_size", group}})),
          expanded(recipe.is_expanded()),
          weights(heavy_tailed(1, count, 3)) {
        const auto groups = static_cast<std::size_t>((count + group - 1) / group);
        for (int i = 0; i < 2; ++i) {
            codes[i].assign(groups * static_cast<std::size_t>(group), 0);
            scales[i].assign(groups, 1.0F);
            exponents_of_two[i].assign(groups, 127);
            exponents[i].assign(groups, 0x3C00);
        }
    }

    Moment moment(int i) {
        const auto groups = static_cast<std::int64_t>(scales[i].size());
        Moment m;
        m.codes = Array::borrow(codes[i], {static_cast<std::int64_t>(codes[i].size())});
        m.scale = expanded ? Array::borrow(scales[i], {groups}) : Array::borrow(exponents_of_two[i], {groups});
        if (expanded) m.exponents = Array::borrow(exponents[i].data(), DType::float16, {groups});
        return m;
    }
    void step(std::vector<float>& gradients, std::int64_t number) {
        const auto count = static_cast<std::int64_t>(weights.size());
        adamw_step(array_of(weights, {count}), array_of(gradients, {count}), moment(0), moment(1), recipe,
                   {.lr = 0.01, .step = number});
    }
    bool operator==(const Trained& other) const {
        bool same = weights == other.weights;
        for (int i = 0; i < 2; ++i)
            same = same && codes[i] == other.codes[i] && scales[i] == other.scales[i] &&
                   exponents_of_two[i] == other.exponents_of_two[i] && exponents[i] == other.exponents[i];
        return same;
    }
};

TEST(AdamW, TheFirstStepIsThatOfTheFormula) {
    for (const char* name : {"Float8ExpandedScaling", "INT8ExpandedScaling", "MXFP8BlockScaling"}) {
        Trained trained(name, 1000, name == std::string_view("MXFP8BlockScaling") ? 32 : 128);
        const std::vector<float> before = trained.weights;
        std::vector<float> gradients = heavy_tailed(1, 1000, 4);
        trained.step(gradients, 1);
        for (std::size_t i = 0; i < before.size(); ++i) {
            const auto w = static_cast<double>(before[i]), g = static_cast<double>(gradients[i]);
            const double wanted = w * (1 - 1e-4) - 0.01 * g / (std::abs(g) + 1e-8);
            EXPECT_NEAR(static_cast<double>(trained.weights[i]), wanted, 1e-6 + 1e-6 * std::abs(w)) << name << " " << i;
        }
    }
}

TEST(AdamW, ThreadsAndBackendsGiveTheSameBytes) {
    for (const char* name : {"Float8ExpandedScaling", "INT8ExpandedScaling", "MXFP8BlockScaling"}) {
        const std::int64_t group = name == std::string_view("MXFP8BlockScaling") ? 32 : 128;
        const auto run = [&](int threads, std::string_view backend) {
            set_backend(backend);
            set_num_threads(threads);
            Trained trained(name, 20001, group);
            for (int number = 1; number < 4; ++number) {
                std::vector<float> gradients = heavy_tailed(1, 20001, 10 + static_cast<unsigned>(number), 20);
                trained.step(gradients, number);
            }
            return trained;
        };
        const std::string own(cpu_info().backend);
        const int threads = cpu_info().threads;
        const std::vector<std::string> supported = cpu_info().supported;
        const Trained wanted = run(1, "portable");
        for (const std::string& backend : supported)
            for (const int count : {1, 4}) EXPECT_TRUE(run(count, backend) == wanted) << name << " " << backend;
        set_backend(own);
        set_num_threads(threads);
    }
}

// As dequantize() says of such moments; negative exponents, zeros, infinities and NaNs are none that a step makes.
TEST(AdamW, GroupsWhoseExponentIsNoNumberAboveZeroHaveNoValues) {
    for (const char* name : {"Float8ExpandedScaling", "INT8ExpandedScaling"})
        for (const int exponent : {0x0000, 0x8000, 0xBC00, 0x7C00, 0x7E00}) {
            Trained trained(name, 64, 32);
            std::ranges::fill(trained.codes[0], std::uint8_t{3});
            trained.exponents[0][1] = static_cast<std::uint16_t>(exponent);
            std::vector<float> gradients(64, 1.0F);
            trained.step(gradients, 2);
            for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(trained.weights[i]), i >= 32) << name << " " << i;
        }
}

TEST(AdamW, GradientsMayBeConst) {
    for (const std::int64_t count : {1000, 1024}) {  // with a group that is filled up, and without
        Trained one("MXFP8BlockScaling", count, 32), other = one;
        std::vector<float> gradients = heavy_tailed(1, count, 4);
        one.step(gradients, 1);
        const std::vector<float>& given = gradients;
        adamw_step(array_of(other.weights, {count}), Array::borrow(given, {count}), other.moment(0), other.moment(1),
                   other.recipe, {.lr = 0.01, .step = 1});
        EXPECT_TRUE(one == other);
    }
}

TEST(AdamW, RefusesMemoryThatIsNotAligned) {
    const Recipe recipe = make_recipe("expanded", {{"group_size", 32}});
    std::vector<float> weights(32, 1.0F), gradients(32, 1.0F);
    std::vector<std::uint16_t> exponents(2, 0x3C00);
    const auto moment = [&](std::byte* first_exponent) {
        return Moment{.codes = Array::allocate(ElementType::uint8(), {32}),
                      .scale = Array::allocate(DType::float32, {1}),
                      .exponents = Array::borrow(static_cast<void*>(first_exponent), DType::float16, {1})};
    };
    auto* odd = reinterpret_cast<std::byte*>(exponents.data()) + 1;
    std::uint16_t even = 0x3C00;
    EXPECT_THAT(message_of(Error::Kind::value,
                           [&] {
                               adamw_step(array_of(weights, {32}), array_of(gradients, {32}),
                                          moment(reinterpret_cast<std::byte*>(&even)), moment(odd), recipe,
                                          {.step = 1});
                           }),
                testing::HasSubstr("second.exponents must be"));
}

// Recipes made by hand, which a cast would refuse: their scales are not what the kernels read and write.
TEST(AdamW, RefusesARecipeThatNoCastCanFollow) {
    Recipe halves = make_recipe("Float8ExpandedScaling", {{"group_size", 16}});
    halves.scale = ScaleType::float16;
    Recipe numbers = make_recipe("MXFP8BlockScaling");
    numbers.rule = ScaleRule::divide;
    std::vector<float> weights(32, 1.0F), gradients(32, 1.0F);
    for (const Recipe& recipe : {halves, numbers}) {
        const std::int64_t groups = 32 / recipe.layout.block_n;
        const auto moment = [&] {
            Moment m{.codes = Array::allocate(ElementType::uint8(), {32}),
                     .scale = Array::allocate(element_type(recipe.scale), {groups}),
                     .exponents = std::nullopt};
            if (recipe.is_expanded()) m.exponents = Array::allocate(DType::float16, {groups});
            return m;
        };
        EXPECT_THAT(message_of(Error::Kind::value,
                               [&] {
                                   adamw_step(array_of(weights, {32}), array_of(gradients, {32}), moment(), moment(),
                                              recipe, {.step = 1});
                               }),
                    testing::HasSubstr("recipe.scale"));
        EXPECT_EQ(weights, std::vector<float>(32, 1.0F));
    }
}

}  // namespace
}  // namespace breccia
