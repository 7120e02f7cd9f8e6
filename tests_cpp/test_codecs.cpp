// SPDX-License-Identifier: Apache-2.0
#include "golden_values.hpp"
#include "support.hpp"

namespace breccia {
namespace {

TEST(Codecs, EveryCodeOfEveryFormatDecodesToItsGoldenValue) {
    EXPECT_EQ(golden_values().size(), format_table.size());
    for (const FormatInfo& f : format_table) {
        const auto found = golden_values().find(f.name);
        ASSERT_NE(found, golden_values().end()) << f.name << " has no table in golden_values.hpp";
        const std::vector<float>& golden = found->second;
        ASSERT_EQ(golden.size(), std::size_t{1} << f.bits) << f.name;
        for (std::size_t code = 0; code < golden.size(); ++code) {
            const float value = f.decode(static_cast<std::uint8_t>(code));
            if (std::isnan(golden[code]))
                EXPECT_TRUE(std::isnan(value)) << f.name << ' ' << code;
            else
                EXPECT_EQ(bits_of(value), bits_of(golden[code])) << f.name << ' ' << code;
        }
    }
}

// Encoding by definition: among all codes, the nearest value, ties to the even code.
std::uint8_t nearest_code(const FormatInfo& f, float x) {
    int best = -1;
    double best_distance = 0;
    for (int code = 0; code < 1 << f.bits; ++code) {
        const float value = f.decode(static_cast<std::uint8_t>(code));
        if (!std::isfinite(value) ||
            (value == 0 && std::signbit(value) != std::signbit(x) && f.lowest < 0 &&
             f.family == CodecFamily::minifloat && f.decode(static_cast<std::uint8_t>(1U << (f.bits - 1))) == 0))
            continue;
        const double distance = std::abs(static_cast<double>(value) - static_cast<double>(x));
        if (best < 0 || distance < best_distance || (distance == best_distance && code % 2 == 0)) {
            best = code;
            best_distance = distance;
        }
    }
    return static_cast<std::uint8_t>(best);
}

TEST(Codecs, EncodeIsNearestEven) {
    std::mt19937 random(7);
    for (const FormatInfo& f : format_table) {
        if (f.family == CodecFamily::exponent) continue;  // its ties go up
        std::vector<float> values;
        for (int code = 0; code < 1 << f.bits; ++code) {
            const float a = f.decode(static_cast<std::uint8_t>(code));
            const float b = f.decode(static_cast<std::uint8_t>((code + 1) % (1 << f.bits)));
            if (!std::isfinite(a) || !std::isfinite(b)) continue;
            const float middle = (a + b) / 2;
            for (const float x : {a, middle, std::nextafter(middle, a), std::nextafter(middle, b)}) values.push_back(x);
        }
        std::uniform_real_distribution<float> any(f.lowest * 1.2F, f.max * 1.2F);
        for (int i = 0; i < 1000; ++i) values.push_back(any(random));
        for (const float x : values)
            EXPECT_EQ(f.decode(f.encode(x)), f.decode(nearest_code(f, x))) << f.name << " of " << x;
    }
}

TEST(Codecs, DecodedValuesEncodeToTheirCode) {
    for (const FormatInfo& f : format_table)
        for (int code = 0; code < 1 << f.bits; ++code) {
            const float value = f.decode(static_cast<std::uint8_t>(code));
            if (std::isfinite(value)) {
                EXPECT_EQ(f.encode(value), code) << f.name;
            }
        }
}

TEST(Codecs, OverflowSaturatesAndNanStays) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const FormatInfo& f : format_table) {
        EXPECT_EQ(f.decode(f.encode(infinity)), f.max) << f.name;
        EXPECT_EQ(f.decode(f.encode(1e38F * 3)), f.max) << f.name;
        if (f.family != CodecFamily::exponent) {
            EXPECT_EQ(f.decode(f.encode(-infinity)), f.lowest) << f.name;
        }
        EXPECT_EQ(std::isnan(f.decode(f.encode(nan))), f.has_nan) << f.name;
    }
}

TEST(Codecs, ScaleCodecRoundsHalvesUp) {
    EXPECT_EQ(Float8E8M0FNU::encode(1.5F), 128);
    EXPECT_EQ(Float8E8M0FNU::encode(std::nextafter(1.5F, 1.0F)), 127);
    EXPECT_EQ(Float8E8M0FNU::encode(0.0F), 0);
    EXPECT_EQ(Float8E8M0FNU::encode(-1.0F), 255);
    EXPECT_EQ(Float8E8M0FNU::encode(std::ldexp(1.0F, -127)), 0);
    EXPECT_EQ(Float8E8M0FNU::encode(std::ldexp(1.0625F, -127)), 1);
}

TEST(Codecs, NamesAreFoundAndUnknownOnesExplained) {
    for (const FormatInfo& f : format_table) EXPECT_EQ(info(parse_format(f.name)).name, f.name);
    const std::string message = message_of(Error::Kind::value, [] { parse_format("float7"); });
    EXPECT_THAT(message, testing::HasSubstr("'float8_e4m3fn'"));
    EXPECT_THAT(message, testing::HasSubstr("got 'float7'"));
}

TEST(DTypes, NamesOfElementTypesAreParsed) {
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        const bool is_byte = info(format).name == "int8";  // which arrays have as a type of their own
        const ElementType plain = is_byte ? ElementType::int8() : ElementType::codes(format);
        EXPECT_EQ(ElementType::parse(info(format).name), plain) << info(format).name;
        const std::string packed = std::string(info(format).name) + "_x2";
        const ElementType expected = is_packed(format) ? ElementType::packed_codes(format) : ElementType{};
        EXPECT_EQ(ElementType::parse(packed), expected) << packed;
    }
}

TEST(DTypes, HalvesRoundTripAndRoundToEven) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const Float16 half{static_cast<std::uint16_t>(bits)};
        const BFloat16 brain{static_cast<std::uint16_t>(bits)};
        if (!std::isnan(to_float(half))) {
            EXPECT_EQ(to_float16(to_float(half)).bits, bits);
        }
        if (!std::isnan(to_float(brain))) {
            EXPECT_EQ(to_bfloat16(to_float(brain)).bits, bits);
        }
    }
    EXPECT_EQ(to_float16(65519.0F).bits, 0x7BFF);
    EXPECT_EQ(to_float16(65520.0F).bits, 0x7C00);
    EXPECT_EQ(to_float16(std::ldexp(1.0F, -25)).bits, 0);
    EXPECT_EQ(to_float16(std::ldexp(1.5F, -25)).bits, 1);
    EXPECT_EQ(to_bfloat16(1.00390625F).bits, 0x3F80);
    EXPECT_TRUE(std::isnan(to_float(to_bfloat16(float_from_bits(0x7F80'0001)))));
}

TEST(Formats, PackingPutsEvenElementsLow) {
    const std::vector<std::uint8_t> codes{1, 2, 3, 4, 5};
    std::vector<std::uint8_t> packed(3), back(5);
    pack(codes, packed);
    EXPECT_THAT(packed, testing::ElementsAre(0x21, 0x43, 0x05));
    unpack(packed, back);
    EXPECT_EQ(back, codes);
    message_of(Error::Kind::value, [&] { pack(codes, back); });
}

}  // namespace
}  // namespace breccia
