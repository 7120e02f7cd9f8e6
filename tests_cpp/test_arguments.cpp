// SPDX-License-Identifier: Apache-2.0
//
// What the doors refuse: arrays, layouts and recipes made by hand, outputs that do not fit, memory in two roles.
#include <functional>

#include "breccia/compare.hpp"
#include "breccia/gptq.hpp"
#include "support.hpp"

namespace breccia {
namespace {

using testing::HasSubstr;
constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

TEST(Arrays, AnInvalidOneCannotBeMade) {
    std::vector<float> memory(16);
    const auto message = [&](Error::Kind kind, ElementType type, const Shape& shape, const Shape& strides) {
        return message_of(kind, [&] { Array(memory.data(), type, shape, strides); });
    };
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {4, 4}, {16}), HasSubstr("one stride for each axis"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {4, -4}, {16, 4}), HasSubstr("negative extent"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {4, 4}, {most, 4}), HasSubstr("2^63 bytes"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {4}, {-most - 1}), HasSubstr("2^63 bytes"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {2, 2}, {most - 8, most - 8}), HasSubstr("2^63 bytes"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {2}, {-most + 8}), HasSubstr("2^63 bytes"));
    EXPECT_THAT(message(Error::Kind::value, DType::float32, {most, 0}, {4, 4}), HasSubstr("2^60"));
    EXPECT_THAT(message(Error::Kind::type, DType{9}, {4}, {4}), HasSubstr("unknown"));
    EXPECT_THAT(message(Error::Kind::type, ElementType::codes(Format{200}), {4}, {1}), HasSubstr("unknown"));
    EXPECT_THAT(message(Error::Kind::type, ElementType(), {4}, {1}), HasSubstr("unknown"));
    EXPECT_NO_THROW(Array(memory.data() + 15, DType::float32, {4, 4}, {-16, -4}));
    EXPECT_NO_THROW(Array(memory.data(), DType::float32, {1 << 20, 4}, {0, 4}));
    message_of(Error::Kind::type, [&] { Array::borrow(memory.data(), DType{9}, {4}); });
    message_of(Error::Kind::value, [&] { Array::borrow(memory.data(), DType::float32, {-4}); });
    message_of(Error::Kind::type, [&] { Array::allocate(ElementType::packed_codes(Format{200}), {4}); });
}

TEST(Arrays, TheVerbsCheckThoseThatWereChanged) {
    std::vector<float> memory(2 * 128, 1.0F);
    const Recipe recipe = make_recipe("MXFP8BlockScaling");
    const std::function<void(Array&)> changes[] = {
        [](Array& x) { x.strides.pop_back(); }, [](Array& x) { x.shape = {2, -128}; },
        [](Array& x) { x.strides[0] = most; },  [](Array& x) { x.data = nullptr; },
        [](Array& x) { x.type = DType{9}; },
    };
    for (const auto& change : changes) {
        Array x = array_of(memory, {2, 128});
        change(x);
        EXPECT_THROW(cast(x, recipe), Error);
        EXPECT_THROW(matmul(x, x.transposed()), Error);
        const ScaledTensor scaled = cast(array_of(memory, {2, 128}), recipe);
        EXPECT_THROW(dequantize_into(scaled, x), Error);
    }
}

// What a verb refuses it names: a type from beyond the lists has no name.
TEST(Arrays, OfNoTypeThereIsAreRefusedByEveryVerb) {
    std::vector<float> x = heavy_tailed(32, 32, 1, 1);
    const Array array = array_of(x, {32, 32});
    const ScaledTensor scaled = cast(array, recipes::mxfp8{});
    for (const ElementType type : {ElementType(DType{77}), ElementType::codes(Format{200}),
                                   ElementType::packed_codes(Format{200}), ElementType()}) {
        EXPECT_EQ(type.name(), "unknown");
        EXPECT_GT(type.size(), 0U);
        Array odd = array;
        odd.type = type;
        const auto refused = [&](const std::function<void()>& verb) {
            EXPECT_THAT(message_of(Error::Kind::type, verb), HasSubstr("nknown"));
        };
        refused([&] { cast(odd, recipes::mxfp8{}); });
        refused([&] { matmul(odd, scaled); });
        refused([&] { linear(array, scaled, &odd); });
        refused([&] { matmul_into(array, scaled, odd); });
        refused([&] { dequantize_into(scaled, odd); });
        refused([&] { compare(odd, scaled); });
        CastOptions options;
        options.importance = odd;
        refused([&] { cast(array, recipes::mxfp8{}, options); });
        CastOutput out = allocate(plan_cast({32, 32}, recipes::mxfp8{}));
        out.scale.type = type;
        refused([&] { cast_into(array, recipes::mxfp8{}, out); });
    }
}

