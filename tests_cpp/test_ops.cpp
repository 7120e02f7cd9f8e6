// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <numeric>
#include <tuple>

#include "support.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia {
namespace {

// Nobody has kernels that choose scales for them, see Codec::is_target.
TEST(Cast, FormatsThatAreNoTargetsAreRefused) {
    std::vector<float> x = heavy_tailed(2, 128);
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        Recipe recipe = make_recipe("Float8CurrentScaling");
        recipe.element = Format{static_cast<std::uint8_t>(f)};
        const FormatInfo& format = info(recipe.element);
        const auto cast_x = [&] { cast(array_of(x, {2, 128}), recipe); };
        if (format.is_target)
            EXPECT_NO_THROW(cast_x()) << format.name;
        else
            EXPECT_THAT(message_of(Error::Kind::value, cast_x), testing::HasSubstr(std::string(format.name)));
    }
}

TEST(ScaledTensor, TheGridIsThatOfItsLayoutAndShape) {
    std::vector<float> x = heavy_tailed(130, 256, 1, 3);
    const auto fields = [](const BlockGrid& g) {
        return std::tuple(g.rows, g.cols, g.block_rows, g.block_cols, g.empty_grid_cols);
    };
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor scaled = cast(array_of(x, {130, 256}), recipe);
        for (const ScaledTensor& either : {scaled, scaled.transposed()})
            EXPECT_EQ(fields(either.grid()), fields(either.layout().grid(either.shape()))) << describe(recipe);
    }
}

TEST(Cast, EveryRecipeStaysWithinItsStep) {
    constexpr std::int64_t rows = 130, cols = 256;
    std::vector<float> x = heavy_tailed(rows, cols, 1, 3);  // within the range of float16 scales
    Sample cases(sanitized);
    for (const Recipe& recipe : all_recipes()) {
        if (!cases.takes()) continue;
        SCOPED_TRACE(describe(recipe));
        if (recipe.element == format_of<UInt4> && !recipe.has_zero_point()) continue;  // not for negative values
        const ScaledTensor scaled = cast(array_of(x, {rows, cols}), recipe);
        EXPECT_EQ(scaled.shape(), (Shape{rows, cols}));
        const std::vector<float> y = to_vector(dequantize(scaled));
        const BlockGrid grid = recipe.layout.grid({rows, cols});
        // A block's error is at most half its coarsest step; four times that covers saturation by the search.
        const FormatInfo& f = info(recipe.element);
        const float step = f.family == CodecFamily::integer ? 1.0F / f.max : std::ldexp(1.0F, -f.mantissa_bits);
        std::map<std::pair<std::int64_t, std::int64_t>, float> amax_of;
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t c = 0; c < cols; ++c) {
                float& amax = amax_of[{r / grid.block_rows, c / grid.block_cols}];
                amax = std::max(amax, std::abs(x[static_cast<std::size_t>(r * cols + c)]));
            }
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t c = 0; c < cols; ++c) {
                float amax = amax_of[{r / grid.block_rows, c / grid.block_cols}];
                // A two-level scale of a tiny block beside a huge one is zero.
                if (recipe.two_level || recipe.rule == ScaleRule::nvfp4_te) amax = std::max(amax, 1e2F);
                // The k-th root of a code whose step is s has the step s / k.
                if (recipe.is_expanded()) {
                    const std::int64_t group = r * grid.grid_cols() + c / grid.block_cols;
                    amax /= std::min(to_float(scaled.zero_point()->as<const Float16>()[group]), 1.0F);
                }
                const auto i = static_cast<std::size_t>(r * cols + c);
                ASSERT_LE(std::abs(x[i] - y[i]), 2 * step * amax) << r << ", " << c;
            }
    }
}

TEST(Cast, SpecialBlocks) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        const bool is_unsigned = recipe.element == format_of<UInt4>;
        std::vector<float> x(2 * 128, 1.0F);
        x[3] = nan;
        x[128 + 5] = infinity;
        x[128 + 6] = is_unsigned ? infinity : -infinity;
        const std::vector<float> y = to_vector(dequantize(cast(array_of(x, {2, 128}), recipe)));
        EXPECT_TRUE(std::isnan(y[3]));
        EXPECT_TRUE(std::isfinite(y[128 + 5]) || recipe.layout.grid({2, 128}).block_rows > 1);
        if (info(recipe.element).has_nan || recipe.layout.grid({2, 128}).block_rows == 1) {
            EXPECT_NEAR(y[128], 1.0F, 0.15F);
            EXPECT_GE(y[128 + 5], 0.9F);
        }
        std::vector<float> zeros(2 * 128, 0.0F);
        for (const float value : to_vector(dequantize(cast(array_of(zeros, {2, 128}), recipe)))) ASSERT_EQ(value, 0.0F);
    }
}

