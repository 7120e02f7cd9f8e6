// SPDX-License-Identifier: Apache-2.0
//
// Every matmul kernel of every backend this machine can run, against float64: lengths around the vectors', operands
// that end where their memory ends, one code per byte, both precisions, prepared weights.
#include <memory>

#include "matmul/product.hpp"
#include "support.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define BRECCIA_GUARD_PAGES 1
#endif

namespace breccia {
namespace {

// Memory whose last byte is followed by a page that cannot be touched, at any alignment; or whose first byte follows
// one.
class Guarded {
public:
    enum class Side : bool { before, after };
    explicit Guarded(std::size_t bytes, Side side = Side::after) {
#ifdef BRECCIA_GUARD_PAGES
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        size_ = (bytes + page - 1) / page * page + 2 * page;
        base_ =
            static_cast<std::byte*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(base_, page, PROT_NONE);
        mprotect(base_ + size_ - page, page, PROT_NONE);
        data_ = side == Side::before ? base_ + page : base_ + size_ - page - bytes;
#else
        static_cast<void>(side);
        base_ = data_ = new std::byte[bytes + 1];
#endif
    }
    ~Guarded() {
#ifdef BRECCIA_GUARD_PAGES
        munmap(base_, size_);
#else
        delete[] base_;
#endif
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] Array array(ElementType type, Shape shape) const {
        return Array::borrow(data_, type, std::move(shape));
    }

private:
    [[maybe_unused]] std::size_t size_ = 0;  // of what is mapped
    std::byte *base_ = nullptr, *data_ = nullptr;
};

Array copy_to(std::vector<std::unique_ptr<Guarded>>& memory, const Array& from, Guarded::Side side) {
    const std::size_t bytes = static_cast<std::size_t>(from.size()) * from.type.size();
    memory.push_back(std::make_unique<Guarded>(bytes, side));
    std::memcpy(memory.back()->data(), from.data, bytes);
    return memory.back()->array(from.type, from.shape);
}

// The same tensor in guarded memory.
ScaledTensor guarded(std::vector<std::unique_ptr<Guarded>>& memory, const ScaledTensor& w, Guarded::Side side) {
    Extras extras{.zero_point = std::nullopt,
                  .global_scale = w.global_scale(),
                  .shape = w.shape(),
                  .original_dtype = w.original_dtype()};
    if (w.zero_point()) extras.zero_point = copy_to(memory, *w.zero_point(), side);
    return {copy_to(memory, w.data(), side), copy_to(memory, w.scale(), side), w.recipe(), w.layout(),
            std::move(extras)};
}

std::vector<float> numbers_of(const Array& array) {
    std::vector<float> x;
    const auto* bytes = array.as<const std::byte>();
    for (std::int64_t i = 0; i < array.size(); ++i) {
        const std::byte* p = bytes + i * static_cast<std::int64_t>(array.type.size());
        std::uint32_t word = 0;
        std::memcpy(&word, p, array.type.size());
        const auto half = static_cast<std::uint16_t>(word);
        x.push_back(array.type.dtype() == DType::float32   ? float_from_bits(word)
                    : array.type.dtype() == DType::float16 ? to_float(Float16{half})
                                                           : to_float(BFloat16{half}));
    }
    return x;
}

double bound(std::int64_t k) {
    return (static_cast<double>(std::min<std::int64_t>(k, 256)) + static_cast<double>(k) / 8 + 8) *
           std::ldexp(1.0, -24);
}

void expect_close(const Array& product, const ExactProduct& reference, double relative) {
    const auto* y = product.as<const float>();
    for (std::size_t i = 0; i < reference.product.size(); ++i)
        ASSERT_LE(std::abs(static_cast<double>(y[i]) - reference.product[i]), relative * reference.size[i] + 1e-30)
            << "element " << i;
}

std::int64_t block_of(const Recipe& recipe) {
    return recipe.layout.kind == LayoutKind::per_block_k || recipe.layout.kind == LayoutKind::per_block_mn
               ? recipe.layout.block_n
               : 0;
}

// Extents of K that a recipe allows, around the steps and panels of the kernels.
std::vector<std::int64_t> lengths(const Recipe& recipe) {
    if (const std::int64_t block = block_of(recipe); block > 0) return {block, 3 * block, 256 + block};
    return {1, 2, 15, 31, 63, 64, 65, 127, 129, 191, 257, 300};
}

class Backends : public testing::TestWithParam<std::string> {};

TEST_P(Backends, MatmulOfEveryRecipe) {
    const BackendScope scope(GetParam());
    unsigned seed = 0;
    Sample cases;
    for (const Recipe& recipe : all_recipes())
        for (const std::int64_t k : lengths(recipe))
            for (const std::int64_t m : {1, 2, 3, 5, 8, 16, 17, 33}) {
                const std::int64_t n = std::vector<std::int64_t>{1, 7, 16, 97, 200}[++seed % 5];
                if (!cases.takes()) continue;
                SCOPED_TRACE(describe(recipe) + " m=" + std::to_string(m) + " n=" + std::to_string(n) +
                             " k=" + std::to_string(k));
                std::vector<float> x = heavy_tailed(m, k, seed, 1), w = heavy_tailed(n, k, seed + 1, 1);
                std::vector<std::unique_ptr<Guarded>> memory;
                const auto side = seed / 5 % 2 == 0 ? Guarded::Side::before : Guarded::Side::after;
                const ScaledTensor b = guarded(memory, cast(array_of(w, {n, k}), recipe), side);
                const PreparedWeight prepared = PreparedWeight(b).transposed();
                const std::vector<float> b_values = to_vector(dequantize(b));

                // float32, float16 and bfloat16 numbers, and codes.
                for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
                    const Array a = copy_to(memory, rounded(x, dtype, {m, k}), side);
                    const std::vector<float> a_values = numbers_of(a);
                    const ExactProduct reference = exact_product(a_values, b_values, m, n, k);
                    Guarded result(static_cast<std::size_t>(4 * m * n), side);
                    const Array y = result.array(DType::float32, {m, n});
                    matmul_into(a, b.transposed(), y);
                    expect_close(y, reference, bound(k));
                    matmul_into(a, b.transposed(), y, Precision::fast);
                    expect_close(y, reference, bound(k) + std::ldexp(1.0, -8));
                    matmul_into(a, prepared, y);
                    expect_close(y, reference, bound(k));
                    matmul_into(a, prepared, y, Precision::fast);
                    expect_close(y, reference, bound(k) + std::ldexp(1.0, -8));
                    if (HasFatalFailure()) return;
                }
                const ScaledTensor a = guarded(memory, cast(array_of(x, {m, k}), recipe), side);
                const ExactProduct reference = exact_product(to_vector(dequantize(a)), b_values, m, n, k);
                expect_close(matmul(a, b.transposed()), reference, bound(k));
                expect_close(matmul(a, prepared), reference, bound(k));
                if (HasFatalFailure()) return;
            }
}

// Activations in codes keep their scales apart where their blocks and the weight's suit each other.
TEST_P(Backends, MatmulOfCodesByCodes) {
    const BackendScope scope(GetParam());
    using namespace std::string_literals;
    std::vector<Recipe> weights = all_recipes();
    for (const std::int64_t group : {32, 512})
        weights.push_back(make_recipe("INT4Scaling", {{"group_size", group}, {"signed", false}, {"symmetric", false}}));
    // Powers of two over blocks that the activations' do not divide.
    for (const std::int64_t block : {64, 128, 768})
        for (const std::int64_t rows : {1, 32})
            weights.push_back(
                make_recipe("Float8BlockScaling", {{"block_k", block}, {"block_m", rows}, {"scale_format", "e8m0"s}}));
    constexpr std::int64_t n = 37, k = 1536;
    std::vector<float> w = heavy_tailed(n, k, 1, 1);
    Sample cases;
    for (const Recipe& activations :
         {make_recipe("Float8BlockScaling"), make_recipe("Float8BlockScaling", {{"block_k", 96}}),
          make_recipe("Float8CurrentScaling", {{"granularity", "row"s}}), make_recipe("INT8Scaling"),
          make_recipe("MXFP8BlockScaling"), make_recipe("NVFP4BlockScaling")})
        for (const std::int64_t m : {1, 5, 16, 21}) {
            std::vector<float> x = heavy_tailed(m, k, 2, 1);
            const ScaledTensor a = cast(array_of(x, {m, k}), activations);
            const std::vector<float> a_values = to_vector(dequantize(a));
            for (const Recipe& recipe : weights) {
                if (!cases.takes()) continue;
                SCOPED_TRACE(describe(activations) + " by " + describe(recipe) + " m=" + std::to_string(m));
                const ScaledTensor b = cast(array_of(w, {n, k}), recipe);
                const ExactProduct reference = exact_product(a_values, to_vector(dequantize(b)), m, n, k);
                expect_close(matmul(a, b.transposed()), reference, bound(k));
                expect_close(matmul(a, PreparedWeight(b).transposed()), reference, bound(k));
                if (HasFatalFailure()) return;
            }
        }
}

// One zero point to a row that is no power of two long, or to many elements.
TEST_P(Backends, MatmulOfWeightsWithOneZeroPointToARow) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 37;
    for (const std::int64_t k : {6, 48, 100, 160, 300, 768})
        for (const std::int64_t m : {1, 3, 16, 40}) {
            SCOPED_TRACE("k=" + std::to_string(k) + " m=" + std::to_string(m));
            std::vector<float> x = heavy_tailed(m, k, 1, 1), w = heavy_tailed(n, k, 2, 1);
            const ScaledTensor b =
                cast(array_of(w, {n, k}),
                     make_recipe("INT4Scaling", {{"group_size", k}, {"signed", false}, {"symmetric", false}}));
            const Array a = rounded(x, DType::bfloat16, {m, k});
            const ExactProduct reference = exact_product(numbers_of(a), to_vector(dequantize(b)), m, n, k);
            expect_close(matmul(a, b.transposed()), reference, bound(k));
            expect_close(matmul(a, PreparedWeight(b).transposed()), reference, bound(k));
        }
}

