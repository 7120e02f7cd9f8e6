// SPDX-License-Identifier: Apache-2.0
//
// Vector backends divide by multiplying with a reciprocal in two parts. That is within 2^-47 of the quotient, so it can
// round differently only where the quotient is nearer than that to the middle between two floats; and codes can
// differ only where the middle lies beside a point at which codes change. All such divisions are enumerated here.
#include "contract/kernel_table.hpp"
#include "runtime/call.hpp"
#include "support.hpp"

namespace breccia {
namespace {

struct Division {
    float x = 0, divisor = 0;
};

// The inverse of an odd number modulo 2^64, by Newton's iteration.
std::uint64_t inverse(std::uint64_t odd) {
    std::uint64_t x = odd;
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
}

// Divisions of 24-bit significands with x * 2^shift = divisor * middle + rest, for a middle of 25 bits: their quotient
// is rest / (divisor * middle) away from it, in parts of itself, which is 2^-46 and less for these rests.
void add_divisions(std::uint64_t middle, int shift, std::vector<Division>& divisions) {
    constexpr std::int64_t largest_rest = 8;
    constexpr std::uint64_t least = 1U << 23U, end = 1U << 24U;
    for (std::int64_t rest = -largest_rest; rest <= largest_rest; ++rest) {
        const std::uint64_t modulus = std::uint64_t{1} << static_cast<unsigned>(shift);
        std::uint64_t divisor = (static_cast<std::uint64_t>(-rest) * inverse(middle)) & (modulus - 1);
        for (; divisor < end; divisor += modulus) {
            const std::uint64_t product = divisor * middle + static_cast<std::uint64_t>(rest);
            const std::uint64_t x = product >> static_cast<unsigned>(shift);
            if (divisor < least || x < least || x >= end) continue;
            divisions.push_back({static_cast<float>(x), static_cast<float>(divisor)});
        }
    }
}

// Middles beside numbers of up to 12 bits: codes change at numbers of 5 bits in 8-bit minifloats, of 9 in INT8.
std::vector<Division> hard_divisions() {
    constexpr unsigned bits = 12;
    std::vector<Division> divisions;
    for (std::uint64_t number = 1U << (bits - 1); number <= 1U << bits; ++number)
        for (const std::uint64_t middle : {(number << (25 - bits)) - 1, (number << (25 - bits)) + 1})
            for (const int shift : {24, 25}) add_divisions(middle, shift, divisions);
    return divisions;
}

class EveryBackend : public testing::TestWithParam<std::string> {};

TEST_P(EveryBackend, FastDivisionGivesTheCodesOfDivision) {
    const BackendScope scope(GetParam());
    const std::vector<Division> divisions = hard_divisions();
    ASSERT_GT(divisions.size(), 1000U);
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        if (!info(format).is_target) continue;
        const FormatKernels& kernel = Call().kernels[format];
        for (const Division& d : divisions)
            for (const float binade : {0x1p-8F, 0x1p-1F, 1.0F, 4.0F, 64.0F}) {
                const float x = d.x * binade;
                BlockScale scale{.factor = d.divisor, .all_finite = true, .fast_division = true};
                set_reciprocal(scale);
                std::uint8_t code = 0;
                kernel.encode(&x, 1, scale, &code, 0, false);
                ASSERT_EQ(code, info(format).encode(x / d.divisor))
                    << info(format).name << ' ' << x << ' ' << d.divisor;
            }
    }
}

INSTANTIATE_TEST_SUITE_P(Division, EveryBackend, testing::ValuesIn(cpu_info().supported));

}  // namespace
}  // namespace breccia