TEST(Cast, EmptyAndStridedInput) {
    std::vector<float> x = heavy_tailed(256, 128);
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        EXPECT_EQ(cast(Array::allocate(DType::float32, {0, 256}), recipe).shape(), (Shape{0, 256}));
        const Array view = array_of(x, {256, 128}).transposed();
        Array copy = Array::allocate(DType::float32, {128, 256});
        for (std::int64_t r = 0; r < 128; ++r)
            for (std::int64_t c = 0; c < 256; ++c)
                copy.as<float>()[r * 256 + c] = x[static_cast<std::size_t>(c * 128 + r)];
        const ScaledTensor a = cast(view, recipe), b = cast(copy, recipe);
        EXPECT_TRUE(same_bytes(a.data(), b.data()));
        EXPECT_TRUE(same_bytes(a.scale(), b.scale()));
    }
}

TEST(Cast, MarginsThatOverflowSaturate) {
    std::vector<float> x{1e38F, 0.0F, -3e38F, 1.0F};
    for (const char* rule : {"torchao", "transformer_engine"})
        for (const std::string& backend : cpu_info().supported) {
            const BackendScope scope(backend);
            const Recipe recipe =
                make_recipe("DelayedScaling", {{"margin", std::int64_t{-126}}, {"scale_rule", std::string(rule)}});
            const ScaledTensor scaled = cast(array_of(x, {1, 4}), recipe);
            const auto* codes = scaled.data().as<const std::uint8_t>();
            EXPECT_EQ(codes[0], 0b0'1111'110) << rule << backend;
            EXPECT_EQ(codes[1], 0) << rule << backend;
            EXPECT_EQ(codes[2], 0b1'1111'110) << rule << backend;
        }
}

TEST(Cast, OptionsAreChecked) {
    std::vector<float> x(96, 1.0F);
    const Array array = array_of(x, {2, 48});
    CastOptions factor, square, hadamard;
    factor.factor = 2.0F;
    square.square_blocks = true;
    hadamard.hadamard_block = 32;
    EXPECT_EQ(cast(array, make_recipe("DelayedScaling"), factor).scale().as<float>()[0], 0.5F);
    EXPECT_THROW(cast(array, make_recipe("INT8Scaling"), factor), Error);
    EXPECT_THROW(cast(array, make_recipe("INT8Scaling"), square), Error);
    EXPECT_THROW(cast(array, make_recipe("NVFP4BlockScaling"), hadamard), Error);
    hadamard.hadamard_block = 12;
    EXPECT_THROW(cast(array, make_recipe("NVFP4BlockScaling"), hadamard), Error);
}

TEST(Cast, RefusesWhatDoesNotFit) {
    std::vector<float> x(8 * 100);
    const std::string message =
        message_of(Error::Kind::value, [&] { cast(array_of(x, {8, 100}), make_recipe("MXFP8BlockScaling")); });
    EXPECT_EQ(message, "MXFP8BlockScaling requires x.shape[-1] to be divisible by 32, got x.shape (8, 100)");
    message_of(Error::Kind::value, [&] { cast(array_of(x, {800}), make_recipe("INT4Scaling")); });
    message_of(Error::Kind::type,
               [&] { cast(Array::allocate(ElementType::uint8(), {8, 128}), make_recipe("INT4Scaling")); });
}

TEST(Cast, UnsignedCodesCutOffNegativeValues) {
    constexpr std::int64_t rows = 3, cols = 19 * 32;
    std::vector<float> x = heavy_tailed(rows, cols);
    const ScaledTensor scaled = cast(array_of(x, {rows, cols}),
                                     make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}, {"signed", false}}));
    const std::vector<float> y = to_vector(dequantize(scaled));
    for (std::size_t i = 0; i < x.size(); ++i) {
        const float scale = to_float(scaled.scale().as<Float16>()[i / 32]);
        EXPECT_EQ(y[i], std::clamp(std::nearbyint(x[i] / scale), 0.0F, 15.0F) * scale) << i;
    }
}