TEST_P(Backends, MatmulReadsAnyOrder) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t m = 19, n = 33, k = 256;
    std::vector<float> x = heavy_tailed(k, m, 1, 1), w = heavy_tailed(k, n, 2, 1);
    for (const Recipe& recipe : {make_recipe("Float8CurrentScaling"), make_recipe("INT8Scaling")}) {
        // (K, N) scaled along N, and activations whose K runs across memory.
        const ScaledTensor b = cast(array_of(w, {k, n}), recipe);
        const Array a = array_of(x, {k, m}).transposed();
        const std::vector<float> values = to_vector(dequantize(b));
        std::vector<float> a_rows, b_rows;
        for (std::int64_t i = 0; i < m; ++i)
            for (std::int64_t l = 0; l < k; ++l) a_rows.push_back(x[static_cast<std::size_t>(l * m + i)]);
        for (std::int64_t j = 0; j < n; ++j)
            for (std::int64_t l = 0; l < k; ++l) b_rows.push_back(values[static_cast<std::size_t>(l * n + j)]);
        expect_close(matmul(a, b), exact_product(a_rows, b_rows, m, n, k), bound(k));
        expect_close(matmul(a, PreparedWeight(b)), exact_product(a_rows, b_rows, m, n, k), bound(k));
    }
}

