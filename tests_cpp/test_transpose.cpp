// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

namespace breccia {
namespace {

using namespace std::string_literals;

const Recipe row_blocks = make_recipe("Float8BlockScaling", {{"scale_format", "e8m0"s}, {"block_k", std::int64_t{32}}});

TEST(Transpose, ValuesOfTheLargestScaleStayAndOthersMoveToTheNearestCode) {
    for (const Recipe& recipe : {make_recipe("MXFP8BlockScaling"), make_recipe("MXFP6BlockScaling"), row_blocks}) {
        constexpr std::int64_t rows = 64, cols = 96;
        std::vector<float> x = heavy_tailed(rows, cols, 3, 1);
        const ScaledTensor scaled = cast(array_of(x, {rows, cols}), recipe);
        TransposeReport report;
        const ScaledTensor turned = transpose(scaled, &report);
        EXPECT_EQ(turned.shape(), (Shape{cols, rows}));
        EXPECT_EQ(turned.layout(), recipe.layout);
        const std::vector<float> before = to_vector(dequantize(scaled)), after = to_vector(dequantize(turned));
        std::int64_t rounded = 0, lost = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < cols; ++c) {
                const float was = before[static_cast<std::size_t>(r * cols + c)];
                const float is = after[static_cast<std::size_t>(c * rows + r)];
                const float scale = Float8E8M0FNU::decode(turned.scale().as<std::uint8_t>()[c * 2 + r / 32]);
                const FormatInfo& element = info(recipe.element);
                EXPECT_EQ(is, element.decode(element.encode(was / scale)) * scale);
                rounded += static_cast<int>(is != was);
                lost += static_cast<int>(is == 0 && was != 0);
            }
        }
        EXPECT_EQ(report.rounded, rounded);
        EXPECT_EQ(report.lost, lost);
        EXPECT_GT(rounded, 0);
        EXPECT_EQ(to_vector(dequantize(transpose(transpose(turned)))), after);  // one scale for a square: nothing moves
    }
}

TEST(Transpose, RefusesWhatHasNoSuchTranspose) {
    std::vector<float> x(33 * 32, 1.0F);
    const auto message = [&](const Recipe& recipe, std::int64_t rows) {
        try {
            (void)transpose(cast(array_of(x, {rows, 32}), recipe));
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return ""s;
    };
    for (const char* name : {"MXFP4BlockScaling", "NVFP4BlockScaling", "INT8Scaling", "Float8CurrentScaling"})
        EXPECT_THAT(message(make_recipe(name), 32), testing::StartsWith("scaled must be a matrix with E8M0 scales"));
    EXPECT_THAT(message(row_blocks, 33), testing::HasSubstr("a multiple of 32 rows"));
    EXPECT_EQ(message(row_blocks, 32), "");
    const ScaledTensor view = cast(array_of(x, {32, 32}), row_blocks).transposed();
    EXPECT_THROW((void)transpose(view), Error);
    const ScaledTensor scaled = cast(array_of(x, {32, 32}), row_blocks);
    const CastOutput small = allocate(plan_cast({32, 64}, row_blocks));
    EXPECT_THROW((void)transpose_into(scaled, small), Error);
}

}  // namespace
}  // namespace breccia