TEST(Requantize, KeepsWhatItCan) {
    std::vector<float> x = heavy_tailed(128, 256);
    using namespace std::string_literals;
    const auto recipe = [](const char* name, const Fields& fields = {}) { return make_recipe(name, fields); };
    const std::pair<Recipe, Recipe> lossless[] = {
        {recipe("Float8CurrentScaling"), recipe("Float8BlockScaling")},
        {recipe("Float8BlockScaling", {{"block_m", std::int64_t{128}}}), recipe("Float8BlockScaling")},
        {recipe("MXFP4BlockScaling"), recipe("MXFP8BlockScaling")},
        {recipe("MXFP4BlockScaling"), recipe("MXFP6BlockScaling")},
        {recipe("INT4Scaling"), recipe("INT8Scaling", {{"group_size", std::int64_t{128}}})},
        {recipe("Float8BlockScaling", {{"scale_format", "e8m0"s}}), recipe("MXFP8BlockScaling")},
    };
    for (const auto& [from, to] : lossless) {
        SCOPED_TRACE(describe(from) + " -> " + describe(to));
        const ScaledTensor source = cast(array_of(x, {128, 256}), from);
        EXPECT_EQ(to_vector(dequantize(requantize(source, to))), to_vector(dequantize(source)));
    }
}

TEST(Requantize, EqualsCastOfDequantizedWhereNothingCanBeKept) {
    std::vector<float> x = heavy_tailed(64, 256);
    const ScaledTensor source = cast(array_of(x, {64, 256}), make_recipe("MXFP8BlockScaling"));
    for (const char* name : {"MXFP4BlockScaling", "NVFP4BlockScaling", "INT4Scaling"}) {
        const Recipe target = make_recipe(name);
        const ScaledTensor a = requantize(source, target), b = cast(dequantize(source), target);
        EXPECT_TRUE(same_bytes(a.data(), b.data())) << name;
        EXPECT_TRUE(same_bytes(a.scale(), b.scale())) << name;
        const ScaledTensor turned = requantize(source.transposed(), make_recipe("Float8CurrentScaling"));
        EXPECT_EQ(turned.shape(), (Shape{256, 64}));
    }
}

// Scales of tiles are under the global scale, too.
TEST(Requantize, TwoLevelsOfTiles) {
    std::vector<float> x(32 * 64);
    constexpr float codes[] = {0.5F, -1, 1.5F, 2, -3, 4, 6, 0};
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = codes[i % std::size(codes)];
    const ScaledTensor source = cast(array_of(x, {32, 64}), make_recipe("MXFP8BlockScaling"));
    Recipe tiles = make_recipe("NVFP4BlockScaling");
    tiles.layout = Layout::per_block_mn(16, 16);
    const ScaledTensor a = requantize(source, tiles), b = cast(dequantize(source), tiles);
    EXPECT_TRUE(same_bytes(a.data(), b.data()));
    EXPECT_TRUE(same_bytes(a.scale(), b.scale()));
    EXPECT_TRUE(same_bytes(*a.global_scale(), *b.global_scale()));
}

// Whatever the bytes are: here a block with a NaN has not its own largest code.
TEST(Requantize, ToTheSameRecipeCopies) {
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        if (recipe.layout.kind == LayoutKind::per_tensor) continue;
        std::vector<float> x = heavy_tailed(128, 256);
        ScaledTensor scaled = cast(array_of(x, {128, 256}), recipe);
        auto* codes = scaled.data().as<std::uint8_t>();
        const std::int64_t n = scaled.data().size();
        for (std::int64_t i = 0; i < n; i += 3) codes[i] = static_cast<std::uint8_t>(codes[i] >> 2);
        if (recipe.element == format_of<Float8E4M3FN>) codes[0] = Float8E4M3FN::nan_code;
        const ScaledTensor same = requantize(scaled, recipe);
        const CastOutput out = allocate(plan_cast(scaled.shape(), recipe));
        requantize_into(scaled, recipe, out);
        EXPECT_TRUE(same_bytes(out.data, same.data()));
        EXPECT_TRUE(same_bytes(out.scale, same.scale()));
    }
}