// Row i of w is what `decode` makes of code i, then zeros: so is its product with 1, 0, 0, ...
void expect_decoded(const ScaledTensor& w, std::int64_t codes, std::int64_t k, float (*decode)(std::uint8_t)) {
    const PreparedWeight prepared(w);
    for (const std::int64_t m : {1, 3, 16, 20}) {
        Array a = Array::allocate(DType::bfloat16, {m, k});
        for (std::int64_t i = 0; i < m * k; ++i) a.as<BFloat16>()[i] = to_bfloat16(i % k == 0 ? 1.0F : 0.0F);
        for (const Array& product : {matmul(a, w.transposed()), matmul(a, prepared.transposed())}) {
            const std::vector<float> y = to_vector(product);
            for (std::int64_t i = 0; i < m * codes; ++i) {
                const float expected = decode(static_cast<std::uint8_t>(i % codes)),
                            got = y[static_cast<std::size_t>(i)];
                ASSERT_TRUE(is_nan(expected) ? is_nan(got) : got == expected)
                    << w.recipe().name << " code " << i % codes << " m=" << m << " gave " << got;
            }
        }
    }
}

// Codes that are not numbers, at the ends of the exponent range and zero.
TEST_P(Backends, MatmulDecodesEveryCode) {
    const BackendScope scope(GetParam());
    for (std::size_t f = 0; f < format_table.size(); ++f) {
        const auto format = static_cast<Format>(f);
        if (info(format).family == CodecFamily::exponent) continue;
        Recipe recipe = make_recipe("Float8CurrentScaling");
        recipe.element = format;
        const std::int64_t codes = std::int64_t{1} << info(format).bits, k = is_packed(format) ? 2 : 1;
        // One code to a row: (codes, 1), or packed beside a zero.
        Array data = Array::allocate(ElementType::uint8(), {codes, 1});
        for (std::int64_t i = 0; i < codes; ++i) data.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i);
        Array scale = Array::allocate(DType::float32, {});
        *scale.as<float>() = 1;
        const ScaledTensor w(data, scale, recipe, Layout::per_tensor(),
                             {.zero_point = {}, .global_scale = {}, .shape = Shape{codes, k}});
        expect_decoded(w, codes, k, info(format).decode);
    }
}

