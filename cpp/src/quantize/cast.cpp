// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>

#include "breccia/formats.hpp"
#include "breccia/ops.hpp"
#include "contract/random.hpp"
#include "quantize/quantizer.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

class NumberSource final : public RowSource {
public:
    NumberSource(const Call& call, const Array& x) : RowSource(call), x_(x), batch_(batch_shape(x.shape)) {}

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override {
        return number_matrix(x_, -1, batch_, matrix).read(kernels(), row, begin, n, scratch.values);
    }

private:
    const Array& x_;
    Shape batch_;
};

// Rows of another source, each block of which is x · diag(signs) · H / √block. The sign of element i of a block follows
// from the seed and i.
class HadamardSource final : public RowSource {
public:
    // `block` is a power of two that divides the columns.
    HadamardSource(const RowSource& source, std::int64_t block, std::uint64_t seed)
        : RowSource(source.call()), source_(source), block_(block), signs_(static_cast<std::size_t>(block)) {
        const RandomKey key(seed, RandomStream::signs);
        for (std::uint32_t i = 0; i < signs_.size(); ++i) signs_[i] = key.bits(i) >> 31 == 0 ? 1.0F : -1.0F;
    }

    const float* read(std::int64_t matrix, std::int64_t row, std::int64_t begin, std::int64_t n,
                      Scratch& scratch) const override {
        const std::int64_t first = begin - begin % block_;
        const std::int64_t last = begin + n + (block_ - (begin + n) % block_) % block_;
        const float* x = source_.read(matrix, row, first, last - first, scratch);
        if (scratch.transformed.size() < static_cast<std::size_t>(last - first))
            scratch.transformed.resize(static_cast<std::size_t>(last - first));
        float* out = scratch.transformed.data();
        const auto unit = static_cast<float>(1 / std::sqrt(static_cast<double>(block_)));
        for (std::int64_t at = 0; at < last - first; at += block_) {
            for (std::int64_t i = 0; i < block_; ++i) out[at + i] = x[at + i] * signs_[static_cast<std::size_t>(i)];
            transform(out + at, block_);
            for (std::int64_t i = 0; i < block_; ++i) out[at + i] *= unit;
        }
        return out + (begin - first);
    }

private:
    // In place; the order of the sums is part of the definition.
    static void transform(float* x, std::int64_t block) {
        for (std::int64_t half = 1; half < block; half *= 2)
            for (std::int64_t pair = 0; pair < block; pair += 2 * half)
                for (std::int64_t i = pair; i < pair + half; ++i) {
                    const float low = x[i], high = x[i + half];
                    x[i] = low + high;
                    x[i + half] = low - high;
                }
    }

    const RowSource& source_;
    std::int64_t block_;
    std::vector<float> signs_;
};

void check_options(const CastOptions& options, const Recipe& recipe) {
    if (options.factor && recipe.layout.kind != LayoutKind::per_tensor)
        throw_value("factor needs a recipe of one scale per tensor, got ", recipe.name);
    if (options.square_blocks && !has_blocks_of_rows(recipe.layout))
        throw_value("square_blocks needs a recipe whose blocks lie along rows, got ", recipe.name);
    if (options.square_blocks && recipe.is_expanded())
        throw_value("square_blocks needs a recipe without exponents, got ", recipe.name);
}

// Importance belongs to columns and chooses scales: refuses options that mix columns or give scales.
void check_importance(const CastOptions& options, const Recipe& recipe) {
    if (!options.importance) return;
    if (recipe.is_expanded()) throw_value("importance needs a recipe without exponents, got ", recipe.name);
    if (options.factor) throw_value("factor must be absent where importance is given, which chooses the scale");
    if (!options.amax.empty() && !recipe.two_level)
        throw_value("amax must be absent where importance is given, which chooses the scales of ", recipe.name);
    if (options.hadamard_block != 0)
        throw_value("hadamard must be absent where importance is given: the transform mixes the columns");
}

// The whole's amax serves a part whose scale is not its own; a search and an asymmetric range ask for more than that.
void check_amax(std::span<const float> amax, const Recipe& recipe, const Shape& scale_shape) {
    if (amax.empty()) return;
    const bool rows = recipe.layout.kind == LayoutKind::per_channel;
    const bool whole = recipe.layout.kind == LayoutKind::per_tensor || recipe.two_level;
    const bool one_level = recipe.two_level || (recipe.search == ScaleSearch::amax && !recipe.has_zero_point());
    if ((!rows && !whole) || !one_level)
        throw_value(
            "recipe must have two levels, or one symmetric scale per tensor or row without a search, for amax to be "
            "given, got ",
            recipe.name);
    const std::int64_t count = whole ? 1 : element_count(scale_shape);
    if (static_cast<std::int64_t>(amax.size()) != count)
        throw_value("amax must have ", count, count == 1 ? " number, got " : " numbers, got ", amax.size());
    for (const float x : amax)
        if (std::isinf(x) || x < 0 || (std::isnan(x) && (whole || info(recipe.element).has_nan)))
            throw_value("amax must be finite and not negative, got ", x);
}

void check_offset(const CastOptions& options, const BlockGrid& grid) {
    if (options.offset < 0) throw_value("offset must not be negative, got ", options.offset);
    if (options.row_length != 0 && options.row_length < grid.cols)
        throw_value("row_length must be 0 or at least x.shape[-1], ", grid.cols, ", got ", options.row_length);
}

void check_hadamard(std::int64_t block, const Shape& shape) {
    if (block < 2 || block > 1024 || !std::has_single_bit(static_cast<std::uint64_t>(block)))
        throw_value("hadamard_block must be a power of two between 2 and 1024, got ", block);
    if (shape.empty() || shape.back() % block != 0)
        throw_value("Hadamard requires x.shape[-1] to be divisible by ", block, ", got x.shape ", shape);
}