TEST(ScaledTensor, OfArraysWithoutMemoryIsOnlyLookedAt) {
    const Recipe recipe = make_recipe("MXFP8BlockScaling");
    std::vector<float> x(2 * 128, 1.0F);
    const ScaledTensor here = cast(array_of(x, {2, 128}), recipe);
    const Array data = Array::borrow(nullptr, ElementType::uint8(), {2, 128});
    const Array scale = Array::borrow(nullptr, ElementType::uint8(), {2, 4});
    for (const ScaledTensor& scaled : {ScaledTensor(data, here.scale(), recipe, recipe.layout),
                                       ScaledTensor(here.data(), scale, recipe, recipe.layout)}) {
        EXPECT_EQ(scaled.shape(), (Shape{2, 128}));
        const auto refused = [](const std::function<void()>& verb) {
            EXPECT_THAT(message_of(Error::Kind::value, verb), HasSubstr("null pointer"));
        };
        refused([&] { dequantize(scaled); });
        refused([&] { requantize(scaled, make_recipe("INT8Scaling")); });
        refused([&] { matmul(array_of(x, {2, 128}), scaled.transposed()); });
        refused([&] { matmul(scaled, here.transposed()); });
        refused([&] { PreparedWeight prepared(scaled); });
    }
}

TEST(ScaledTensor, RefusesALogicalShapeOfNegativeExtent) {
    const Array data = Array::allocate(ElementType::uint8(), {4, 0}), scale = Array::allocate(DType::float32, {});
    Recipe recipe = make_recipe("INT4Scaling");
    message_of(Error::Kind::value,
               [&] { ScaledTensor(data, scale, recipe, Layout::per_tensor(), {.shape = Shape{4, -1}}); });
}

TEST(Layouts, OfTooFewAxes) {
    const Layout layouts[] = {Layout::per_block_k(32), Layout::per_channel(), Layout::per_block_mn(1, 32)};
    for (const Layout& layout : layouts)
        for (const Layout& either : {layout, layout.transposed()}) {
            EXPECT_THAT(message_of(Error::Kind::value, [&] { static_cast<void>(either.scale_shape({})); }),
                        HasSubstr("got 0-D"));
            EXPECT_THAT(message_of(Error::Kind::value, [&] { either.validate({}, {}); }), HasSubstr("got ndim=0"));
        }
    EXPECT_EQ(Layout::per_block_k(32).scale_shape({64}), Shape{2});
    EXPECT_THAT(message_of(Error::Kind::value, [] { static_cast<void>(Layout::per_channel().scale_shape({64})); }),
                HasSubstr("2-D"));
    EXPECT_EQ(Layout::per_tensor().scale_shape({}), Shape{});
    message_of(Error::Kind::value, [] { static_cast<void>(Layout::per_block_k(32).scale_shape({-32, 64})); });
}