// Codes that arithmetic does not decode, in no, some and all blocks of a row. Prepared weights are told where they are,
// plain ones notice them, and both sum up in the same order.
TEST_P(Backends, MatmulOfOneActivationByPreparedSpecialCodes) {
    const BackendScope scope(GetParam());
    constexpr std::uint8_t one = 56, special[] = {0x00, 0x80, 0x03, 0x87, 0x7F, 0xFF};
    constexpr std::int64_t members = 2, n = 23;
    for (const std::int64_t block : {32, 64, 128, 256})
        for (const std::int64_t blocks : {1, 3, 8}) {
            const std::int64_t k = blocks * block;
            const Recipe recipe = block == 32 ? make_recipe("MXFP8BlockScaling")
                                              : make_recipe("Float8BlockScaling", {{"block_k", block}});
            Array data = Array::allocate(ElementType::uint8(), {members, n, k});
            auto* codes = data.as<std::uint8_t>();
            for (std::int64_t i = 0; i < data.size(); ++i)
                codes[i] = static_cast<std::uint8_t>(one + i * 7 % 31 + (i % 3 == 0 ? 128 : 0));
            for (std::int64_t i = 0; i < std::ssize(special); ++i) {
                codes[3 * i * k + (11 + 61 * i) % k] = special[i];
                codes[(n + 2 * i) * k + k - 1 - i] = special[i];
            }
            std::fill_n(codes + (members * n - 1) * k, k, std::uint8_t{0});
            const Shape grid{members, n, blocks};
            Array scale = Array::allocate(block == 32 ? ElementType::uint8() : ElementType(DType::float32), grid);
            for (std::int64_t i = 0; i < scale.size(); ++i) {
                if (block == 32)
                    scale.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(120 + i % 9);
                else
                    scale.as<float>()[i] = 0.01F * static_cast<float>(1 + i % 9);
            }
            const ScaledTensor w(data, scale, recipe, Layout::per_block_k(block));
            const Array a = rounded(heavy_tailed(members, k, 5, 1), DType::bfloat16, {members, 1, k});
            const auto product = [&](const Operand& b) {  // by one path, whichever is the quicker for either
                const Array out = Array::allocate(DType::float32, {members, 1, n});
                if (!multiply_by("in_place_bf16", a, b, out)) matmul_into(a, b, out);
                return to_vector(out);
            };
            const std::vector<float> plain = product(w.transposed()),
                                     prepared = product(PreparedWeight(w).transposed());
            ASSERT_EQ(std::memcmp(plain.data(), prepared.data(), plain.size() * sizeof(float)), 0)
                << describe(recipe) << " k=" << k;
            EXPECT_TRUE(is_nan(prepared[12]) && is_nan(prepared[n + 10]) && !is_nan(prepared[11]));
            EXPECT_EQ(prepared.back(), 0.0F);
        }
}

// The codes of scales that go into 4-bit codes, and one in the place of others.
constexpr std::uint8_t e4m3_one = 56, e8m0_one = 127;
std::uint8_t ordinary_e4m3(std::uint8_t code) { return code < 0x7F ? code : e4m3_one; }
std::uint8_t ordinary_e8m0(std::uint8_t code) { return code >= 127 - 60 && code <= 127 + 60 ? code : e8m0_one; }

