// SPDX-License-Identifier: Apache-2.0
//
// Every verb on buffers that touch a page nobody may read or write, on one side and then on the other, and on buffers
// at odd addresses: each recipe at every length up to three vectors, on each backend. What comes out has the portable
// backend's bytes.
#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>

#include "support.hpp"

namespace breccia {
namespace {

enum class Side { before, after, odd };

constexpr DType number_types[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
constexpr std::int64_t rows = 3;

/// Memory between two forbidden pages.
class Guarded {
public:
    Guarded() {
        base_ =
            static_cast<std::byte*>(mmap(nullptr, capacity + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + page_, capacity, PROT_READ | PROT_WRITE) != 0)
            throw std::bad_alloc();
    }
    ~Guarded() { munmap(base_, capacity + 2 * page_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    /// An array with the forbidden page on one side, or a byte behind one, filled with junk.
    [[nodiscard]] Array array(ElementType type, const Shape& shape, Side side) const {
        const std::size_t bytes = static_cast<std::size_t>(element_count(shape)) * type.size();
        if (bytes >= capacity) throw std::bad_alloc();
        const std::size_t offset = side == Side::before ? 0 : side == Side::odd ? 1 : capacity - bytes;
        std::byte* data = base_ + page_ + offset;
        std::memset(data, 0xA5, bytes);
        return Array::borrow(data, type, shape);
    }
    [[nodiscard]] Array copy(const Array& from, Side side) const {
        Array to = array(from.type, from.shape, side);
        if (from.size() != 0)  // whose data may be null
            std::memcpy(to.data, from.data, static_cast<std::size_t>(from.size()) * from.type.size());
        return to;
    }

private:
    static constexpr std::size_t capacity = 64 << 10;
    std::size_t page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    std::byte* base_ = nullptr;
};

/// Guarded memory for the parts of one tensor.
struct GuardedTensor {
    Guarded data, scale, zero_point, global_scale;

    [[nodiscard]] CastOutput output(const CastPlan& plan, Side side) const {
        CastOutput out{data.array(plan.data_type, plan.data_shape, side),
                       scale.array(plan.scale_type, plan.scale_shape, side), std::nullopt, std::nullopt};
        if (plan.has_zero_point) out.zero_point = zero_point.array(plan.zero_point_type, plan.scale_shape, side);
        if (plan.has_global_scale) out.global_scale = global_scale.array(DType::float32, plan.global_scale_shape, side);
        return out;
    }
};

ScaledTensor tensor_of(const CastOutput& out, const Recipe& recipe, const Shape& shape) {
    return {out.data,
            out.scale,
            recipe,
            recipe.layout,
            {.zero_point = out.zero_point, .global_scale = out.global_scale, .shape = shape}};
}

void expect_same(const ScaledTensor& actual, const ScaledTensor& expected) {
    EXPECT_TRUE(same_bytes(actual.data(), expected.data()));
    EXPECT_TRUE(same_bytes(actual.scale(), expected.scale()));
    ASSERT_EQ(actual.zero_point().has_value(), expected.zero_point().has_value());
    EXPECT_TRUE(!expected.zero_point() || same_bytes(*actual.zero_point(), *expected.zero_point()));
    ASSERT_EQ(actual.global_scale().has_value(), expected.global_scale().has_value());
    EXPECT_TRUE(!expected.global_scale() || same_bytes(*actual.global_scale(), *expected.global_scale()));
}

bool fits(const Recipe& recipe, std::int64_t cols) {
    try {
        plan_cast({rows, cols}, recipe);
        return true;
    } catch (const Error&) {
        return false;
    }
}

/// Every recipe with each length it can have of 0 … 48 and one to three of the longest blocks, and every length of
/// block.
std::vector<std::pair<Recipe, std::int64_t>> recipes_and_lengths() {
    std::vector<std::pair<Recipe, std::int64_t>> all;
    std::vector<std::int64_t> lengths{64, 96, 128, 256, 384};
    for (std::int64_t n = 0; n <= 48; ++n) lengths.push_back(n);
    for (const Recipe& recipe : all_recipes())
        for (const std::int64_t n : lengths)
            if (fits(recipe, n)) all.emplace_back(recipe, n);
    for (std::int64_t block = 1; block <= 48; ++block) {
        all.emplace_back(make_recipe("Float8BlockScaling", {{"block_k", block}}), 3 * block);
        all.emplace_back(make_recipe("INT8Scaling", {{"group_size", block}, {"symmetric", false}}), 3 * block);
        if (block % 2 == 0) all.emplace_back(make_recipe("INT4Scaling", {{"group_size", block}}), 3 * block);
    }
    return all;
}

class GuardPages : public testing::TestWithParam<std::tuple<std::string, Side>> {
protected:
    [[nodiscard]] static std::string backend() { return std::get<0>(GetParam()); }
    [[nodiscard]] static Side side() { return std::get<1>(GetParam()); }

    /// Calls body(x, recipe, shape, what cast gives on the portable backend).
    template <class Body>
    static void for_each_case(Body body) {
        Sample cases;
        for (const auto& [recipe, cols] : recipes_and_lengths()) {
            if (!cases.takes()) continue;
            SCOPED_TRACE(describe(recipe) + " of " + std::to_string(cols));
            const Shape shape{rows, cols};
            std::vector<float> x = heavy_tailed(rows, cols, 1, 3);
            const BackendScope portable("portable");
            body(array_of(x, shape), recipe, shape, cast(array_of(x, shape), recipe));
        }
    }
};

Array converted(const Array& x, DType dtype) {
    Array y = Array::allocate(dtype, x.shape);
    for (std::int64_t i = 0; i < x.size(); ++i) {
        const float value = x.as<float>()[i];
        switch (dtype) {
            case DType::float32: y.as<float>()[i] = value; break;
            case DType::float64: y.as<double>()[i] = value; break;
            case DType::float16: y.as<Float16>()[i] = to_float16(value); break;
            case DType::bfloat16: y.as<BFloat16>()[i] = to_bfloat16(value); break;
        }
    }
    return y;
}

TEST_P(GuardPages, Cast) {
    const Guarded memory;
    const GuardedTensor parts;
    for_each_case([&](const Array& x, const Recipe& recipe, const Shape& shape, const ScaledTensor&) {
        for (const DType dtype : number_types) {
            const Array number = converted(x, dtype);
            const ScaledTensor expected = cast(number, recipe);
            const BackendScope scope(backend());
            const CastOutput out = parts.output(plan_cast(shape, recipe), side());
            cast_into(memory.copy(number, side()), recipe, out);
            expect_same(tensor_of(out, recipe, shape), expected);
        }
    });
}

TEST_P(GuardPages, CastOfColumns) {
    const Guarded memory;
    const GuardedTensor parts;
    for_each_case([&](const Array& x, const Recipe& recipe, const Shape& shape, const ScaledTensor& expected) {
        Array columns = memory.array(DType::float32, {shape[1], shape[0]}, side()).transposed();
        for (std::int64_t r = 0; r < shape[0]; ++r)
            for (std::int64_t c = 0; c < shape[1]; ++c)
                std::memcpy(columns.as<std::byte>() + (c * shape[0] + r) * 4, x.as<float>() + r * shape[1] + c, 4);
        const BackendScope scope(backend());
        const CastOutput out = parts.output(plan_cast(shape, recipe), side());
        cast_into(columns, recipe, out);
        expect_same(tensor_of(out, recipe, shape), expected);
    });
}

/// The tensor with its parts in guarded memory.
ScaledTensor guarded(const GuardedTensor& parts, const ScaledTensor& scaled, const Recipe& recipe, Side side) {
    CastOutput in{parts.data.copy(scaled.data(), side), parts.scale.copy(scaled.scale(), side), std::nullopt,
                  std::nullopt};
    if (scaled.zero_point()) in.zero_point = parts.zero_point.copy(*scaled.zero_point(), side);
    if (scaled.global_scale()) in.global_scale = parts.global_scale.copy(*scaled.global_scale(), side);
    return tensor_of(in, recipe, scaled.shape());
}

TEST_P(GuardPages, Dequantize) {
    const Guarded memory;
    const GuardedTensor parts;
    for_each_case([&](const Array&, const Recipe& recipe, const Shape& shape, const ScaledTensor& scaled) {
        const ScaledTensor in = guarded(parts, scaled, recipe, side());
        for (const DType dtype : number_types) {
            const Array expected = dequantize(scaled, dtype), out = memory.array(dtype, shape, side());
            const BackendScope scope(backend());
            dequantize_into(in, out);
            EXPECT_TRUE(same_bytes(out, expected)) << name_of(dtype);
        }
    });
}

TEST_P(GuardPages, Requantize) {
    const GuardedTensor parts, result;
    const Recipe targets[] = {make_recipe("Float8CurrentScaling", {{"granularity", std::string("row")}}),
                              make_recipe("Float8BlockScaling", {{"block_m", std::int64_t{128}}}),
                              make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}}),
                              make_recipe("MXFP8BlockScaling"), make_recipe("NVFP4BlockScaling")};
    for_each_case([&](const Array&, const Recipe& recipe, const Shape& shape, const ScaledTensor& scaled) {
        const ScaledTensor in = guarded(parts, scaled, recipe, side());
        for (const Recipe& to : targets) {
            if (!fits(to, shape[1])) continue;
            SCOPED_TRACE("to " + describe(to));
            const CastPlan plan = plan_cast(shape, to);
            const CastOutput expected = allocate(plan), out = result.output(plan, side());
            requantize_into(scaled, to, expected);
            const BackendScope scope(backend());
            requantize_into(in, to, out);
            expect_same(tensor_of(out, to, shape), tensor_of(expected, to, shape));
        }
    });
}

TEST_P(GuardPages, Matmul) {
    const Guarded activations, memory;
    const GuardedTensor parts, codes;
    for_each_case([&](const Array&, const Recipe& recipe, const Shape& shape, const ScaledTensor& scaled) {
        const ScaledTensor w = guarded(parts, scaled, recipe, side()).transposed();
        const ScaledTensor w_elsewhere = scaled.transposed();
        const BackendScope scope(backend());
        for (const std::int64_t m : {1, 2, 17}) {
            std::vector<float> values = heavy_tailed(m, shape[1], 2, 1);
            const Array x = array_of(values, {m, shape[1]});
            const Array y = memory.array(DType::float32, {m, rows}, side());
            for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
                const Array number = converted(x, dtype);
                matmul_into(activations.copy(number, side()), w, y);
                EXPECT_TRUE(same_bytes(y, matmul(number, w_elsewhere))) << name_of(dtype) << " M = " << m;
            }
            const ScaledTensor x_codes = cast(x, recipe);
            matmul_into(guarded(codes, x_codes, recipe, side()), w, y);
            EXPECT_TRUE(same_bytes(y, matmul(x_codes, w_elsewhere))) << "codes, M = " << m;
        }
    });
}

TEST_P(GuardPages, LinearByAPreparedWeight) {
    const Guarded activations, memory, bias;
    const GuardedTensor parts;
    for_each_case([&](const Array& x, const Recipe& recipe, const Shape& shape, const ScaledTensor& scaled) {
        std::vector<float> added = heavy_tailed(1, rows, 3, 1);
        const Array b = array_of(added, {rows});
        const BackendScope scope(backend());
        const ScaledTensor w = guarded(parts, scaled, recipe, side());
        const PreparedWeight prepared(w), elsewhere(scaled);
        EXPECT_TRUE(same_bytes(prepared.tensor().data(), elsewhere.tensor().data()));
        for (const DType dtype : number_types) {
            const Array y = memory.array(dtype, {rows, rows}, side()), row = bias.copy(converted(b, dtype), side());
            const Array number = converted(x, dtype), plain_row = converted(b, dtype);
            linear_into(activations.copy(number, side()), prepared, &row, y);
            EXPECT_TRUE(same_bytes(y, linear(number, elsewhere, &plain_row, dtype))) << name_of(dtype);
        }
        if (shape[1] == 0) return;
        const Array stack = Array::borrow(x.data, DType::float32, {1, rows, shape[1]});
        const ScaledTensor experts = guarded(parts, cast(stack, recipe), recipe, side());
        const std::int64_t offsets[] = {0, rows};
        const Array y = memory.array(DType::float32, {rows, rows}, side());
        grouped_matmul_into(activations.copy(x, side()), experts, offsets, y);
        EXPECT_TRUE(same_bytes(y, grouped_matmul(x, cast(stack, recipe), offsets)));
    });
}

TEST_P(GuardPages, Compare) {
    const Guarded memory;
    const GuardedTensor parts;
    for_each_case([&](const Array& x, const Recipe& recipe, const Shape&, const ScaledTensor& scaled) {
        const std::vector<std::int64_t> codes = count_codes(scaled);
        for (const DType dtype : number_types) {
            const Array number = converted(x, dtype);
            const Comparison expected = compare(number, scaled);
            const Magnitudes errors = error_magnitudes(number, scaled, 0.5F);
            const BackendScope scope(backend());
            const Array reference = memory.copy(number, side());
            const ScaledTensor tensor = guarded(parts, scaled, recipe, side());
            EXPECT_EQ(compare(reference, tensor), expected) << name_of(dtype);
            EXPECT_EQ(error_magnitudes(reference, tensor, 0.5F), errors) << name_of(dtype);
            EXPECT_EQ(count_codes(tensor), codes);
        }
    });
}

TEST_P(GuardPages, Codes) {
    const Guarded number_memory, code_memory;
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        for (std::int64_t n = 0; n <= 48; ++n) {
            const auto count = static_cast<std::size_t>(n);
            std::vector<float> values = heavy_tailed(1, n);
            // A span of floats lies where floats may.
            const Array x = number_memory.copy(array_of(values, {n}), side() == Side::odd ? Side::before : side());
            const Array codes = code_memory.array(ElementType::uint8(), {n}, side());
            const std::span<std::uint8_t> code_span(codes.as<std::uint8_t>(), count);
            const std::span<float> x_span(x.as<float>(), count);
            const BackendScope scope(backend());
            encode(x_span, format, code_span);
            for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(code_span[i], info(format).encode(values[i]));
            decode(code_span, format, x_span);
            for (std::size_t i = 0; i < count; ++i)
                ASSERT_EQ(bits_of(x_span[i]), bits_of(info(format).decode(code_span[i])));
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Every, GuardPages,
                         testing::Combine(testing::ValuesIn(cpu_info().supported),
                                          testing::Values(Side::before, Side::after, Side::odd)),
                         [](const auto& test) {
                             const Side side = std::get<1>(test.param);
                             const char* name = side == Side::before  ? "_before"
                                                : side == Side::after ? "_after"
                                                                      : "_odd";
                             return std::get<0>(test.param) + name;
                         });

}  // namespace
}  // namespace breccia
#endif
