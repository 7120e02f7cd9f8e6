// SPDX-License-Identifier: Apache-2.0
#include "quantize/importance.hpp"

#include <algorithm>
#include <cmath>

#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

bool usable(float h) { return h > 0 && is_finite(h); }

CodeGrid code_grid(Format format) {
    const FormatInfo& f = info(format);
    return {.integer = f.family == CodecFamily::integer,
            .lowest = f.lowest,
            .largest = f.max,
            .smallest_normal = f.smallest * exp2i(f.mantissa_bits),
            .magic = exp2i(23 - f.mantissa_bits)};
}

// The mean of those numbers that are usable; 0 where none is.
class Mean {
public:
    void add(float h) {
        if (usable(h)) sum_ += static_cast<double>(h), ++count_;
    }
    [[nodiscard]] double value() const { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }

private:
    double sum_ = 0;
    std::int64_t count_ = 0;
};

}  // namespace

ColumnWeights::ColumnWeights(const KernelTable& kernels, const Array& importance, const Shape& shape)
    : columns_(shape.back()) {
    check_numbers(importance, "importance");
    Shape each = shape.size() > 2 ? batch_shape(shape) : Shape{};
    each.push_back(columns_);
    of_each_ = importance.shape.size() > 1;
    if (importance.shape != Shape{columns_} && importance.shape != each)
        throw_value("importance must be ", Shape{columns_}, each.size() > 1 ? " or " + to_string(each) : std::string(),
                    " for x of shape ", shape, ", got shape ", importance.shape);
    const std::int64_t rows = of_each_ ? element_count(each) / std::max<std::int64_t>(1, columns_) : 1;
    weights_.resize(static_cast<std::size_t>(rows * columns_));
    Array rows_of_one = importance;  // each row as a matrix of one row
    rows_of_one.shape.insert(rows_of_one.shape.end() - 1, 1);
    rows_of_one.strides.insert(rows_of_one.strides.end() - 1, 0);
    const Shape batch = batch_shape(rows_of_one.shape);
    std::vector<float> scratch;
    for (std::int64_t r = 0; r < rows; ++r) {
        const float* h = number_matrix(rows_of_one, -1, batch, r).read(kernels, 0, 0, columns_, scratch);
        std::copy_n(h, columns_, weights_.data() + r * columns_);
    }
    Mean all;
    for (const float h : weights_) {
        if (h < 0) throw_value("importance must not be negative, got ", h);
        all.add(h);
    }
    const double mean = all.value() == 0 ? 1.0 : all.value();
    // In a power of two near the mean, and within a range in which no error is lost or overflows.
    const int exponent = std::ilogb(mean);
    const auto in_range = [&](double h) {
        return static_cast<float>(std::clamp(std::ldexp(h, -exponent), 0x1p-40, 0x1p40));
    };
    for (std::int64_t k = 0; k < columns_; ++k) {
        Mean column;
        for (std::int64_t r = 0; r < rows; ++r) column.add(weights_[static_cast<std::size_t>(r * columns_ + k)]);
        const double pooled = column.value() == 0 ? mean : column.value();
        for (std::int64_t r = 0; r < rows; ++r) {
            float& h = weights_[static_cast<std::size_t>(r * columns_ + k)];
            h = in_range(usable(h) ? static_cast<double>(h) : pooled);
        }
    }
}

WeightedChoice::WeightedChoice(const RowSource& source, const Array& importance, const Shape& shape,
                               const Recipe& recipe, const ScaleParams& params)
    : source_(source),
      kernels_(source.kernels()),
      format_(kernels_[recipe.element]),
      element_(recipe.element),
      weights_(kernels_, importance, shape),
      grid_(code_grid(recipe.element)),
      given_(params) {}

void WeightedChoice::start() {
    params_ = given_;
    params_.search = ScaleSearch::mse;
    if (coded()) kernels_.importance.coded_scales(params_, scales_);
}

BlockScale WeightedChoice::of_code(std::uint8_t code) const {
    return {.stored = code,
            .factor = scales_.factor[code],
            .multiply = true,
            .all_finite = true,
            .decoded = scales_.decoded[code]};
}

float WeightedChoice::error(const BlockRange& b, const BlockScale& s, Scratch& scratch) const {
    float total = 0;
    source_.for_each_piece(b, scratch, [&](const float* x, std::int64_t, std::int64_t col, std::int64_t n) {
        total += kernels_.importance.error(x, weights_.of(b.matrix, col), n, grid_, s);
    });
    return total;
}

BlockScale WeightedChoice::choose(std::span<const float> x, const float* weights) const {
    const auto n = static_cast<std::int64_t>(x.size());
    const BlockStats stats = kernels_.quantize.stats(x.data(), n, params_.needs_range());
    const BlockScale own = format_.choose_scale(stats, params_, 0);
    if (!stats.searchable()) return own;
    if (coded()) {
        auto code = static_cast<std::uint8_t>(own.stored);
        search_codes({x.data(), weights, 1, n}, &code);
        return code == own.stored ? own : of_code(code);
    }
    if (info(element_).bits == 4 && grid_.integer)
        return best_integer_scale(kernels_.importance, {x, weights, stats}, grid_, params_, own);
    return best(stats, [&](const BlockScale& s) { return kernels_.importance.error(x.data(), weights, n, grid_, s); });
}

BlockScale WeightedChoice::choose(const BlockRange& b, Scratch& scratch) const {
    std::vector<float>& x = scratch.gathered;
    std::vector<float>& weights = scratch.gathered_weights;
    x.clear(), weights.clear();
    source_.for_each_piece(b, scratch, [&](const float* values, std::int64_t, std::int64_t col, std::int64_t n) {
        x.insert(x.end(), values, values + n);
        const float* h = weights_.of(b.matrix, col);
        weights.insert(weights.end(), h, h + n);
    });
    return choose(x, weights.data());
}

void WeightedChoice::improve(const BlockRange& row, std::int64_t first, std::int64_t count, std::int64_t size,
                             const float* x, const BlockWriter& to) const {
    const std::int64_t index = to.block_at(row.matrix, row.begin_row, first);
    const float* weights = weights_.of(row.matrix, first * size);
    std::array<std::uint8_t, piece_cols> better;
    auto* scales = reinterpret_cast<std::uint8_t*>(to.scale(index));
    if (coded()) {
        std::copy_n(scales, count, better.begin());
        search_codes({x, weights, count, size}, better.data());
    }
    for (std::int64_t j = 0; j < count; ++j) {
        const float* values = x + j * size;
        const std::uint8_t code = coded() ? better[static_cast<std::size_t>(j)] : std::uint8_t{0};
        if (coded() && code == scales[j]) continue;
        const BlockScale s =
            coded() ? of_code(code) : choose({values, static_cast<std::size_t>(size)}, weights + j * size);
        to.write_scale(index + j, s);
        to.encode(values, size, s, row.matrix, row.begin_row, (first + j) * size);
    }
}

}  // namespace breccia::inline v0_4