// Scales that are codes: negative ones, NaN, zero, subnormal; and those alone that kernels put into the weight's codes.
TEST_P(Backends, MatmulDecodesEveryScale) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t codes = 256, k = 96;
    constexpr std::uint8_t one = 2;  // E2M1
    struct Case {
        bool e8m0;
        std::uint8_t (*scale_of_row)(std::uint8_t);
        float (*decode)(std::uint8_t);
    };
    const Case cases[] = {
        {true, [](std::uint8_t row) { return row; }, Float8E8M0FNU::decode},
        {false, [](std::uint8_t row) { return row; }, Float8E4M3FN::decode},
        {true, ordinary_e8m0, [](std::uint8_t row) { return Float8E8M0FNU::decode(ordinary_e8m0(row)); }},
        {false, ordinary_e4m3, [](std::uint8_t row) { return Float8E4M3FN::decode(ordinary_e4m3(row)); }},
    };
    for (const auto& [e8m0, scale_of_row, decode] : cases) {
        const Recipe recipe =
            e8m0 ? make_recipe("MXFP4BlockScaling") : make_recipe("NVFP4BlockScaling", {{"two_level", false}});
        const std::int64_t block = e8m0 ? 32 : 16, blocks = k / block;
        Array data = Array::allocate(ElementType::uint8(), {codes, k / 2});
        std::fill_n(data.as<std::uint8_t>(), data.size(), std::uint8_t{0});
        Array scale = Array::allocate(ElementType::uint8(), {codes, blocks});
        for (std::int64_t i = 0; i < codes; ++i) {
            data.as<std::uint8_t>()[i * k / 2] = one;
            // The other blocks' scales are ordinary, so that rows differ in what is special of them.
            std::fill_n(scale.as<std::uint8_t>() + i * blocks, blocks, e8m0 ? e8m0_one : e4m3_one);
            scale.as<std::uint8_t>()[i * blocks] = scale_of_row(static_cast<std::uint8_t>(i));
        }
        expect_decoded(ScaledTensor(data, scale, recipe, Layout::per_block_k(block)), codes, k, decode);
    }
}

// Results of another type are the float32 ones rounded to nearest: zeros, subnormal numbers, infinities and NaNs, too.
TEST_P(Backends, MatmulRoundsResults) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t k = 256;
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    for (const int exponent : {0, -100, 98})
        for (const std::int64_t n : {32, 97, 208, 384})
            for (const std::int64_t m : {1, 4, 16, 33, 80}) {
                SCOPED_TRACE("2^" + std::to_string(exponent) + " n=" + std::to_string(n) + " m=" + std::to_string(m));
                std::vector<float> x = heavy_tailed(m, k, 5, 1), numbers = heavy_tailed(n, k, 7, 1);
                for (float& value : x) value = std::ldexp(value, exponent);
                for (float& value : numbers) value = std::ldexp(value, exponent / 4);
                std::fill_n(x.begin() + m / 2 * k, k, 0.0F);
                std::fill_n(numbers.begin() + n / 2 * k, k, 0.0F);
                numbers[static_cast<std::size_t>((n - 1) * k)] = nan;
                const Array a = rounded(x, DType::bfloat16, {m, k});
                const ScaledTensor w = cast(array_of(numbers, {n, k}), make_recipe("Float8BlockScaling")).transposed();
                const std::vector<float> exact = to_vector(matmul(a, w));
                for (const DType dtype : {DType::bfloat16, DType::float16}) {
                    const Guarded result(static_cast<std::size_t>(2 * m * n));
                    const Array y = result.array(dtype, {m, n});
                    matmul_into(a, w, y);
                    const Array expected = rounded(exact, dtype, {m, n});
                    const auto *got = y.as<const std::uint16_t>(), *wanted = expected.as<const std::uint16_t>();
                    for (std::int64_t i = 0; i < m * n; ++i)
                        ASSERT_EQ(got[i], wanted[i])
                            << name_of(dtype) << " of " << exact[static_cast<std::size_t>(i)] << " at " << i;
                }
            }
}

// Blocks of a few and of many elements, shared by rows, at the ends of a float's range; bfloat16 activations as large
// and as small as the bfloat16 kernels take, and beyond.
TEST_P(Backends, MatmulOfAnyMagnitude) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 37, k = 1024;
    Sample cases;
    for (const std::int64_t block : {16, 32, 64, 128, 256, 512, 1024})
        for (const std::int64_t block_m : {1, 128})
            for (const int exponent : {-96, 0, 90, 110}) {
                if (!cases.takes()) continue;
                const Recipe recipe = make_recipe("Float8BlockScaling", {{"block_k", block}, {"block_m", block_m}});
                std::vector<float> numbers = heavy_tailed(n, k, 7, 1);
                const ScaledTensor w = cast(array_of(numbers, {n, k}), recipe);
                const std::vector<float> values = to_vector(dequantize(w));
                for (const std::int64_t m : {1, 4, 16, 40}) {
                    std::vector<float> x = heavy_tailed(m, k, 9, 1);
                    for (float& value : x) value = std::ldexp(value, exponent);
                    const Array a = rounded(x, DType::bfloat16, {m, k});
                    const ExactProduct reference = exact_product(numbers_of(a), values, m, n, k);
                    SCOPED_TRACE(describe(recipe) + " m=" + std::to_string(m) + " 2^" + std::to_string(exponent));
                    expect_close(matmul(a, w.transposed()), reference, bound(k));
                    expect_close(matmul(a, PreparedWeight(w).transposed()), reference, bound(k));
                    if (HasFatalFailure()) return;
                }
            }
}