TEST(Layouts, MadeByHandAreChecked) {
    const Layout wrong[] = {
        {.kind = LayoutKind::per_block_k, .block_n = 0},
        {.kind = LayoutKind::per_block_k, .block_n = -32},
        {.kind = LayoutKind::per_block_mn, .block_m = 0, .block_n = 32},
        {.kind = LayoutKind::per_block_mn, .block_m = 32, .block_n = 0},
        {.kind = LayoutKind::per_channel, .axis = -3},
        {.kind = LayoutKind::per_tensor, .axis = 0},
        {.kind = LayoutKind{7}},
    };
    const Array data = Array::allocate(ElementType::uint8(), {4, 64}), scale = Array::allocate(DType::float32, {4, 2});
    std::vector<float> x(4 * 64, 1.0F);
    for (const Layout& layout : wrong) {
        EXPECT_THROW(validate(layout), Error);
        EXPECT_THROW(static_cast<void>(layout.grid({4, 64})), Error);
        EXPECT_THROW(static_cast<void>(layout.scale_shape({4, 64})), Error);
        EXPECT_THROW(layout.validate({4, 64}, {4, 2}), Error);
        EXPECT_THROW(ScaledTensor(data, scale, make_recipe("Float8BlockScaling"), layout), Error);
        Recipe recipe = make_recipe("Float8BlockScaling");
        recipe.layout = layout;
        EXPECT_THROW(cast(array_of(x, {4, 64}), recipe), Error);
    }
    EXPECT_NO_THROW(validate(Layout{.kind = LayoutKind::per_channel, .block_m = 0, .block_n = 0}));
}

TEST(Layouts, BlocksLargerThanAnyMatrix) {
    std::vector<float> x = heavy_tailed(4, 96, 1, 1);
    const Array array = array_of(x, {4, 96});
    const ScaledTensor whole =
        cast(array, make_recipe("Float8BlockScaling", {{"block_m", std::int64_t{4}}, {"block_k", std::int64_t{96}}}));
    const ScaledTensor scaled = cast(array, make_recipe("Float8BlockScaling", {{"block_m", most}, {"block_k", most}}));
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        for (const DType dtype : {DType::float32, DType::bfloat16})
            EXPECT_TRUE(same_bytes(dequantize(scaled, dtype), dequantize(whole, dtype))) << name;
        EXPECT_TRUE(same_bytes(matmul(array, scaled.transposed()), matmul(array, whole.transposed()))) << name;
    }
}

TEST(Recipes, OfTheCatalogueAreValid) {
    for (const Recipe& recipe : all_recipes()) EXPECT_NO_THROW(validate(recipe)) << describe(recipe);
}

TEST(Recipes, MadeByHandAreChecked) {
    const auto changed = [](const char* name, const std::function<void(Recipe&)>& change) {
        Recipe recipe = make_recipe(name);
        change(recipe);
        return recipe;
    };
    const std::pair<const char*, Recipe> wrong[] = {
        {"element", changed("INT8Scaling", [](Recipe& r) { r.element = Format{200}; })},
        {"element", changed("INT8Scaling", [](Recipe& r) { r.element = format_of<Float8E8M0FNU>; })},
        {"element", changed("MXFP8BlockScaling", [](Recipe& r) { r.element = format_of<Int8>; })},
        {"element", changed("NVFP4BlockScaling", [](Recipe& r) { r.element = format_of<Float8E4M3FN>; })},
        {"element", changed("DelayedScaling", [](Recipe& r) { r.rule = ScaleRule::asymmetric; })},
        {"element", changed("Float8ExpandedScaling", [](Recipe& r) { r.element = format_of<Float4E2M1FN>; })},
        {"scale", changed("Float8ExpandedScaling", [](Recipe& r) { r.scale = ScaleType::float16; })},
        {"search", changed("INT8ExpandedScaling", [](Recipe& r) { r.search = ScaleSearch::mse; })},
        {"layout", changed("INT8ExpandedScaling", [](Recipe& r) { r.layout = Layout::per_channel(); })},
        {"scale", changed("INT8Scaling", [](Recipe& r) { r.scale = ScaleType::float64; })},
        {"scale", changed("INT8Scaling", [](Recipe& r) { r.scale = ScaleType::e8m0; })},
        {"scale", changed("MXFP8BlockScaling", [](Recipe& r) { r.scale = ScaleType::float32; })},
        {"scale", changed("NVFP4BlockScaling", [](Recipe& r) { r.scale = ScaleType::float32; })},
        {"scale", changed("INT8Scaling", [](Recipe& r) { r.scale = ScaleType{17}; })},
        {"rule", changed("INT8Scaling", [](Recipe& r) { r.rule = ScaleRule{17}; })},
        {"search", changed("INT8Scaling", [](Recipe& r) { r.search = ScaleSearch{17}; })},
        {"two_level", changed("MXFP8BlockScaling", [](Recipe& r) { r.two_level = true; })},
        {"global_divides", changed("MXFP8BlockScaling", [](Recipe& r) { r.global_divides = true; })},
        {"margin", changed("DelayedScaling", [](Recipe& r) { r.margin = -150; })},
        {"margin", changed("DelayedScaling", [](Recipe& r) { r.margin = 200; })},
        {"ragged", changed("INT8Scaling", [](Recipe& r) { r.ragged = true; })},
        {"axis", changed("MXFP8BlockScaling", [](Recipe& r) { r.layout = r.layout.transposed(); })},
    };
    std::vector<float> x(4 * 128, 1.0F);
    const Array array = array_of(x, {4, 128});
    const ScaledTensor scaled = cast(array, make_recipe("INT8Scaling"));
    for (const auto& [field, recipe] : wrong) {
        EXPECT_THAT(message_of(Error::Kind::value, [&, &recipe = recipe] { validate(recipe); }),
                    HasSubstr("recipe." + std::string(field == std::string("axis") ? "layout.axis" : field)));
        EXPECT_THROW(plan_cast({4, 128}, recipe), Error);
        EXPECT_THROW(cast(array, recipe), Error);
        EXPECT_THROW(requantize(scaled, recipe), Error);
    }
}