void check_format(Format format) {
    if (static_cast<std::size_t>(format) >= format_table.size())
        throw_value("format must be one of the core's formats, got Format{", static_cast<int>(format), "}");
}

}  // namespace

CastPlan plan_cast(const Shape& shape, const Recipe& recipe) {
    validate(recipe);
    const Layout& layout = recipe.layout;
    if (shape.empty()) throw_value(recipe.name, " requires x.ndim >= 1, got 0");
    if (layout.kind != LayoutKind::per_tensor && shape.size() < 2)
        throw_value(recipe.name, " requires x.ndim >= 2, got ", shape.size());
    const BlockGrid grid = layout.grid(shape);
    if (!recipe.ragged && grid.cols % grid.block_cols != 0) {
        const bool other_axis = grid.rows % grid.block_cols == 0;
        throw_value(recipe.name, " requires x.shape[-1] to be divisible by ", grid.block_cols, ", got x.shape ", shape,
                    other_axis ? ": where the product runs along axis -2, cast w.T and multiply by q.T" : "");
    }
    element_count(shape, sizeof(double));
    CastPlan plan;
    plan.data_shape = shape;
    if (is_packed(recipe.element)) plan.data_shape.back() = (shape.back() + 1) / 2;
    plan.data_type = ElementType::uint8();
    plan.scale_shape = layout.scale_shape(shape);
    plan.scale_type = element_type(recipe.scale);
    plan.has_zero_point = recipe.has_second_number();
    plan.zero_point_type = info(recipe.element).lowest < 0 ? ElementType::int8() : ElementType::uint8();
    if (recipe.is_expanded()) plan.zero_point_type = DType::float16;
    plan.has_global_scale = recipe.two_level;
    return plan;
}

CastOutput allocate(const CastPlan& plan) {
    CastOutput out{.data = Array::allocate(plan.data_type, plan.data_shape),
                   .scale = Array::allocate(plan.scale_type, plan.scale_shape),
                   .zero_point = std::nullopt,
                   .global_scale = std::nullopt};
    if (plan.has_zero_point) out.zero_point = Array::allocate(plan.zero_point_type, plan.scale_shape);
    if (plan.has_global_scale) out.global_scale = Array::allocate(DType::float32, plan.global_scale_shape);
    return out;
}

void cast_into(const Array& x, const Recipe& recipe, const CastOutput& out, const CastOptions& options) {
    const Call call;
    check_numbers(x, "x");
    check_output(out, plan_cast(x.shape, recipe), recipe);
    check_no_overlap(out, x);
    const BlockGrid grid = recipe.layout.grid(x.shape);
    check_options(options, recipe);
    check_importance(options, recipe);
    check_amax(options.amax, recipe, out.scale.shape);
    check_offset(options, grid);
    const NumberSource source(call, x);
    if (options.hadamard_block == 0) return quantize(source, x.shape, recipe, out, options);
    check_hadamard(options.hadamard_block, x.shape);
    quantize(HadamardSource(source, options.hadamard_block, options.hadamard_seed), x.shape, recipe, out, options);
}

ScaledTensor cast(const Array& x, const Recipe& recipe, const CastOptions& options) {
    check_numbers(x, "x");
    CastOutput out = allocate(plan_cast(x.shape, recipe));
    cast_into(x, recipe, out, options);
    return assemble(std::move(out), recipe, x.shape, x.type.dtype());
}

void encode(std::span<const float> x, Format format, std::span<std::uint8_t> codes) {
    const Call call;
    if (x.size() != codes.size()) throw_value("codes must have the length of x, ", x.size(), ", got ", codes.size());
    check_format(format);
    const auto& kernel = call.kernels[format];
    parallel_for(call, static_cast<std::int64_t>(x.size()), parallel_grain, [&](std::int64_t begin, std::int64_t end) {
        kernel.encode_unscaled(x.data() + begin, end - begin, codes.data() + begin);
    });
}

void decode(std::span<const std::uint8_t> codes, Format format, std::span<float> x) {
    const Call call;
    if (x.size() != codes.size()) throw_value("x must have the length of codes, ", codes.size(), ", got ", x.size());
    check_format(format);
    const DequantizeKernels& kernels = call.kernels.dequantize;
    parallel_for(call, static_cast<std::int64_t>(x.size()), parallel_grain, [&](std::int64_t begin, std::int64_t end) {
        const float unit = 1;
        kernels.row(format, {.codes = codes.data() + begin,
                             .begin = 0,
                             .count = end - begin,
                             .block = end - begin,
                             .scales = &unit,
                             .out = x.data() + begin});
    });
}

void pack(std::span<const std::uint8_t> codes, std::span<std::uint8_t> packed) {
    if (packed.size() != (codes.size() + 1) / 2)
        throw_value("packed must have ", (codes.size() + 1) / 2, " bytes, got ", packed.size());
    for (std::size_t i = 0; i < packed.size(); ++i) {
        const unsigned high = 2 * i + 1 < codes.size() ? codes[2 * i + 1] & 15U : 0U;
        packed[i] = static_cast<std::uint8_t>((codes[2 * i] & 15U) | high << 4);
    }
}

void unpack(std::span<const std::uint8_t> packed, std::span<std::uint8_t> codes) {
    if (packed.size() != (codes.size() + 1) / 2)
        throw_value("packed must have ", (codes.size() + 1) / 2, " bytes for ", codes.size(), " codes, got ",
                    packed.size());
    for (std::size_t i = 0; i < codes.size(); ++i)
        codes[i] = static_cast<std::uint8_t>(i % 2 != 0 ? packed[i / 2] >> 4 : packed[i / 2] & 15);
}

}  // namespace breccia::inline v0_4