// 4-bit codes with scales in them by activations at the ends of what their kernels take, every code and sign in play.
TEST_P(Backends, MatmulOfPackedCodesOfAnyMagnitude) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 37, k = 304;
    for (const Recipe& recipe : {make_recipe("NVFP4BlockScaling"), make_recipe("MXFP4BlockScaling")}) {
        const std::int64_t length = k / block_of(recipe) * block_of(recipe);
        std::vector<float> numbers = heavy_tailed(n, length, 7, 1);
        const ScaledTensor w = cast(array_of(numbers, {n, length}), recipe);
        const std::vector<float> values = to_vector(dequantize(w));
        const PreparedWeight prepared(w);
        for (const int exponent : {-96, -44, -37, 0, 31, 38, 90, 110})
            for (const std::int64_t m : {3, 5, 16})
                for (const DType type : {DType::bfloat16, DType::float32}) {
                    std::vector<float> x = heavy_tailed(m, length, 9, 0.5F);
                    for (float& value : x) value = std::ldexp(value, exponent);
                    const Array a = rounded(x, type, {m, length});
                    const ExactProduct reference = exact_product(numbers_of(a), values, m, n, length);
                    SCOPED_TRACE(describe(recipe) + " m=" + std::to_string(m) + " 2^" + std::to_string(exponent));
                    expect_close(matmul(a, w.transposed()), reference, bound(length));
                    expect_close(matmul(a, prepared.transposed()), reference, bound(length));
                    if (HasFatalFailure()) return;
                }
    }
}

// Products of integers take activations whose digits are many or few, and leave the rest to other kernels.
TEST_P(Backends, MatmulOfOneActivationByIntegers) {
    const BackendScope scope(GetParam());
    using namespace std::string_literals;
    constexpr std::int64_t n = 21;
    struct Case {
        Recipe recipe;
        std::int64_t k = 768;
    };
    const std::vector<Case> cases = {
        // One block and one scale to a row.
        {make_recipe("INT4Scaling", {{"signed", false}, {"symmetric", false}, {"group_size", std::int64_t{32}}}), 32},
        {make_recipe("INT4Scaling")},
        {make_recipe("INT4Scaling", {{"group_size", std::int64_t{32}}})},
        {make_recipe("INT4Scaling", {{"signed", false}, {"symmetric", false}})},
        {make_recipe("INT4Scaling", {{"signed", false}, {"symmetric", false}, {"group_size", std::int64_t{256}}})},
        {make_recipe("INT8Scaling")},
        {make_recipe("MXFP4BlockScaling")},
        {make_recipe("NVFP4BlockScaling")},
        {make_recipe("NVFP4BlockScaling", {{"two_level", false}})},
        {make_recipe("MXFP6BlockScaling", {{"fp6_format", "E2M3"s}})}};
    // How far the smallest elements of some runs of 16 are below the largest of every 128, and where those are: at most
    // twice as large, or as near to that as bfloat16 comes.
    Sample sample;
    for (const auto& [recipe, k] : cases)
        for (const int top : {-110, -60, 0, 25, 60, 99, 115})
            for (const int spread : {0, 9, 13, 20, 30, 44, 60})
                for (const std::int64_t m : {1, 2}) {
                    if (!sample.takes()) continue;
                    std::vector<float> x = heavy_tailed(m, k, 3, 1), w = heavy_tailed(n, k, 4, 1);
                    for (std::size_t i = 0; i < x.size(); ++i) {
                        const int below = i % 5 == 0 && i / 16 % 2 == 0 && i % 384 < 128 ? spread : 0;
                        x[i] = i % 384 >= 256 ? 0.0F : std::ldexp(std::remainder(x[i], 2.0F) + 1, top - below);
                        if (i % 256 == 7 || i % 256 == 8) x[i] = std::ldexp(i % 2 == 0 ? 255.0F : -255.0F, top - 7);
                    }
                    const ScaledTensor b = cast(array_of(w, {n, k}), recipe);
                    const PreparedWeight prepared = PreparedWeight(b).transposed();
                    const std::vector<float> values = to_vector(dequantize(b));
                    for (const DType dtype : {DType::float32, DType::bfloat16}) {
                        SCOPED_TRACE(describe(recipe) + " 2^" + std::to_string(top) + " spread " +
                                     std::to_string(spread) + " m=" + std::to_string(m));
                        const Array a = rounded(x, dtype, {m, k});
                        const ExactProduct reference = exact_product(numbers_of(a), values, m, n, k);
                        expect_close(matmul(a, b.transposed()), reference, bound(k));
                        expect_close(matmul(a, prepared), reference, bound(k));
                        if (HasFatalFailure()) return;
                    }
                }
}