TEST(ScaledTensor, RefusesARecipeOfUnknownEnumerators) {
    const Array data = Array::allocate(ElementType::uint8(), {4, 128}), scale = Array::allocate(DType::float32, {4, 1});
    const std::function<void(Recipe&)> changes[] = {
        [](Recipe& r) { r.element = Format{200}; },
        [](Recipe& r) { r.scale = ScaleType{17}; },
        [](Recipe& r) { r.rule = ScaleRule{17}; },
        [](Recipe& r) { r.search = ScaleSearch{17}; },
    };
    for (const auto& change : changes) {
        Recipe recipe = make_recipe("INT8Scaling");
        EXPECT_NO_THROW(ScaledTensor(data, scale, recipe, recipe.layout));
        change(recipe);
        message_of(Error::Kind::value, [&] { ScaledTensor(data, scale, recipe, Layout::per_channel()); });
    }
}

// Blocks of one row that do not divide it: the last is short.
TEST(Recipes, RaggedRowsOfBlocks) {
    constexpr std::int64_t rows = 5, whole = 64, cols = 83;
    std::vector<float> x = heavy_tailed(rows, cols, 3, 2), padded(rows * 96);
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(x.begin() + r * cols, cols, padded.begin() + r * 96);
    for (const char* name : {"MXFP8BlockScaling", "MXFP6BlockScaling", "MXFP4BlockScaling", "NVFP4BlockScaling"}) {
        Recipe recipe = make_recipe(name);
        const ScaledTensor expected = cast(array_of(padded, {rows, 96}), recipe);
        recipe.ragged = true;
        for (const std::string& backend : cpu_info().supported) {
            const BackendScope scope(backend);
            const ScaledTensor scaled = cast(array_of(x, {rows, cols}), recipe);
            const std::vector<float> y = to_vector(dequantize(scaled)), y_padded = to_vector(dequantize(expected));
            for (std::int64_t r = 0; r < rows; ++r)
                for (std::int64_t c = 0; c < cols; ++c)
                    ASSERT_EQ(y[static_cast<std::size_t>(r * cols + c)], y_padded[static_cast<std::size_t>(r * 96 + c)])
                        << name << ' ' << backend << " at " << r << ", " << c << " of " << whole;
        }
    }
}

// Numbers where a recipe has codes for scales, whose codes they might be: refused whatever the elements are.
TEST(ScaledTensor, ScalesThatAreCodesAreNoNumbers) {
    std::vector<float> x = heavy_tailed(4, 256, 1, 1);
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor scaled = cast(array_of(x, {4, 256}), recipe);
        for (const DType type : {DType::float32, DType::float16, DType::bfloat16, DType::float64}) {
            const auto make = [&] {
                return ScaledTensor(scaled.data(), Array::allocate(type, scaled.scale().shape), recipe, recipe.layout,
                                    {.zero_point = scaled.zero_point(), .global_scale = scaled.global_scale()});
            };
            SCOPED_TRACE(describe(recipe) + " with " + std::string(name_of(type)));
            if (!is_coded(recipe.scale))
                EXPECT_NO_THROW(make());
            else
                EXPECT_THAT(message_of(Error::Kind::type, make), HasSubstr("scale must be uint8 or float8_e"));
        }
    }
}

