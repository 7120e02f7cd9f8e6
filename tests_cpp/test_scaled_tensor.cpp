// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace breccia {
namespace {

using testing::HasSubstr;

Array bytes(Shape shape) { return Array::allocate(ElementType::uint8(), std::move(shape)); }
Array floats(Shape shape) { return Array::allocate(DType::float32, std::move(shape)); }

TEST(Layouts, ScaleShapes) {
    EXPECT_EQ(Layout::per_tensor().scale_shape({4, 8}), Shape{});
    EXPECT_EQ(Layout::per_block_k(4).scale_shape({3, 4, 8}), (Shape{3, 4, 2}));
    EXPECT_EQ(Layout::per_channel().scale_shape({4, 8}), (Shape{4, 1}));
    EXPECT_EQ(Layout::per_block_mn(128, 128).scale_shape({576, 7168}), (Shape{5, 56}));
    EXPECT_EQ(Layout::per_block_k(4).transposed().scale_shape({8, 4}), (Shape{2, 4}));
}

TEST(Layouts, ErrorsNameTheShapeThatFits) {
    const auto message = [](const Layout& layout, const Shape& data, const Shape& scale) {
        return message_of(Error::Kind::value, [&] { layout.validate(data, scale); });
    };
    EXPECT_EQ(message(Layout::per_block_k(128), {8, 256}, {8, 3}),
              "PerBlockK: scale.shape must be (8, 2), got (8, 3), for data of shape (8, 256) and block_size=128");
    EXPECT_EQ(message(Layout::per_block_k(100), {8, 256}, {8, 2}),
              "PerBlockK: data.shape[-1]=256 must be divisible by block_size=100");
    EXPECT_EQ(message(Layout::per_channel(), {8, 256}, {3}),
              "PerChannel: scale.shape must be one of [(8,), (8, 1)], got (3,)");
    EXPECT_EQ(
        message(Layout::per_block_mn(1, 16), {8, 256}, {3, 3}),
        "PerBlockMN: scale.shape must be (8, 16), got (3, 3), for data of shape (8, 256) and block_m=1, block_n=16");
    EXPECT_THAT(message(Layout::per_tensor(), {8, 256}, {2}), HasSubstr("PerTensor requires a scalar scale"));
    EXPECT_THAT(message_of(Error::Kind::value, [] { Layout::per_block_k(0); }), HasSubstr("block_size must be > 0"));
    EXPECT_THAT(message_of(Error::Kind::value, [] { Layout::per_block_mn(0, 1); }), HasSubstr("(0, 1)"));
}

TEST(Catalogue, ChecksFields) {
    using namespace std::string_literals;
    const auto message = [](Error::Kind kind, const char* name, const Fields& fields) {
        return message_of(kind, [&] { make_recipe(name, fields); });
    };
    EXPECT_EQ(message(Error::Kind::value, "Float8CurrentScaling", {{"fp8_format", "E3M4"s}}),
              "fp8_format must be 'E4M3' or 'E5M2', or 'float8_e4m3fnuz', 'float8_e5m2fnuz', 'float8_e4m3', "
              "'float8_e3m4' or 'float8_e4m3b11fnuz', got 'E3M4'");
    EXPECT_EQ(message(Error::Kind::value, "Float8BlockScaling", {{"block_k", std::int64_t{0}}}),
              "block_k must be > 0, got 0");
    EXPECT_EQ(message(Error::Kind::value, "MXFP8BlockScaling", {{"block_size", std::int64_t{16}}}),
              "MXFP8 block_size is fixed at 32 by the OCP MX spec, got 16");
    EXPECT_EQ(message(Error::Kind::value, "DelayedScaling", {{"amax_history_len", std::int64_t{0}}}),
              "amax_history_len must be >= 1, got 0");
    EXPECT_THAT(message(Error::Kind::value, "INT4Scaling", {{"symmetric", false}}), HasSubstr("signed=false"));
    EXPECT_THAT(message(Error::Kind::type, "INT4Scaling", {{"blocks", false}}), HasSubstr("'blocks'"));
    EXPECT_THAT(message(Error::Kind::type, "INT4Scaling", {{"signed", std::int64_t{1}}}), HasSubstr("true or false"));
    EXPECT_THAT(message(Error::Kind::value, "FP3", {}), HasSubstr("'FP3'"));
}

TEST(ScaledTensor, ChecksItsParts) {
    const Recipe fp8 = make_recipe("Float8BlockScaling"), int4 = make_recipe("INT4Scaling");
    const Layout block = Layout::per_block_k(128);
    EXPECT_NO_THROW(ScaledTensor(bytes({8, 256}), floats({8, 2}), fp8, block));
    EXPECT_EQ(message_of(Error::Kind::value, [&] { ScaledTensor(bytes({}), floats({}), fp8, Layout::per_tensor()); }),
              "data must be at least 1-D, got 0-D");
    EXPECT_THAT(message_of(Error::Kind::type, [&] { ScaledTensor(floats({8, 256}), floats({8, 2}), fp8, block); }),
                HasSubstr("data must hold float8_e4m3fn codes"));
    EXPECT_THAT(message_of(Error::Kind::type, [&] { ScaledTensor(bytes({8, 256}), bytes({8, 2}), fp8, block); }),
                HasSubstr("scale must be a float32"));
    EXPECT_THAT(
        message_of(Error::Kind::value,
                   [&] { ScaledTensor(bytes({8, 256}), floats({8, 2}), fp8, block, {.zero_point = bytes({8, 2})}); }),
        HasSubstr("zero_point must be left out"));
    EXPECT_EQ(
        message_of(Error::Kind::value,
                   [&] { ScaledTensor(bytes({8, 128}), floats({8, 2}), int4, block, {.zero_point = bytes({3})}); }),
        "zero_point.shape ((3,)) must match scale.shape ((8, 2))");
}

TEST(ScaledTensor, TellsPackedFromUnpacked) {
    const Recipe int4 = make_recipe("INT4Scaling");
    const Layout block = Layout::per_block_k(128);
    const ScaledTensor packed(bytes({8, 128}), floats({8, 2}), int4, block);
    EXPECT_TRUE(packed.is_packed());
    EXPECT_EQ(packed.shape(), (Shape{8, 256}));
    const ScaledTensor unpacked(bytes({8, 256}), floats({8, 2}), int4, block);
    EXPECT_FALSE(unpacked.is_packed());
    EXPECT_EQ(unpacked.shape(), (Shape{8, 256}));
    EXPECT_EQ(packed.nbytes(), 8 * 128 + 8 * 2 * 4);
    EXPECT_EQ(packed.transposed().shape(), (Shape{256, 8}));
    EXPECT_EQ(packed.transposed().transposed().layout(), block);
}

TEST(Arrays, AbsurdShapesAreRefused) {
    const std::int64_t huge = std::int64_t{1} << 40;
    EXPECT_THAT(message_of(Error::Kind::value, [&] { element_count({huge, huge}); }), HasSubstr("2^63"));
    EXPECT_EQ(element_count({huge, huge, 0}), 0);
    message_of(Error::Kind::value, [&] { element_count({-1, 2}); });
}

}  // namespace
}  // namespace breccia