// The smallest code and scale, subnormal or not, by the smallest of the numbers that digits hold together with the
// largest, which meets zeros.
TEST_P(Backends, MatmulOfOneActivationBySmallestScale) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 16, k = 128, blocks = k / 16;
    const Array data = Array::allocate(ElementType::uint8(), {n, k / 2}),
                scale = Array::allocate(ElementType::uint8(), {n, blocks}),
                a = Array::allocate(DType::bfloat16, {1, k});
    std::fill_n(a.as<BFloat16>(), k, to_bfloat16(0.0F));
    for (const std::uint8_t least : {std::uint8_t{1}, std::uint8_t{8}}) {
        std::fill_n(data.as<std::uint8_t>(), data.size(), std::uint8_t{0});
        std::fill_n(scale.as<std::uint8_t>(), scale.size(), e4m3_one);
        for (std::int64_t i = 0; i < n; ++i) {  // 2^-1 and 2^-9 or 2^-6 for element 16
            data.as<std::uint8_t>()[i * k / 2 + 8] = 1;
            scale.as<std::uint8_t>()[i * blocks + 1] = least;
        }
        const ScaledTensor w(data, scale, make_recipe("NVFP4BlockScaling", {{"two_level", false}}),
                             Layout::per_block_k(16));
        for (const int top : {0, -20, 17, 30})
            for (const int below : {10, 20, 30, 36, 43, 50}) {
                a.as<BFloat16>()[0] = to_bfloat16(std::ldexp(1.0F, top));
                a.as<BFloat16>()[16] = to_bfloat16(std::ldexp(1.0F, top - below));
                for (const Array& product : {matmul(a, w.transposed()), matmul(a, PreparedWeight(w).transposed())})
                    for (const float y : to_vector(product))
                        EXPECT_EQ(y, std::ldexp(1.0F, top - below - (least == 1 ? 10 : 7)))
                            << "2^" << top << " over 2^" << below;
            }
    }
}

// The largest codes and scales by large numbers, also where a subnormal scale among them keeps kernels from taking them
// without their bias.
TEST_P(Backends, MatmulOfOneActivationByLargestScales) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 16, k = 4096, blocks = k / 16;
    constexpr std::uint8_t most = 0x7E, subnormal = 1;
    for (const bool bytes : {false, true})
        for (const bool mixed : {false, true}) {
            Recipe recipe = make_recipe("NVFP4BlockScaling", {{"two_level", false}});
            if (bytes) recipe.element = format_of<Int8>;
            const Array data = Array::allocate(ElementType::uint8(), {n, bytes ? k : k / 2}),
                        scale = Array::allocate(ElementType::uint8(), {n, blocks}),
                        a = Array::allocate(DType::bfloat16, {1, k});
            std::fill_n(data.as<std::uint8_t>(), data.size(), bytes ? std::uint8_t{0x7F} : std::uint8_t{0x77});
            std::fill_n(scale.as<std::uint8_t>(), scale.size(), most);
            for (std::int64_t i = 0; mixed && i < n; ++i) scale.as<std::uint8_t>()[i * blocks + i] = subnormal;
            const ScaledTensor w(data, scale, recipe, Layout::per_block_k(16));
            const std::vector<float> values = to_vector(dequantize(w));
            for (const int top : {17, 18, 30, 60, 90}) {
                std::fill_n(a.as<BFloat16>(), k, to_bfloat16(std::ldexp(1.9921875F, top)));
                const ExactProduct reference = exact_product(numbers_of(a), values, 1, n, k);
                SCOPED_TRACE(describe(recipe) + " 2^" + std::to_string(top) + (mixed ? " mixed" : ""));
                expect_close(matmul(a, w.transposed()), reference, bound(k));
                expect_close(matmul(a, PreparedWeight(w).transposed()), reference, bound(k));
                if (HasFatalFailure()) return;
            }
        }
}