TEST(Formats, UnknownOnesAreRefused) {
    std::vector<float> x(4);
    std::vector<std::uint8_t> codes(4);
    message_of(Error::Kind::value, [&] { encode(x, Format{200}, codes); });
    message_of(Error::Kind::value, [&] { decode(codes, Format{200}, x); });
}

// Every way in which a part of an output can fail to be what the plan says.
struct BadOutput {
    const char* what;
    std::function<void(CastOutput&)> change;
    const char* message;
};

std::vector<BadOutput> bad_outputs(const Array& x) {
    const auto shorter = [](Array& part) {
        part = Array::allocate(part.type, part.shape);
        part.shape.back() -= 1;
    };
    const auto strided = [](Array& part) {
        const Shape shape = part.shape;
        part = Array::allocate(part.type, {shape[1], shape[0]}).transposed();
    };
    return {
        {"short data", [=](CastOutput& out) { shorter(out.data); }, "data.shape must be"},
        {"short scale", [=](CastOutput& out) { shorter(out.scale); }, "scale.shape must be"},
        {"turned data", [=](CastOutput& out) { strided(out.data); }, "data must be C-contiguous"},
        {"no data", [](CastOutput& out) { out.data.data = nullptr; }, "data must be in memory"},
        {"no scale", [](CastOutput& out) { out.scale.data = nullptr; }, "scale must be in memory"},
        {"too few strides", [](CastOutput& out) { out.data.strides.pop_back(); }, "one stride for each axis"},
        {"other data", [](CastOutput& out) { out.data.type = ElementType::uint16(); }, "data must be of dtype"},
        {"other scale", [](CastOutput& out) { out.scale.type = DType::float64; }, "scale must be of dtype"},
        {"zero point",
         [](CastOutput& out) { out.zero_point ? out.zero_point.reset() : void(out.zero_point = out.scale); },
         "zero_point must be"},
        {"global scale",
         [](CastOutput& out) {
             if (out.global_scale)
                 out.global_scale.reset();
             else
                 out.global_scale = Array::allocate(DType::float32, {});
         },
         "global_scale must be"},
        {"data over scale", [](CastOutput& out) { out.scale.data = out.data.data; }, "must not overlap each other"},
        {"data over x", [x](CastOutput& out) { out.data.data = x.data; }, "must not overlap an operand"},
        {"scale over x", [x](CastOutput& out) { out.scale.data = x.data; }, "must not overlap an operand"},
    };
}

TEST(CastInto, ChecksItsOutput) {
    std::vector<float> x = heavy_tailed(4, 256, 1, 2);
    const Array array = array_of(x, {4, 256});
    for (const Recipe& recipe : all_recipes()) {
        if (recipe.layout.kind == LayoutKind::per_tensor) continue;
        const CastPlan plan = plan_cast(array.shape, recipe);
        EXPECT_NO_THROW(cast_into(array, recipe, allocate(plan)));
        for (const BadOutput& bad : bad_outputs(array)) {
            SCOPED_TRACE(describe(recipe) + ": " + bad.what);
            CastOutput out = allocate(plan);
            bad.change(out);
            try {
                cast_into(array, recipe, out);
                ADD_FAILURE() << "no error was thrown";
            } catch (const Error& error) {
                EXPECT_THAT(error.what(), HasSubstr(bad.message));
            }
        }
    }
}

TEST(RequantizeInto, ChecksItsOutput) {
    std::vector<float> x = heavy_tailed(4, 256, 1, 2);
    const Recipe recipe = make_recipe("Float8BlockScaling");
    const ScaledTensor scaled = cast(array_of(x, {4, 256}), make_recipe("MXFP8BlockScaling"));
    const CastPlan plan = plan_cast(scaled.shape(), recipe);
    EXPECT_NO_THROW(requantize_into(scaled, recipe, allocate(plan)));
    for (const BadOutput& bad : bad_outputs(scaled.data())) {
        SCOPED_TRACE(bad.what);
        CastOutput out = allocate(plan);
        bad.change(out);
        EXPECT_THROW(requantize_into(scaled, recipe, out), Error);
    }
    CastOutput over_scale = allocate(plan);
    over_scale.scale.data = scaled.scale().data;
    message_of(Error::Kind::value, [&] { requantize_into(scaled, recipe, over_scale); });
}