// Scales that a cast never makes.
TEST(Dequantize, NegativeScalesOfGroupsWithExponentsTurnEverySign) {
    for (const Recipe& recipe : {make_recipe("Float8ExpandedScaling", {{"group_size", 16}}),
                                 make_recipe("INT8ExpandedScaling", {{"group_size", 16}})}) {
        std::vector<float> x = heavy_tailed(1, 64), turned(4);
        x[5] = 0;
        const ScaledTensor scaled = cast(array_of(x, {1, 64}), recipe);
        for (std::size_t i = 0; i < 4; ++i) turned[i] = -scaled.scale().as<float>()[i];
        const ScaledTensor other(scaled.data(), Array::borrow(turned, {1, 4}), recipe, recipe.layout,
                                 {.zero_point = scaled.zero_point()});
        std::vector<float> negated = to_vector(dequantize(scaled));
        for (float& value : negated) value = -value;
        EXPECT_EQ(to_vector(dequantize(other)), negated) << recipe.name;
    }
}

// INT8's -128, which a cast never makes, is beyond the largest value: by a small exponent, without end.
TEST(Dequantize, TheCodeBeyondTheLargestOfAGroupWithAnExponentIsLarger) {
    const Recipe recipe = make_recipe("INT8ExpandedScaling", {{"group_size", 2}});
    std::vector<std::uint8_t> codes{0x80, 0x81};
    std::vector<float> scale{1};
    for (const float exponent : {0x1p-24F, 0x1p-20F, 0x1p-16F, 1.0F, 2.0F}) {
        const Array exponents = Array::allocate(DType::float16, {1, 1});
        exponents.as<Float16>()[0] = to_float16(exponent);
        const std::vector<float> found =
            to_vector(dequantize(ScaledTensor(Array::borrow(codes, {1, 2}), Array::borrow(scale, {1, 1}), recipe,
                                              recipe.layout, {.zero_point = exponents})));
        const float wanted = -127 * static_cast<float>(std::pow(128 / 127.0, 1 / static_cast<double>(exponent)));
        EXPECT_EQ(found[1], -127);
        if (std::isinf(wanted))
            EXPECT_EQ(found[0], wanted) << exponent;
        else
            EXPECT_NEAR(found[0], wanted, -1e-4 * static_cast<double>(wanted)) << exponent;
    }
}

// The output has no room for them, so that the values decide.
TEST(Requantize, ToTheSameRecipeKeepsWhatPartsItHasNot) {
    const Recipe recipe = make_recipe("INT8Scaling", {{"group_size", 16}});
    std::vector<std::uint8_t> codes(16);
    std::iota(codes.begin(), codes.end(), std::uint8_t{0});
    std::vector<float> scale{1}, global{3};
    std::vector<std::int8_t> zero_point{5};
    const Array data = Array::borrow(codes, {1, 16}), scales = Array::borrow(scale, {1, 1});
    const Array zero_points = Array::borrow(zero_point.data(), ElementType::int8(), {1, 1});
    for (const Extras& extras :
         {Extras{.zero_point = zero_points}, Extras{.global_scale = Array::borrow(global, {})}}) {
        const ScaledTensor scaled(data, scales, recipe, recipe.layout, extras);
        const CastOutput out = allocate(plan_cast(scaled.shape(), recipe));
        requantize_into(scaled, recipe, out);
        EXPECT_EQ(to_vector(dequantize(ScaledTensor(out.data, out.scale, recipe, recipe.layout))),
                  to_vector(dequantize(scaled)));
    }
}

TEST(Matmul, EveryPairingIsWithinItsBound) {
    constexpr std::int64_t m = 5, n = 130, k = 384;
    std::vector<float> x = heavy_tailed(m, k, 2), w = heavy_tailed(n, k, 3);
    const std::vector<Recipe> recipes = all_recipes();
    const auto check = [&](const Operand& a, const Operand& b, const std::vector<float>& av,
                           const std::vector<float>& bv) {
        const std::vector<float> y = to_vector(matmul(a, b));
        const double bound = (k / 256.0 + 24) * std::ldexp(1.0, -24);
        const ExactProduct exact = exact_product(av, bv, m, n, k);
        for (std::size_t i = 0; i < y.size(); ++i)
            ASSERT_LE(std::abs(static_cast<double>(y[i]) - exact.product[i]), bound * exact.size[i] + 1e-30);
    };
    for (const Recipe& left : recipes) {
        const ScaledTensor a = cast(array_of(x, {m, k}), left);
        const std::vector<float> a_values = to_vector(dequantize(a));
        const Array w_array = array_of(w, {n, k}).transposed();
        check(a, w_array, a_values, w);
        for (const Recipe& right : {recipes[2], recipes[6], recipes[7], left}) {
            SCOPED_TRACE(describe(left) + " x " + describe(right));
            const ScaledTensor b = cast(array_of(w, {n, k}), right);
            check(a, b.transposed(), a_values, to_vector(dequantize(b)));
        }
    }
}