// Sums of small integers are exact, also where codes and activations are at the ends of their ranges; weights that
// cancel leave nothing behind.
TEST_P(Backends, MatmulOfIntegersIsExact) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 16, k = 256;
    for (const char* name : {"INT8", "INT4", "UINT4"}) {
        const bool bytes = name == std::string("INT8"), is_signed = name != std::string("UINT4");
        Recipe recipe = make_recipe("Float8CurrentScaling");
        recipe.element = bytes ? format_of<Int8> : is_signed ? format_of<Int4> : format_of<UInt4>;
        for (const int pattern : {0, 1, 2}) {
            Array data = Array::allocate(ElementType::uint8(), {n, bytes ? k : k / 2});
            for (std::int64_t i = 0; i < data.size(); ++i)  // the least code, the greatest, or both in turn
                data.as<std::uint8_t>()[i] =
                    static_cast<std::uint8_t>(bytes ? (pattern == 0 || (pattern == 2 && i % 2 == 0) ? 0x80 : 0x7F)
                                              : pattern == 0 ? 0x88
                                              : pattern == 1 ? 0x77
                                                             : 0xF8);
            Array scale = Array::allocate(DType::float32, {});
            *scale.as<float>() = 1;
            const ScaledTensor w(data, scale, recipe, Layout::per_tensor(),
                                 {.zero_point = {}, .global_scale = {}, .shape = Shape{n, k}});
            const std::vector<float> values = to_vector(dequantize(w));
            for (const float x : {255.0F, -255.0F, 1.0F}) {
                Array a = Array::allocate(DType::float32, {1, k});
                // Of two signs too: k / 2 products cancel the others.
                for (const bool cancel : {false, true}) {
                    for (std::int64_t i = 0; i < k; ++i) a.as<float>()[i] = cancel && i >= k / 2 ? -x : x;
                    const ExactProduct reference = exact_product(to_vector(a), values, 1, n, k);
                    for (const Array& y : {matmul(a, w.transposed()), matmul(a, PreparedWeight(w).transposed())})
                        for (std::int64_t i = 0; i < n; ++i)
                            ASSERT_EQ(y.as<const float>()[i],
                                      static_cast<float>(reference.product[static_cast<std::size_t>(i)]))
                                << name << " pattern " << pattern << " x " << x << " cancel " << cancel;
                }
            }
        }
    }
}

// Codes that a quick decode has to leave to another one, among ordinary ones and in any place.
TEST_P(Backends, MatmulOfSpecialCodesAmongOthers) {
    const BackendScope scope(GetParam());
    constexpr std::int64_t n = 256, block = 128;
    for (const std::int64_t k : {384, 330})
        for (const bool one_scale : {false, true}) {
            if (!one_scale && k % block != 0) continue;
            Array data = Array::allocate(ElementType::uint8(), {n, k});
            for (std::int64_t i = 0; i < data.size(); ++i)
                data.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(0x30 + i * 7 % 16);
            for (std::int64_t i = 0; i < n; ++i)
                data.as<std::uint8_t>()[i * k + i * 3 % k] = static_cast<std::uint8_t>(i);
            Array scale = Array::allocate(DType::float32, one_scale ? Shape{} : Shape{n, k / block});
            for (std::int64_t i = 0; i < scale.size(); ++i) scale.as<float>()[i] = 0.5F + static_cast<float>(i % 3);
            const ScaledTensor w =
                one_scale ? ScaledTensor(data, scale, make_recipe("Float8CurrentScaling"), Layout::per_tensor())
                          : ScaledTensor(data, scale, make_recipe("Float8BlockScaling"), Layout::per_block_k(block));
            const PreparedWeight prepared = PreparedWeight(w).transposed();
            const std::vector<float> values = to_vector(dequantize(w));
            for (const std::int64_t m : {1, 2, 4, 8}) {
                const Array a = rounded(heavy_tailed(m, k, 5, 1), DType::bfloat16, {m, k});
                const ExactProduct reference = exact_product(numbers_of(a), values, m, n, k);
                for (const Array& y : {matmul(a, w.transposed()), matmul(a, prepared)})
                    for (std::int64_t i = 0; i < m * n; ++i) {
                        const auto at = static_cast<std::size_t>(i);
                        const float got = y.as<const float>()[i];
                        if (std::isnan(reference.product[at]))
                            ASSERT_TRUE(is_nan(got)) << "m=" << m << " row " << i % n;
                        else
                            ASSERT_LE(std::abs(static_cast<double>(got) - reference.product[at]),
                                      bound(k) * reference.size[at])
                                << "m=" << m << " k=" << k << " row " << i % n;
                    }
            }
        }
}

INSTANTIATE_TEST_SUITE_P(Every, Backends, testing::ValuesIn(cpu_info().supported),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace breccia
