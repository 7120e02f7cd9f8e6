// SPDX-License-Identifier: Apache-2.0
//
// Prints a digest of what every recipe's cast, requantize, dequantize and compare give on the current backend, and of
// what the two in the middle give for tensors that no cast made. The lines must be the same on every machine, whatever
// its architecture: continuous integration compares them.
#include <bit>
#include <cmath>
#include <cstdio>

#include "../states.hpp"

namespace breccia {
namespace {

/// FNV-1a.
class Digest {
public:
    void add(const Array& array) {
        const auto* bytes = static_cast<const std::uint8_t*>(array.data);
        const auto count = static_cast<std::size_t>(array.size()) * array.type.size();
        for (std::size_t i = 0; i < count; ++i) value_ = (value_ ^ bytes[i]) * 0x0000'0100'0000'01B3U;
    }
    void add(const ScaledTensor& scaled) {
        add(scaled.data());
        add(scaled.scale());
        if (scaled.zero_point()) add(*scaled.zero_point());
        if (scaled.global_scale()) add(*scaled.global_scale());
    }
    /// The bits of a NaN may be the machine's.
    void add(const Comparison& c) {
        for (const double sum : {c.signal, c.other, c.dot, c.noise, c.max_error})
            add_word(std::isnan(sum) ? 0 : std::bit_cast<std::uint64_t>(sum));
        for (const std::int64_t count : {c.max_error_at, c.reference_nans, c.nans})
            add_word(static_cast<std::uint64_t>(count));
    }
    void add(const Magnitudes& m) {
        for (const std::int64_t count : m.counts) add_word(static_cast<std::uint64_t>(count));
        add_word(bits_of(m.largest));
    }
    [[nodiscard]] unsigned long long value() const { return value_; }

private:
    void add_word(std::uint64_t word) { value_ = (value_ ^ word) * 0x0000'0100'0000'01B3U; }

    std::uint64_t value_ = 0xCBF2'9CE4'8422'2325U;
};

/// Random significands and signs, exponents that drift from row to row, and values that are not finite: made from
/// integers, as libm is not the same everywhere.
std::vector<float> patterns(std::int64_t rows, std::int64_t cols) {
    std::mt19937 random(7);
    std::vector<float> x;
    for (std::int64_t i = 0; i < rows * cols; ++i) {
        const auto exponent = static_cast<std::uint32_t>(100 + i / cols + static_cast<std::int64_t>(random() % 8));
        x.push_back(float_from_bits((static_cast<std::uint32_t>(random()) & 0x807F'FFFFU) | exponent << 23));
    }
    for (std::size_t i = 0; i < x.size(); i += 1009)
        x[i] = float_from_bits(0x7F80'0000U + static_cast<std::uint32_t>(i % 3 << 22));
    return x;
}

void print_digests() {
    constexpr std::int64_t rows = 50, cols = 384;
    std::vector<float> x = patterns(rows, cols);
    std::vector<float> finite = x;
    for (float& v : finite)
        if (!std::isfinite(v)) v = 1;
    const Recipe to = make_recipe("Float8CurrentScaling", {{"granularity", std::string("row")}});
    for (const Recipe& recipe : all_recipes()) {
        const ScaledTensor scaled = cast(array_of(x, {rows, cols}), recipe);
        Digest digest;
        digest.add(scaled);
        digest.add(requantize(scaled, to));
        digest.add(compare(array_of(x, {rows, cols}), scaled));
        const ScaledTensor ordinary = cast(array_of(finite, {rows, cols}), recipe);
        digest.add(compare(array_of(finite, {rows, cols}), ordinary));
        digest.add(error_magnitudes(array_of(finite, {rows, cols}), ordinary, 0.75F));
        for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16})
            digest.add(dequantize(scaled, dtype));
        std::printf("%016llx %s\n", digest.value(), describe(recipe).c_str());
    }
    for (const State& state : all_states(9, cols)) {
        Digest digest;
        if (state.scales == Scales::ordinary) digest.add(requantize(state.tensor, to));
        for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16})
            digest.add(with_one_nan(dequantize(state.tensor, dtype)));
        std::printf("%016llx %s\n", digest.value(), state.name.c_str());
    }
}

}  // namespace
}  // namespace breccia

int main() { breccia::print_digests(); }
