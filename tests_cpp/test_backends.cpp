// SPDX-License-Identifier: Apache-2.0
//
// Every backend this machine supports against the portable one, byte for byte.
#include "support.hpp"

#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace breccia {
namespace {

std::vector<std::string> faster_backends() {
    std::vector<std::string> names = cpu_info().supported;
    names.erase(names.begin());  // portable itself
    return names;
}

std::vector<float> with_specials(std::vector<float> x) {
    const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -0.0F,
                              -std::numeric_limits<float>::infinity(),
                              1e-42F,
                              std::numeric_limits<float>::max()};
    for (std::size_t i = 0; i < std::size(specials); ++i)
        if (x.size() > i * 37 + 5) x[i * 37 + 5] = specials[i];
    return x;
}

TEST(Backends, CastBytesEqualPortable) {
    constexpr std::int64_t rows = 131, cols = 384;
    for (const bool specials : {false, true}) {
        std::vector<float> x = heavy_tailed(rows, cols);
        if (specials) x = with_specials(x);
        const Array array = array_of(x, {rows, cols});
        for (const Recipe& recipe : all_recipes()) {
            SCOPED_TRACE(describe(recipe));
            const ScaledTensor expected = [&] {
                const BackendScope scope("portable");
                return cast(array, recipe);
            }();
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                const ScaledTensor actual = cast(array, recipe);
                EXPECT_TRUE(same_bytes(actual.data(), expected.data())) << name;
                EXPECT_TRUE(same_bytes(actual.scale(), expected.scale())) << name;
                EXPECT_TRUE(!expected.zero_point() || same_bytes(*actual.zero_point(), *expected.zero_point())) << name;
                for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
                    const Array y = dequantize(actual, dtype);
                    const BackendScope portable("portable");
                    EXPECT_TRUE(same_bytes(y, dequantize(expected, dtype))) << name << " to " << name_of(dtype);
                }
            }
        }
    }
}

// Each length from 0 to three vectors, each format, at an odd address.
TEST(Backends, EncodeAndDecodeEqualPortableAtAnyLength) {
    std::mt19937 random(3);
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const Format format{static_cast<std::uint8_t>(f)};
        for (std::size_t n = 0; n <= 48; ++n) {
            std::vector<float> x(n);
            for (float& value : x) value = float_from_bits(static_cast<std::uint32_t>(random()));
            std::vector<std::uint8_t> expected(n), buffer(n + 1);
            const std::span<std::uint8_t> actual = std::span(buffer).subspan(1);
            std::vector<float> decoded(n), decoded_here(n);
            {
                const BackendScope scope("portable");
                encode(x, format, expected);
                decode(expected, format, decoded);
            }
            for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(expected[i], info(format).encode(x[i])) << info(format).name;
            for (const std::string& name : faster_backends()) {
                const BackendScope scope(name);
                encode(x, format, actual);
                ASSERT_TRUE(std::ranges::equal(actual, expected)) << info(format).name << ' ' << name << ' ' << n;
                decode(actual, format, decoded_here);
                ASSERT_TRUE(std::ranges::equal(decoded, decoded_here, {}, bits_of, bits_of)) << info(format).name;
            }
        }
    }
}