TEST(Matmul, ShapesBroadcast) {
    EXPECT_EQ(matmul_shape({2, 3}, {3, 4}), (Shape{2, 4}));
    EXPECT_EQ(matmul_shape({5, 1, 2, 3}, {7, 3, 4}), (Shape{5, 7, 2, 4}));
    EXPECT_EQ(message_of(Error::Kind::value, [] { matmul_shape({2, 3}, {4, 5}); }),
              "matmul shape mismatch: b must be (..., 3, N) for a of shape (2, 3), got shape (4, 5)");
    message_of(Error::Kind::value, [] { matmul_shape({2, 2, 3}, {5, 3, 4}); });
    message_of(Error::Kind::value, [] { matmul_shape({3}, {3, 4}); });
    const Array a = Array::allocate(DType::float32, {2, 0}), b = Array::allocate(DType::float32, {0, 3});
    EXPECT_EQ(to_vector(matmul(a, b)), std::vector<float>(6, 0.0F));
}

TEST(Matmul, OperandsWithoutElementsMayBeNull) {
    const Array a = Array::borrow(nullptr, DType::float32, {2, 0}), b = Array::borrow(nullptr, DType::float32, {0, 3});
    EXPECT_EQ(to_vector(matmul(a, b)), std::vector<float>(6, 0.0F));
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        const ScaledTensor w = cast(Array::borrow(nullptr, DType::float32, {3, 0}), recipe);
        EXPECT_EQ(to_vector(linear(a, w)), std::vector<float>(6, 0.0F));
    }
}

TEST(Matmul, BatchesWithoutElementsMayBeNull) {
    // Strides of an array without elements need not be zero.
    const Array a(nullptr, DType::float32, {2, 2, 0}, {64, 32, 4}), b(nullptr, DType::float32, {2, 0, 3}, {64, 12, 4});
    EXPECT_EQ(number_matrix(a, -1, {2}, 1).data, nullptr);
    EXPECT_EQ(to_vector(matmul(a, b)), std::vector<float>(12, 0.0F));
    for (const Recipe& recipe : all_recipes()) {
        SCOPED_TRACE(describe(recipe));
        const ScaledTensor made = cast(Array::borrow(nullptr, DType::float32, {2, 3, 0}), recipe);
        Array data = made.data();
        data.data = nullptr;
        data.strides = {64, 32, 1};
        const Extras extras{
            .zero_point = made.zero_point(), .global_scale = made.global_scale(), .shape = Shape{2, 3, 0}};
        const ScaledTensor w(data, made.scale(), recipe, recipe.layout, extras);
        EXPECT_EQ(scaled_matrix(w, {2}, 1).data, nullptr);
        EXPECT_EQ(to_vector(matmul(a, w.transposed())), std::vector<float>(12, 0.0F));
        EXPECT_EQ(dequantize(w).shape, (Shape{2, 3, 0}));
        EXPECT_EQ(requantize(w, recipe).shape(), (Shape{2, 3, 0}));
    }
}

TEST(Outputs, AreChecked) {
    std::vector<float> x(128 * 128, 1.0F);
    const ScaledTensor scaled = cast(array_of(x, {128, 128}), make_recipe("Float8BlockScaling"));
    message_of(Error::Kind::value, [&] { dequantize_into(scaled, Array::allocate(DType::float32, {128, 127})); });
    message_of(Error::Kind::type, [&] { dequantize_into(scaled, Array::allocate(ElementType::uint8(), {128, 128})); });
    Array overlapping = Array::borrow(scaled.data().data, DType::float32, {128, 128});
    message_of(Error::Kind::value, [&] { dequantize_into(scaled, overlapping); });
}

}  // namespace
}  // namespace breccia