TEST(CastInto, RefusesShapesThatTheRecipeDoesNot) {
    std::vector<float> x(4 * 100);
    const Recipe recipe = make_recipe("MXFP8BlockScaling");
    const CastOutput out = allocate(plan_cast({4, 128}, recipe));
    EXPECT_THAT(message_of(Error::Kind::value, [&] { cast_into(array_of(x, {4, 100}), recipe, out); }),
                HasSubstr("divisible by 32"));
}

TEST(Matmul, OutputMustNotOverlapAnyPartOfAnOperand) {
    constexpr std::int64_t k = 256;
    std::vector<float> x = heavy_tailed(16, k, 1, 1), w = heavy_tailed(16, k, 2, 1);
    const Array a = array_of(x, {16, k});
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor b = cast(array_of(w, {16, k}), recipe);
        std::vector<const Array*> parts{&b.data(), &b.scale()};
        if (b.zero_point()) parts.push_back(&*b.zero_point());
        if (b.global_scale()) parts.push_back(&*b.global_scale());
        for (const Array* part : parts) {
            SCOPED_TRACE(describe(recipe));
            const Array out = Array::borrow(part->data, DType::float32, {16, 16});
            EXPECT_THAT(message_of(Error::Kind::value, [&] { matmul_into(a, b.transposed(), out); }),
                        HasSubstr("must not overlap"));
            EXPECT_THAT(message_of(Error::Kind::value, [&] { matmul_into(b, a.transposed(), out); }),
                        HasSubstr("must not overlap"));
        }
    }
}

// Rows without columns cost nothing, however many there are.
TEST(EmptyTensors, OfAnyNumberOfRows) {
    const std::int64_t huge = std::int64_t{1} << 40;
    const auto number = [](const Shape& shape) { return Array::allocate(DType::float32, shape); };
    for (const Recipe& recipe : all_recipes())
        for (const Shape& shape : {Shape{huge, 0}, Shape{huge, huge, 0}, Shape{huge, 0, 256}, Shape{0, huge, 256}}) {
            if (recipe.layout.kind == LayoutKind::per_channel && shape.back() == 0)
                continue;  // has a scale for each row
            SCOPED_TRACE(describe(recipe) + " of " + to_string(shape));
            const ScaledTensor scaled = cast(number(shape), recipe);
            EXPECT_EQ(scaled.shape(), shape);
            EXPECT_EQ(dequantize(scaled).shape, shape);
            EXPECT_EQ(dequantize(scaled.transposed()).size(), 0);
            EXPECT_EQ(requantize(scaled, make_recipe("DelayedScaling")).shape(), shape);
            EXPECT_THAT(count_codes(scaled), testing::Each(0));
            EXPECT_TRUE(compare(number(shape), scaled).equal);
            EXPECT_EQ(magnitudes(scaled).zeros, 0);
            if (!recipe.is_expanded()) {
                std::vector<float> ones(static_cast<std::size_t>(shape.back() * shape.back()), 1.0F);
                const Array moments = array_of(ones, {shape.back(), shape.back()});
                EXPECT_EQ(gptq(number(shape), moments, recipe).shape(), shape);
            }
            EXPECT_EQ(PreparedWeight(scaled).shape(), shape);
            EXPECT_EQ(PreparedWeight(scaled.transposed()).shape(), scaled.transposed().shape());
        }
    const Recipe recipe = make_recipe("MXFP8BlockScaling");
    const ScaledTensor w = cast(number({huge, 0}), recipe);
    EXPECT_EQ(matmul(number({0, 0}), w.transposed()).shape, (Shape{0, huge}));
    EXPECT_EQ(matmul(w, number({0, 0})).shape, (Shape{huge, 0}));
}

}  // namespace
}  // namespace breccia