// For well-behaved divisors the vector backends replace the division; the quotient must be the same.
TEST(Backends, DivisionIsCorrectlyRounded) {
    std::mt19937 random(11);
    const Recipe recipe = make_recipe("Float8BlockScaling", {{"block_k", std::int64_t{16}}});
    std::vector<float> x(1 << 16);
    for (int round = 0; round < 16; ++round) {
        for (float& value : x) {
            const auto exponent = static_cast<std::uint32_t>(127 - 40 + random() % 80);
            value = float_from_bits((static_cast<std::uint32_t>(random()) & 0x807F'FFFFU) | exponent << 23);
        }
        for (std::size_t i = 0; i < x.size(); i += 7) x[i] = std::copysign(0.0F, x[i]);
        const Array array = array_of(x, {1 << 8, 1 << 8});
        const ScaledTensor expected = [&] {
            const BackendScope scope("portable");
            return cast(array, recipe);
        }();
        for (const std::string& name : faster_backends()) {
            const BackendScope scope(name);
            ASSERT_TRUE(same_bytes(cast(array, recipe).data(), expected.data())) << name;
        }
    }
}

TEST(Backends, UnknownNamesAreRefused) {
    EXPECT_THAT(message_of(Error::Kind::value, [] { set_backend("mmx"); }), testing::HasSubstr("'portable'"));
    for (const std::string& name : cpu_info().supported) {
        set_backend(name);
        EXPECT_EQ(cpu_info().backend, name);
    }
    set_backend("");
}

#if defined(__unix__)
// Memory that ends at a page nobody may touch.
class Guarded {
public:
    explicit Guarded(std::size_t bytes) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        size_ = (bytes + page - 1) / page * page + 2 * page;
        base_ =
            static_cast<std::byte*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(base_, page, PROT_NONE);
        mprotect(base_ + size_ - page, page, PROT_NONE);
        data_ = base_ + size_ - page - bytes;
    }
    ~Guarded() { munmap(base_, size_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    [[nodiscard]] void* data() const { return data_; }

private:
    std::byte* base_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

TEST(Backends, NothingTouchesMemoryBeyondItsBuffers) {
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        for (const Recipe& recipe : all_recipes()) {
            SCOPED_TRACE(name + " " + describe(recipe));
            const std::int64_t cols = recipe.layout.kind == LayoutKind::per_block_k ? 128 : 96;
            const CastPlan plan = plan_cast({3, cols}, recipe);
            const Guarded x(static_cast<std::size_t>(3 * cols) * 4), y(static_cast<std::size_t>(3 * cols) * 4);
            const std::vector<float> values = heavy_tailed(3, cols);
            std::memcpy(x.data(), values.data(), values.size() * sizeof(float));
            const auto bytes_of = [](ElementType type, const Shape& shape) {
                return static_cast<std::size_t>(element_count(shape)) * type.size();
            };
            const Guarded data(bytes_of(plan.data_type, plan.data_shape)),
                scale(bytes_of(plan.scale_type, plan.scale_shape));
            const Guarded zero(bytes_of(ElementType::uint8(), plan.scale_shape)), global(sizeof(float));
            CastOutput out{Array::borrow(data.data(), plan.data_type, plan.data_shape),
                           Array::borrow(scale.data(), plan.scale_type, plan.scale_shape), std::nullopt, std::nullopt};
            if (plan.has_zero_point)
                out.zero_point = Array::borrow(zero.data(), plan.zero_point_type, plan.scale_shape);
            if (plan.has_global_scale) out.global_scale = Array::borrow(global.data(), DType::float32, {});
            cast_into(Array::borrow(x.data(), DType::float32, {3, cols}), recipe, out);
            const ScaledTensor scaled(
                out.data, out.scale, recipe, recipe.layout,
                {.zero_point = out.zero_point, .global_scale = out.global_scale, .shape = Shape{3, cols}});
            dequantize_into(scaled, Array::borrow(y.data(), DType::float32, {3, cols}));
            const Array product = matmul(scaled, scaled.transposed());
            EXPECT_EQ(product.shape, (Shape{3, 3}));
        }
    }
}
#endif

TEST(Threads, ResultsDoNotDependOnTheirNumber) {
    std::vector<float> x = heavy_tailed(512, 512);
    for (const Recipe& recipe : all_recipes()) {
        set_num_threads(1);
        const ScaledTensor one = cast(array_of(x, {512, 512}), recipe);
        const Array y_one = matmul(one, one.transposed());
        set_num_threads(3);
        const ScaledTensor three = cast(array_of(x, {512, 512}), recipe);
        EXPECT_TRUE(same_bytes(one.data(), three.data())) << describe(recipe);
        EXPECT_TRUE(same_bytes(one.scale(), three.scale())) << describe(recipe);
        EXPECT_TRUE(same_bytes(y_one, matmul(three, three.transposed()))) << describe(recipe);
    }
    message_of(Error::Kind::value, [] { set_num_threads(0); });
    set_num_threads(1);
}

}  // namespace
}  // namespace breccia
