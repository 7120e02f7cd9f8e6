// SPDX-License-Identifier: Apache-2.0
//
// What a C++ user meets first: borrowed memory, typed recipes, linear, printing, threads of the caller's own.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "support.hpp"
#include "tensor/spelling.hpp"

namespace breccia {
namespace {

using testing::HasSubstr;

template <class T>
std::string printed(const T& value) {
    std::ostringstream stream;
    stream << value;
    return stream.str();
}

template <class R>
concept Borrowable = requires(R&& memory) { Array::borrow(std::forward<R>(memory), Shape{6}); };

TEST(Borrowing, ItemsTellTheType) {
    std::vector<float> floats(6);
    const std::array<double, 6> doubles{};
    std::vector<BFloat16> halves(6);
    EXPECT_EQ(Array::borrow(floats, {2, 3}).type, ElementType(DType::float32));
    EXPECT_EQ(Array::borrow(doubles, {6}).type, ElementType(DType::float64));
    EXPECT_EQ(Array::borrow(std::span<const BFloat16>(halves), {3, 2}).type, ElementType(DType::bfloat16));
    EXPECT_EQ(Array::borrow(std::span(floats).first(4), {2, 2}).data, floats.data());
    const std::vector<std::uint8_t> codes(6);
    const ElementType fp8 = ElementType::codes(format_of<Float8E4M3FN>);
    EXPECT_EQ(Array::borrow(codes, {6}).type, ElementType::uint8());
    EXPECT_EQ(Array::borrow(codes, fp8, {6}).type, fp8);
    // A vector that dies with the expression cannot be borrowed.
    static_assert(!Borrowable<std::vector<float>> && Borrowable<std::vector<float>&>);
    static_assert(Borrowable<std::span<float>>);
}

TEST(Borrowing, RefusesMemoryOfAnotherSize) {
    std::vector<float> x(6);
    for (const Shape& shape : {Shape{2, 4}, Shape{5}, Shape{0}, Shape{}})
        EXPECT_THAT(message_of(Error::Kind::value, [&] { Array::borrow(x, shape); }),
                    testing::AllOf(HasSubstr("24 bytes"), HasSubstr(to_string(shape))));
    EXPECT_THAT(message_of(Error::Kind::value, [&] { Array::borrow(x, {-6}); }), HasSubstr("negative"));
    EXPECT_NO_THROW(Array::borrow(x, ElementType::uint8(), {24}));
}

TEST(Borrowing, ConstMemoryIsReadAndNotWritten) {
    const std::vector<float> x(64, 1.5F);
    const Array array = Array::borrow(x, {2, 32});
    EXPECT_TRUE(array.read_only);
    EXPECT_TRUE(array.transposed().read_only);
    EXPECT_EQ(array.as<const float>(), x.data());
    EXPECT_THAT(message_of(Error::Kind::value, [&] { static_cast<void>(array.as<float>()); }), HasSubstr("read-only"));
    const Recipe recipe = recipes::mxfp8{};
    const ScaledTensor scaled = cast(array, recipe);
    EXPECT_EQ(to_vector(dequantize(scaled)), x);
    // Parts in const memory, as a mapped checkpoint has them, are operands of every verb.
    const ScaledTensor nvfp4 = cast(array, recipes::nvfp4{});
    const auto frozen = [](Array part) {
        part.read_only = true;
        return part;
    };
    const ScaledTensor mapped(frozen(nvfp4.data()), frozen(nvfp4.scale()), nvfp4.recipe(), nvfp4.layout(),
                              {.global_scale = frozen(*nvfp4.global_scale()), .shape = nvfp4.shape()});
    EXPECT_EQ(to_vector(dequantize(mapped)), to_vector(dequantize(nvfp4)));
    EXPECT_EQ(to_vector(linear(array, PreparedWeight(mapped))), to_vector(linear(array, PreparedWeight(nvfp4))));
    const Recipe divisor = recipes::nvfp4{.scale_rule = recipes::Nvfp4Rule::torchao};
    EXPECT_TRUE(same_bytes(requantize(mapped, divisor).data(), requantize(nvfp4, divisor).data()));
}

// What a verb says of an output whose memory is const, which it must not have written to.
template <class Verb>
std::string refusal_of_const(const Array& writable, Verb verb) {
    Array out = writable;
    out.read_only = true;
    const auto bytes = static_cast<std::size_t>(out.size()) * out.type.size();
    std::memset(writable.data, 0x5A, bytes);
    const std::string message = message_of(Error::Kind::value, [&] { verb(out); });
    const auto* first = static_cast<const std::uint8_t*>(writable.data);
    EXPECT_TRUE(std::all_of(first, first + bytes, [](std::uint8_t b) { return b == 0x5A; })) << message;
    return message;
}

TEST(ReadOnly, IsRefusedAsTheOutputOfEveryVerb) {
    const Array x = Array::allocate(DType::float32, {2, 32});
    std::memset(x.data, 0, 256);
    const ScaledTensor scaled = cast(x, recipes::mxfp8{});
    const Array product = Array::allocate(DType::float32, {2, 2});
    const Array values = Array::allocate(DType::bfloat16, {2, 32});
    const auto wanted = testing::AllOf(HasSubstr("out must be memory that can be written"), HasSubstr("read-only"));
    EXPECT_THAT(refusal_of_const(values, [&](const Array& out) { dequantize_into(scaled, out); }), wanted);
    EXPECT_THAT(refusal_of_const(product, [&](const Array& out) { matmul_into(x, scaled.transposed(), out); }), wanted);
    EXPECT_THAT(refusal_of_const(product, [&](const Array& out) { linear_into(x, scaled, nullptr, out); }), wanted);
}

// Each part that a recipe has, in turn, of the output of cast and of requantize.
TEST(ReadOnly, IsRefusedAsAnyPartOfAnOutput) {
    const Array x = Array::allocate(DType::float32, {2, 256});
    std::memset(x.data, 0, 2048);
    std::set<std::string> parts;
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor source = cast(x, recipes::mxfp8{});
        const CastOutput out = allocate(plan_cast(x.shape, recipe));
        const auto refuse = [&](const std::string& name, const Array& part, auto with) {
            parts.insert(name);
            const auto wanted =
                testing::AllOf(HasSubstr(name + " must be memory that can be written"), HasSubstr("read-only"));
            EXPECT_THAT(refusal_of_const(part, [&](const Array& a) { cast_into(x, recipe, with(a)); }), wanted)
                << describe(recipe);
            EXPECT_THAT(refusal_of_const(part, [&](const Array& a) { requantize_into(source, recipe, with(a)); }),
                        wanted)
                << describe(recipe);
        };
        refuse("data", out.data,
               [&](const Array& a) { return CastOutput{a, out.scale, out.zero_point, out.global_scale}; });
        refuse("scale", out.scale,
               [&](const Array& a) { return CastOutput{out.data, a, out.zero_point, out.global_scale}; });
        if (out.zero_point)
            refuse("zero_point", *out.zero_point,
                   [&](const Array& a) { return CastOutput{out.data, out.scale, a, {}}; });
        if (out.global_scale)
            refuse("global_scale", *out.global_scale,
                   [&](const Array& a) { return CastOutput{out.data, out.scale, {}, a}; });
    }
    EXPECT_EQ(parts.size(), 4U) << "a part that no recipe of the catalogue has";
}

TEST(Arrays, AsNamesBothTypes) {
    std::vector<float> x(4);
    const Array array = Array::borrow(x, {4});
    EXPECT_EQ(array.as<float>(), x.data());
    EXPECT_EQ(static_cast<void*>(array.as<std::byte>()), x.data());
    EXPECT_EQ(static_cast<const void*>(array.as<const std::uint32_t>()), x.data());  // its bits
    EXPECT_THAT(message_of(Error::Kind::type, [&] { static_cast<void>(array.as<double>()); }),
                testing::AllOf(HasSubstr("float32"), HasSubstr("float64")));
    EXPECT_THAT(message_of(Error::Kind::type, [&] { static_cast<void>(array.as<std::uint8_t>()); }),
                testing::AllOf(HasSubstr("float32"), HasSubstr("uint8")));
    const Array halves = Array::allocate(DType::float16, {4});
    EXPECT_NO_THROW(static_cast<void>(halves.as<Float16>()));
    EXPECT_NO_THROW(static_cast<void>(halves.as<std::uint16_t>()));
    EXPECT_THROW(static_cast<void>(halves.as<BFloat16>()), Error);
    const Array codes = Array::allocate(ElementType::codes(format_of<Float8E5M2>), {4});
    EXPECT_NO_THROW(static_cast<void>(codes.as<std::uint8_t>()));
    EXPECT_THROW(static_cast<void>(codes.as<float>()), Error);
    EXPECT_THROW(static_cast<void>(Array().as<float>()), Error);
}

template <class Typed>
void expect_row(std::string_view name, const Typed& typed, const Fields& fields = {}) {
    EXPECT_EQ(Recipe(typed), make_recipe(name, fields)) << name;
    EXPECT_EQ(Recipe(typed).name, make_recipe(name, fields).name);
}

// Each field that a recipe asks something with makes a difference: only its name makes none.
TEST(Recipes, AreEqualWhateverTheirNames) {
    for (const Recipe& recipe : all_recipes()) {
        const auto changed = [&](auto change) {
            Recipe other = recipe;
            change(other);
            return other != recipe;
        };
        EXPECT_FALSE(changed([](Recipe& r) { r.name = "another"; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.element = format_of<Float8E8M0FNU>; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.scale = ScaleType::float64; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.layout.block_n += 1; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.rule = ScaleRule{static_cast<std::uint8_t>(r.rule == ScaleRule{})}; }));
        EXPECT_TRUE(changed(
            [](Recipe& r) { r.search = r.search == ScaleSearch::amax ? ScaleSearch::mse : ScaleSearch::amax; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.two_level = !r.two_level; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.global_divides = !r.global_divides; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.ragged = !r.ragged; }));
        EXPECT_TRUE(changed([](Recipe& r) { r.margin += 1; }));
    }
    // A tensor that is requantized has the name that was asked for, also where its recipe asks for the same.
    std::vector<float> x(64, 1.5F);
    const ScaledTensor delayed = cast(Array::borrow(x, {2, 32}), recipes::delayed{});
    ASSERT_EQ(delayed.recipe(), Recipe(recipes::current{}));
    EXPECT_EQ(requantize(delayed, recipes::current{}).recipe().name, "Float8CurrentScaling");
}

TEST(TypedRecipes, HaveTheDefaultsOfTheirRows) {
    expect_row("delayed", recipes::delayed{});
    expect_row("current", recipes::current{});
    expect_row("block", recipes::block{});
    expect_row("expanded", recipes::expanded{});
    expect_row("mxfp8", recipes::mxfp8{});
    expect_row("mxfp6", recipes::mxfp6{});
    expect_row("mxfp4", recipes::mxfp4{});
    expect_row("nvfp4", recipes::nvfp4{});
    expect_row("int4", recipes::int4{});
    expect_row("int8", recipes::int8{});
    expect_row("int8_expanded", recipes::int8_expanded{});
    EXPECT_EQ(catalogue().size(), 11U) << "a row without a type in recipes.hpp";
}

// Each choice of the row, in its order, is the enumerator at that place; there are no more than the row has.
template <class Enum, class Make>
void expect_choices(std::string_view name, const std::string& field, Make make) {
    const RecipeRow& row = *std::ranges::find(catalogue(), name, &RecipeRow::short_name);
    std::string_view rest = std::ranges::find(row.fields, field, &FieldSpec::name)->text;
    int place = 0;
    for (; !rest.empty(); ++place) {
        const std::string choice(rest.substr(0, rest.find('|')));
        rest.remove_prefix(std::min(rest.size(), choice.size() + 1));
        expect_row(name, make(static_cast<Enum>(place)), {{field, choice}});
    }
    EXPECT_THROW(static_cast<void>(Recipe(make(static_cast<Enum>(place)))), Error) << name << ' ' << field;
}

TEST(TypedRecipes, HaveTheChoicesOfTheirRows) {
    using namespace recipes;
    expect_choices<Fp8Format>("delayed", "fp8_format", [](Fp8Format f) { return delayed{.fp8_format = f}; });
    expect_choices<Fp8Rule>("delayed", "scale_rule", [](Fp8Rule r) { return delayed{.scale_rule = r}; });
    expect_choices<Granularity>("current", "granularity", [](Granularity g) { return current{.granularity = g}; });
    expect_choices<ScaleSearch>("current", "scale_search", [](ScaleSearch s) { return current{.scale_search = s}; });
    expect_choices<ScaleSearch>("block", "scale_search", [](ScaleSearch s) { return block{.scale_search = s}; });
    expect_choices<ScaleSearch>("mxfp8", "scale_search", [](ScaleSearch s) { return mxfp8{.scale_search = s}; });
    expect_choices<ScaleSearch>("mxfp6", "scale_search", [](ScaleSearch s) { return mxfp6{.scale_search = s}; });
    expect_choices<ScaleSearch>("mxfp4", "scale_search", [](ScaleSearch s) { return mxfp4{.scale_search = s}; });
    expect_choices<ScaleSearch>("nvfp4", "scale_search", [](ScaleSearch s) { return nvfp4{.scale_search = s}; });
    expect_choices<ScaleSearch>("int4", "scale_search", [](ScaleSearch s) { return int4{.scale_search = s}; });
    expect_choices<ScaleSearch>("int8", "scale_search", [](ScaleSearch s) { return int8{.scale_search = s}; });
    expect_choices<MxRounding>("mxfp6", "scale_rounding", [](MxRounding r) { return mxfp6{.scale_rounding = r}; });
    expect_choices<Fp8Rule>("current", "scale_rule", [](Fp8Rule r) { return current{.scale_rule = r}; });
    expect_choices<BlockScale>("block", "scale_format", [](BlockScale s) { return block{.scale_format = s}; });
    expect_choices<Fp8Format>("current", "fp8_format", [](Fp8Format f) { return current{.fp8_format = f}; });
    expect_choices<Fp8Format>("block", "fp8_format", [](Fp8Format f) { return block{.fp8_format = f}; });
    expect_choices<Fp8Format>("mxfp8", "fp8_format", [](Fp8Format f) { return mxfp8{.fp8_format = f}; });
    expect_choices<Fp8Format>("expanded", "fp8_format", [](Fp8Format f) { return expanded{.fp8_format = f}; });
    expect_choices<MxRounding>("mxfp8", "scale_rounding", [](MxRounding r) { return mxfp8{.scale_rounding = r}; });
    expect_choices<Fp6Format>("mxfp6", "fp6_format", [](Fp6Format f) { return mxfp6{.fp6_format = f}; });
    expect_choices<Fp4Format>("mxfp4", "fp4_format", [](Fp4Format f) { return mxfp4{.fp4_format = f}; });
    expect_choices<MxRounding>("mxfp4", "scale_rounding", [](MxRounding r) { return mxfp4{.scale_rounding = r}; });
    expect_choices<Nvfp4Rule>("nvfp4", "scale_rule", [](Nvfp4Rule r) { return nvfp4{.scale_rule = r}; });
    expect_choices<GlobalScaleForm>("nvfp4", "global_scale_form",
                                    [](GlobalScaleForm f) { return nvfp4{.global_scale_form = f}; });
    expect_choices<Int4Scale>("int4", "scale_dtype", [](Int4Scale s) { return int4{.scale_dtype = s}; });
    expect_choices<Int8Scale>("int8", "scale_dtype", [](Int8Scale s) { return int8{.scale_dtype = s}; });
    expect_row("nvfp4", nvfp4{.two_level = false}, {{"two_level", false}});
    expect_row("int4", int4{.is_signed = false, .symmetric = false}, {{"signed", false}, {"symmetric", false}});
    expect_row("expanded", expanded{.group_size = 64}, {{"group_size", std::int64_t{64}}});
    expect_row("int8_expanded", int8_expanded{.group_size = 64}, {{"group_size", std::int64_t{64}}});
    expect_row("int8", int8{.group_size = 64}, {{"group_size", std::int64_t{64}}});
    expect_row("block", block{.block_k = 64, .block_m = 64},
               {{"block_k", std::int64_t{64}}, {"block_m", std::int64_t{64}}});
    expect_row("delayed", delayed{.amax_history_len = 4, .margin = 2},
               {{"amax_history_len", std::int64_t{4}}, {"margin", std::int64_t{2}}});
    expect_row("int4", int4{.group_size = 64}, {{"group_size", std::int64_t{64}}});
    expect_row("int8", int8{.symmetric = false}, {{"symmetric", false}});
}

TEST(Messages, SpeakTheLanguageOfTheCaller) {
    const auto refused = [] {
        return message_of(Error::Kind::value, [] {
            static_cast<void>(
                Recipe(recipes::nvfp4{.two_level = false, .global_scale_form = recipes::GlobalScaleForm::divisor}));
        });
    };
    EXPECT_THAT(refused(), HasSubstr("two_level=true, got false"));
    spelling = Spelling::python;
    EXPECT_THAT(refused(), HasSubstr("two_level=True, got False"));
    spelling = Spelling::cpp;
    EXPECT_THAT(message_of(Error::Kind::value, [] { make_recipe("nvfp5"); }), HasSubstr("did you mean 'nvfp4'"));
}

TEST(Printing, SaysWhatAValueIs) {
    EXPECT_EQ(printed(ElementType::packed_codes(format_of<Float4E2M1FN>)), "float4_e2m1fn_x2");
    EXPECT_EQ(printed(Layout::per_tensor()), "PerTensor()");
    EXPECT_EQ(printed(Layout::per_channel(-2)), "PerChannel(axis=-2)");
    EXPECT_EQ(printed(Layout::per_block_k(128)), "PerBlockK(128)");
    EXPECT_EQ(printed(Layout::per_block_mn(1, 16).transposed()), "PerBlockMN(16, 1, axis=-2)");
    EXPECT_EQ(printed(Recipe(recipes::nvfp4{})),
              "NVFP4BlockScaling(float4_e2m1fn, float8_e4m3fn scales, PerBlockMN(1, 16), two_level)");
    EXPECT_EQ(printed(Recipe(recipes::int8{.symmetric = false, .scale_search = ScaleSearch::mse})),
              "INT8Scaling(int8, float32 scales, PerChannel(), zero points, mse)");
    std::vector<float> x(64, 1.0F);
    EXPECT_THAT(printed(cast(Array::borrow(x, {2, 32}), recipes::mxfp8{})),
                testing::AllOf(HasSubstr("ScaledTensor (2, 32) MXFP8BlockScaling("), HasSubstr("66 bytes")));
}

TEST(Version, IsThatOfTheHeaders) {
    EXPECT_EQ(version(), std::to_string(BRECCIA_VERSION_MAJOR) + "." + std::to_string(BRECCIA_VERSION_MINOR) + "." +
                             std::to_string(BRECCIA_VERSION_PATCH));
}

TEST(Linear, IsTheProductByTheTransposePlusTheBias) {
    std::vector<float> x = heavy_tailed(6, 64, 1, 1), w = heavy_tailed(5, 64, 2, 1), b = heavy_tailed(1, 5, 3, 1);
    const Array activations = Array::borrow(x, {2, 3, 64}), numbers = Array::borrow(w, {5, 64});
    const Array bias = Array::borrow(b, {5});
    const ScaledTensor scaled = cast(numbers, recipes::mxfp8{});
    const PreparedWeight ready(scaled);
    const Array product = matmul(activations, scaled.transposed());
    EXPECT_TRUE(same_bytes(linear(activations, scaled), product));
    EXPECT_TRUE(same_bytes(linear(activations, numbers), matmul(activations, numbers.transposed())));
    EXPECT_TRUE(same_bytes(linear(activations, ready), matmul(activations, ready.transposed())));
    std::vector<float> expected = to_vector(product);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += b[i % 5];
    EXPECT_EQ(to_vector(linear(activations, scaled, &bias)), expected);
    // Into a view of other strides, and rounded to a narrower type after the sum.
    const Array turned = Array::allocate(DType::float32, {2, 5, 3}).transposed();
    linear_into(activations, scaled, &bias, turned);
    for (std::int64_t i = 0; i < 30; ++i) {
        const std::int64_t at = (i / 15) * 15 + (i % 5) * 3 + i / 5 % 3;
        EXPECT_EQ(turned.as<float>()[at], expected[static_cast<std::size_t>(i)]);
    }
    const Array narrow = linear(activations, scaled, &bias, DType::bfloat16);
    for (std::int64_t i = 0; i < 30; ++i)
        EXPECT_EQ(narrow.as<BFloat16>()[i].bits, to_bfloat16(expected[static_cast<std::size_t>(i)]).bits);
}

// Which takes no time, however many rows of no elements there are.
TEST(Linear, OfManyRowsWithoutElements) {
    constexpr std::int64_t many = std::int64_t{1} << 40;
    const Array x = Array::allocate(DType::float32, {many, 1, 0}), w = Array::allocate(DType::float32, {0, 0});
    const Array bias = Array::allocate(DType::float32, {0});
    EXPECT_EQ(linear(x, w, &bias).shape, (Shape{many, 1, 0}));
}

TEST(Linear, RefusesWhatDoesNotFit) {
    std::vector<float> x(128), w(320), b(5), y(10);
    const Array activations = Array::borrow(x, {2, 64}), weight = Array::borrow(w, {5, 64});
    const Array bias = Array::borrow(b, {5}), short_bias = Array::borrow(std::span(b).first(4), {4});
    const Array out = Array::borrow(y, {2, 5});
    const auto message = [](auto verb) { return message_of(Error::Kind::value, verb); };
    EXPECT_THAT(message([&] { linear(Array::borrow(x, {128}), weight); }), HasSubstr("x must be at least 2-D"));
    EXPECT_THAT(message([&] { linear(Array::borrow(x, {4, 32}), weight); }), HasSubstr("64 columns of w"));
    EXPECT_THAT(message([&] { linear(activations, Array::borrow(w, {1, 5, 64})); }), HasSubstr("w must be 2-D"));
    EXPECT_THAT(message([&] { linear(activations, weight, &short_bias); }), HasSubstr("bias must have shape (5,)"));
    EXPECT_THAT(message([&] { linear_into(activations, weight, &bias, Array::borrow(y, {5, 2})); }),
                HasSubstr("out.shape must be (2, 5)"));
    const Array inside = Array::borrow(std::span(y).first(5), {5});
    EXPECT_THROW(linear_into(activations, weight, &inside, out), Error);
    const Array integers = Array::allocate(ElementType::int8(), {5});
    EXPECT_THAT(message_of(Error::Kind::type, [&] { linear(activations, weight, &integers); }), HasSubstr("bias"));
}

class CallersThreads : public testing::Test {
protected:
    CallersThreads() { set_num_threads(4); }
    ~CallersThreads() override {
        set_executor({});
        set_num_threads(1);
    }
    std::vector<float> x = heavy_tailed(512, 512, 1, 2);
    const Array array = Array::borrow(x, {512, 512});
};

TEST_F(CallersThreads, DoTheWorkToTheSameBytes) {
    const ScaledTensor expected = cast(array, recipes::nvfp4{});
    std::atomic<int> calls{0}, tasks{0};
    const Executor each_way[] = {
        [&](int count, const std::function<void(int)>& task) {
            ++calls;
            std::vector<std::thread> threads;
            for (int i = 0; i < count; ++i)
                threads.emplace_back([&, i] {
                    ++tasks;
                    task(i);
                });
            for (std::thread& thread : threads) thread.join();
        },
        [&](int count, const std::function<void(int)>& task) {  // one after another, on this thread
            ++calls;
            for (int i = 0; i < count; ++i, ++tasks) task(i);
        },
    };
    for (const Executor& executor : each_way) {
        calls = tasks = 0;
        set_executor(executor);
        const ScaledTensor actual = cast(array, recipes::nvfp4{});
        EXPECT_TRUE(same_bytes(actual.data(), expected.data()));
        EXPECT_TRUE(same_bytes(actual.scale(), expected.scale()));
        EXPECT_GT(calls, 0);
        EXPECT_GT(tasks, calls.load()) << "of four threads, three are the executor's";
    }
    set_executor({});
    calls = 0;
    cast(array, recipes::nvfp4{});
    EXPECT_EQ(calls, 0);
}

TEST_F(CallersThreads, WhatAnExecutorThrowsLeavesTheVerb) {
    struct Refused {};
    set_executor([](int, const std::function<void(int)>&) { throw Refused(); });
    EXPECT_THROW(cast(array, recipes::nvfp4{}), Refused);
    set_executor({});
    EXPECT_NO_THROW(cast(array, recipes::nvfp4{}));
}

#if defined(__linux__)
int threads_of_process() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;)
        if (word == "Threads:") return status >> word ? std::stoi(word) : 0;
    return 0;
}

// The number of threads when it is the expected one, or after two seconds: the system lists a thread that was joined
// for a moment longer.
int threads_once(int expected) {
    int found = threads_of_process();
    for (int i = 0; i < 200 && found != expected; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        found = threads_of_process();
    }
    return found;
}

TEST_F(CallersThreads, ThePoolEndsAndStartsAgain) {
    const ScaledTensor expected = cast(array, recipes::nvfp4{});
    shutdown();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const int before = threads_of_process();
    for (int round = 0; round < 3; ++round) {
        EXPECT_TRUE(same_bytes(cast(array, recipes::nvfp4{}).data(), expected.data()));
        EXPECT_EQ(threads_once(before + 3), before + 3);
        shutdown();
        EXPECT_EQ(threads_once(before), before);
    }
    shutdown();  // nothing to end
}
#endif

}  // namespace
}  // namespace breccia
