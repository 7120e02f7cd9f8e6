// SPDX-License-Identifier: Apache-2.0
//
// With the moments H = V @ transpose(V), V upper triangular, in the order of the columns, the squared error of a row
// with remainders e = w - q is |e @ V|^2. Its part c holds remainders up to column c alone, so that those after it can
// always make it vanish: the best code of column c is the one nearest to w_c + sum over i < c of e_i V_ic / V_cc. These
// are GPTQ's codes, whose update by the inverse's factor is the same in other words; V is found by one factorization of
// H in the opposite order, without an inverse.
#include "breccia/gptq.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "breccia/compare.hpp"
#include "breccia/formats.hpp"
#include "quantize/cholesky.hpp"
#include "quantize/quantizer.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t band_floats = std::int64_t{1} << 25;  // of the rows that are worked on together
constexpr std::int64_t batch_cols = 128;  // columns whose remainders feed each other before a product feeds the rest

// The moments as one matrix, or one for each of the batch, whole or of runs of neighbours alone; checked. They are read
// where they are, which may be a file.
class Moments {
public:
    Moments(const Call& call, const Array& moments, const Shape& shape)
        : call_(call), moments_(moments), columns_(shape.back()), run_(columns_) {
        check_numbers(moments, "moments");
        Shape one{columns_, columns_}, each = batch_shape(shape);
        each.insert(each.end(), one.begin(), one.end());
        batch_ = batch_shape(moments.shape);
        if (moments.shape != one && moments.shape != each) {
            if (!has_runs(batch_shape(shape)))
                throw_value("moments must be ", one, each.size() > 2 ? " or " + to_string(each) : "",
                            " for w of shape ", shape, ", got shape ", moments.shape);
            run_ = moments.shape.back();
            batch_.pop_back();
        }
        Shape diagonals = batch_;
        diagonals.push_back(columns_);
        diagonals_ = Array::allocate(DType::float32, diagonals);
        for (std::int64_t index = 0; index < count(); ++index)
            for (std::int64_t first = 0; first < columns_; first += run_) check(index, first);
    }

    [[nodiscard]] const Call& call() const { return call_; }
    [[nodiscard]] std::int64_t count() const { return element_count(batch_); }
    // Columns of a run; nothing is known between those of two.
    [[nodiscard]] std::int64_t run() const { return run_; }
    // Of the run that begins at a column.
    [[nodiscard]] NumberMatrix matrix(std::int64_t index, std::int64_t first) const {
        const std::int64_t number = index * (columns_ / run_) + first / run_;
        return number_matrix(moments_, -1, batch_shape(moments_.shape), number);
    }
    // The importance of columns.
    [[nodiscard]] const Array& diagonals() const { return diagonals_; }
    [[nodiscard]] std::span<const float> diagonal(std::int64_t index) const {
        return {diagonals_.as<float>() + index * columns_, at(columns_)};
    }

private:
    // Whether they are (K / g, g, g), or that for each of the batch.
    [[nodiscard]] bool has_runs(const Shape& batch) const {
        const Shape& shape = moments_.shape;
        if (shape.size() < 3 || shape.back() < 1 || columns_ % shape.back() != 0) return false;
        const Shape each(shape.begin(), shape.end() - 3);
        return (each.empty() || each == batch) && *(shape.end() - 2) == shape.back() &&
               *(shape.end() - 3) == columns_ / shape.back();
    }

    void check(std::int64_t index, std::int64_t first) {
        std::vector<float> scratch;
        const NumberMatrix m = matrix(index, first);
        for (std::int64_t i = 0; i < run_; ++i) {
            const float* row = m.read(call_.kernels, i, 0, run_, scratch);
            for (std::int64_t j = 0; j < run_; ++j)
                if (!is_finite(row[j])) throw_value("moments must be finite, got ", row[j]);
            if (row[i] < 0) throw_value("moments must not be negative on the diagonal, got ", row[i]);
            diagonals_.as<float>()[index * columns_ + first + i] = row[i];
        }
    }

    const Call& call_;
    const Array& moments_;
    std::int64_t columns_, run_;
    Shape batch_;
    Array diagonals_;
};

// The moments of one matrix, damped and in order; those of runs in groups of some, which have nothing to do with each
// other.
class Feed {
public:
    Feed(const Moments& moments, std::int64_t index, const GptqOptions& options)
        : moments_(moments),
          index_(index),
          diagonal_(moments.diagonal(index)),
          n_(static_cast<std::int64_t>(diagonal_.size())),
          width_(moments.run() * std::max<std::int64_t>(1, batch_cols / moments.run())),
          order_(at(n_)) {
        std::iota(order_.begin(), order_.end(), std::int64_t{0});
        for (std::int64_t first = 0; first < n_; first += width_) {
            factors_.emplace_back(std::min(width_, n_ - first));
            const auto begin = order_.begin() + first, end = begin + factors_.back().size();
            if (options.act_order)
                std::stable_sort(begin, end,
                                 [&](std::int64_t a, std::int64_t b) { return diagonal_[at(a)] > diagonal_[at(b)]; });
        }
        const double sum = std::accumulate(diagonal_.begin(), diagonal_.end(), 0.0);
        dead_ = std::ranges::count(diagonal_, 0.0F);
        const std::int64_t alive = n_ - dead_;
        mean_ = alive == 0 ? 1.0 : sum / static_cast<double>(alive);
        for (damp_ = options.damp;; damp_ = more_damping(damp_)) {
            if (factored_ = factor(); factored_ || damp_ >= 1) break;
        }
    }

    [[nodiscard]] bool factored() const { return factored_; }
    [[nodiscard]] double damp() const { return damp_; }
    [[nodiscard]] std::int64_t dead() const { return dead_; }
    [[nodiscard]] std::int64_t groups() const { return static_cast<std::int64_t>(factors_.size()); }
    /// The first column of a group, and how many it has.
    [[nodiscard]] std::int64_t first(std::int64_t group) const { return group * width_; }
    [[nodiscard]] std::int64_t size(std::int64_t group) const { return factors_[at(group)].size(); }
    /// The column that comes as number i of a group.
    [[nodiscard]] std::int64_t column(std::int64_t group, std::int64_t i) const { return order_[at(first(group) + i)]; }
    /// V_ic / V_cc, what a remainder of the i-th column of a group adds to the c-th.
    [[nodiscard]] float share(std::int64_t group, std::int64_t i, std::int64_t c) const {
        const LowerHalf& factor = factors_[at(group)];
        const std::int64_t last = factor.size() - 1, col = last - c;
        return factor.row(last - i)[col] / factor.row(col)[col];
    }

private:
    bool factor() {
        std::vector<std::int64_t> place(at(n_));
        for (std::int64_t group = 0; group < groups(); ++group)
            for (std::int64_t i = 0; i < size(group); ++i) place[at(column(group, i))] = size(group) - 1 - i;
        for (std::int64_t group = 0; group < groups(); ++group) {
            LowerHalf& into = factors_[at(group)];
            if (into.size() > moments_.run())  // what lies between runs
                for (std::int64_t i = 0; i < into.size(); ++i) std::fill_n(into.row(i), i + 1, 0.0F);
            for (std::int64_t at_col = first(group); at_col < first(group) + into.size(); at_col += moments_.run())
                put_run(into, at_col, std::span(place).subspan(at(at_col), at(moments_.run())));
            if (!cholesky(moments_.call(), into)) return false;
        }
        return true;
    }

    // In the opposite order, whose lower factor is V turned round both ways. Of the moments, too, the lower half alone
    // is read: the two halves take no more memory than the moments would.
    void put_run(LowerHalf& into, std::int64_t first, std::span<const std::int64_t> place) const {
        const NumberMatrix moments = moments_.matrix(index_, first);
        const double added = damp_ * mean_;
        parallel_for(moments_.call(), moments_.run(), 16, [&](std::int64_t begin, std::int64_t end) {
            std::vector<float> scratch;
            for (std::int64_t row = begin; row < end; ++row) {
                const float* given = moments.read(moments_.call().kernels, row, 0, row + 1, scratch);
                const std::int64_t i = place[at(row)];
                for (std::int64_t col = 0; col < row; ++col) {
                    const std::int64_t j = place[at(col)];
                    into.row(std::max(i, j))[std::min(i, j)] = given[col];
                }
                const float own = diagonal_[at(first + row)];
                into.row(i)[i] = static_cast<float>((own == 0 ? mean_ : static_cast<double>(own)) + added);
            }
        });
    }

    const Moments& moments_;
    std::int64_t index_;
    std::span<const float> diagonal_;
    std::int64_t n_, width_;
    std::vector<std::int64_t> order_;
    std::vector<LowerHalf> factors_;
    double mean_ = 1, damp_ = 0;
    std::int64_t dead_ = 0;
    bool factored_ = false;
};

// A quantized tensor whose scales stand and whose codes are put in one at a time.
class OneCode {
public:
    // `out` holds what a cast of a tensor of that shape and amax gave.
    OneCode(const ImportanceKernels& kernels, const Recipe& recipe, const Shape& shape, const CastOutput& out,
            float amax)
        : grid_(recipe.layout.grid(shape)),
          format_(info(recipe.element)),
          packed_(is_packed(recipe.element)),
          integer_(format_.family == CodecFamily::integer),
          whole_(recipe.layout.kind == LayoutKind::per_tensor),
          row_bytes_(packed_ ? (grid_.cols + 1) / 2 : grid_.cols),
          codes_(out.data.as<std::uint8_t>()),
          multiply_(is_coded(recipe.scale)) {
        const std::int64_t count = element_count(out.scale.shape);
        ScaleParams params{.rule = recipe.rule, .type = recipe.scale, .two_level = recipe.two_level};
        if (recipe.two_level) set_global_levels(params, amax);
        CodedScales coded{};
        if (multiply_) kernels.coded_scales(params, coded);
        for (std::int64_t i = 0; i < count; ++i) {
            if (multiply_) {
                const std::uint8_t code = out.scale.as<std::uint8_t>()[i];
                const bool known = code >= coded.lowest && code <= coded.highest;
                scales_.push_back(known ? coded.decoded[code] : NAN);
                factors_.push_back(coded.factor[code]);
            } else {
                // Bfloat16 numbers may come as half-words: the recipe knows the type.
                const auto type = static_cast<DType>(recipe.scale);
                const auto offset = i * static_cast<std::int64_t>(size_of(type));
                scales_.push_back(load_number<float>(out.scale.as<std::byte>() + offset, type));
                factors_.push_back(scales_.back());
            }
            float zero = 0;
            if (out.zero_point)
                zero = format_.lowest < 0 ? static_cast<float>(out.zero_point->as<std::int8_t>()[i])
                                          : static_cast<float>(out.zero_point->as<std::uint8_t>()[i]);
            zero_points_.push_back(zero);
        }
    }

    [[nodiscard]] const BlockGrid& grid() const { return grid_; }

    // Stores the code nearest to x + added as an element's, and returns x minus the value of that code. An element
    // that is not finite, or whose scale is not, keeps its code, and 0 is returned. Threads must not share a row: two
    // codes of it may be in one byte.
    float put(std::int64_t matrix, std::int64_t row, std::int64_t col, float x, float added) const {
        const std::int64_t block_row = matrix * grid_.grid_rows() + row / grid_.block_rows;
        const auto block =
            static_cast<std::size_t>(whole_ ? 0 : block_row * grid_.grid_cols() + col / grid_.block_cols);
        const float scale = scales_[block], value = x + added;
        if (!is_finite(x) || !is_finite(scale)) return 0;
        const std::uint8_t code =
            code_of(multiply_ ? value * factors_[block] : value / factors_[block], zero_points_[block]);
        std::uint8_t* codes = codes_ + (matrix * grid_.rows + row) * row_bytes_;
        if (packed_) {
            std::uint8_t& byte = codes[col / 2];
            const int shift = col % 2 != 0 ? 4 : 0;
            byte = static_cast<std::uint8_t>((byte & (0xF0 >> shift)) | (code & 15) << shift);
        } else {
            codes[col] = code;
        }
        return x - (format_.decode(code) - zero_points_[block]) * scale;
    }

private:
    // As round_integer of the kernels, and the formats' own encoders.
    [[nodiscard]] std::uint8_t code_of(float scaled, float zero_point) const {
        if (!integer_) return format_.encode(scaled);
        const float low = format_.lowest - zero_point, high = format_.max - zero_point;
        return format_.encode(std::nearbyint(scaled < low ? low : scaled > high ? high : scaled) + zero_point);
    }

    BlockGrid grid_;
    const FormatInfo& format_;
    bool packed_, integer_, whole_;
    std::int64_t row_bytes_;
    std::uint8_t* codes_;
    bool multiply_;
    std::vector<float> factors_, scales_;  // of blocks: see BlockScale
    std::vector<float> zero_points_;
};

// A matrix whose runs of columns have each a scale and an offset, and one byte of code an element.
class OnLevels {
public:
    explicit OnLevels(const LevelCodes& levels) : levels_(levels), run_(levels.codes.shape[1] / levels.scale.shape[1]) {
        const float* values = levels.levels.as<const float>();
        for (std::int64_t i = 1; i < element_count(levels.levels.shape); ++i)
            middles_.push_back((values[i - 1] + values[i]) / 2);
    }

    // As OneCode's. An element whose scale is zero keeps its code.
    float put(std::int64_t, std::int64_t row, std::int64_t col, float x, float added) const {
        const std::int64_t block = row * levels_.scale.shape[1] + col / run_;
        const float scale = levels_.scale.as<const float>()[block], offset = levels_.offset.as<const float>()[block];
        std::uint8_t& code = levels_.codes.as<std::uint8_t>()[row * levels_.codes.shape[1] + col];
        if (scale != 0)
            code = static_cast<std::uint8_t>(std::ranges::upper_bound(middles_, (x + added - offset) / scale) -
                                             middles_.begin());
        return x - (scale * levels_.levels.as<const float>()[code] + offset);
    }

private:
    const LevelCodes& levels_;
    std::int64_t run_;
    std::vector<float> middles_;
};

// Rows of one matrix of weights, and of these the columns of one group.
template <typename Codec>
struct Rounding {
    const Call& call;
    const Feed& feed;
    const Codec& codec;
    std::int64_t group, matrix, first, rows;
    std::int64_t cols = feed.size(group);
    std::vector<float> numbers = std::vector<float>(at(rows * cols));  // weights, in whose place remainders come
    std::vector<float> shares = std::vector<float>(at(cols * batch_cols));
    std::vector<float> fed = std::vector<float>(at(rows * batch_cols));

    void run(const NumberMatrix& w) {
        parallel_for(call, rows, 16, [&](std::int64_t from, std::int64_t to) {
            std::vector<float> scratch;
            for (std::int64_t row = from; row < to; ++row) {
                const std::int64_t begin = feed.first(group);
                const float* values = w.read(call.kernels, first + row, begin, cols, scratch);
                for (std::int64_t c = 0; c < cols; ++c)
                    numbers[at(row * cols + c)] = values[feed.column(group, c) - begin];
            }
        });
        for (std::int64_t begin = 0; begin < cols; begin += batch_cols) {
            const std::int64_t width = std::min(batch_cols, cols - begin);
            for (std::int64_t i = 0; i < begin + width; ++i)
                for (std::int64_t c = 0; c < width; ++c)
                    shares[at(i * width + c)] = i < begin + c ? feed.share(group, i, begin + c) : 0.0F;
            if (begin > 0) {
                Array remainders = Array::borrow(numbers.data(), DType::float32, {rows, begin});
                remainders.strides[0] = cols * static_cast<std::int64_t>(sizeof(float));
                matmul_into(remainders, Array::borrow(shares.data(), DType::float32, {begin, width}),
                            Array::borrow(fed.data(), DType::float32, {rows, width}));
            }
            parallel_for_each(call, rows, std::max<std::int64_t>(1, (1 << 12) / width),
                              [&](std::int64_t row) { round_row(row, begin, width); });
        }
    }

    // Columns [begin, begin + width) of a row: weights, in whose place remainders come.
    void round_row(std::int64_t row, std::int64_t begin, std::int64_t width) {
        float* x = numbers.data() + row * cols + begin;
        float added[batch_cols] = {};
        if (begin > 0) std::copy_n(fed.data() + row * width, width, added);
        for (std::int64_t c = 0; c < width; ++c) {
            const float rest = codec.put(matrix, first + row, feed.column(group, begin + c), x[c], added[c]);
            x[c] = rest;
            const float* share = shares.data() + (begin + c) * width;
            for (std::int64_t d = c + 1; d < width; ++d) added[d] += rest * share[d];
        }
    }
};

// Rounds every matrix of w by the codec.
template <typename Codec>
GptqReport feed_forward(const Array& w, const Moments& given, const Codec& codec, const GptqOptions& options) {
    GptqReport report{.damp = options.damp};
    const std::int64_t rows = w.shape[w.shape.size() - 2];
    if (rows == 0 || w.shape.back() == 0) return report;
    const Shape batch = batch_shape(w.shape);
    std::optional<Feed> feed;
    for (std::int64_t matrix = 0; matrix < element_count(batch); ++matrix) {
        if (!feed || given.count() > 1) {
            feed.reset();
            feed.emplace(given, given.count() > 1 ? matrix : 0, options);
            report.damp = std::max(report.damp, feed->damp());
            report.dead += feed->dead();
        }
        if (!feed->factored()) {
            ++report.nearest;
            continue;
        }
        const NumberMatrix m = number_matrix(w, -1, batch, matrix);
        for (std::int64_t group = 0; group < feed->groups(); ++group) {
            const std::int64_t band = std::max<std::int64_t>(256, band_floats / feed->size(group));
            for (std::int64_t first = 0; first < rows; first += band)
                Rounding<Codec>{given.call(), *feed, codec, group, matrix, first, std::min(band, rows - first)}.run(m);
        }
    }
    return report;
}

void check_weights(const Array& w, const GptqOptions& options) {
    if (std::isnan(options.damp) || options.damp < 0 || options.damp > 1)
        throw_value("damp must be from 0 to 1, got ", options.damp);
    if (w.shape.size() < 2) throw_value("w must be at least 2-D (N, K), got shape ", w.shape);
    check_numbers(w, "w");
}

}  // namespace

GptqReport gptq_into(const Array& w, const Array& moments, const Recipe& recipe, const CastOutput& out,
                     const GptqOptions& options) {
    const Call call;
    check_weights(w, options);
    if (recipe.is_expanded()) throw_value("gptq needs a recipe without exponents, got ", recipe.name);
    const Moments given(call, moments, w.shape);
    check_output(out, plan_cast(w.shape, recipe), recipe);
    check_no_overlap(out, moments);  // which are read after the cast has written
    CastOptions nearest;
    nearest.importance = given.diagonals();
    cast_into(w, recipe, out, nearest);
    const float amax = recipe.two_level ? magnitudes(w).largest : 0.0F;
    return feed_forward(w, given, OneCode(call.kernels.importance, recipe, w.shape, out, amax), options);
}

GptqReport gptq_into(const Array& w, const Array& moments, const LevelCodes& levels, const GptqOptions& options) {
    const Call call;
    check_weights(w, options);
    const Shape &shape = w.shape, &runs = levels.scale.shape;
    for (const Array* one : {&levels.scale, &levels.offset, &levels.levels, &levels.codes})
        if (one->type != (one == &levels.codes ? ElementType::uint8() : ElementType(DType::float32)) ||
            !one->is_contiguous())
            throw_value("scale, offset and levels must be float32 and codes uint8, all C-contiguous");
    if (shape.size() != 2 || levels.codes.shape != shape)
        throw_value("w must be 2-D and codes of its shape, got shapes ", shape, " and ", levels.codes.shape);
    if (runs.size() != 2 || runs[0] != shape[0] || runs[1] < 1 || shape[1] % runs[1] != 0)
        throw_value("scale must be (N, K / run) for w of shape ", shape, ", got shape ", runs);
    if (levels.offset.shape != runs) throw_value("offset must be ", runs, " as scale is, got ", levels.offset.shape);
    const auto count = static_cast<std::size_t>(element_count(levels.levels.shape));
    const std::span<const float> values(levels.levels.as<const float>(), count);
    if (count < 1 || count > 256 || !std::ranges::is_sorted(values))
        throw_value("levels must be 1 to 256 numbers in rising order, got ", count);
    const std::span<const std::uint8_t> codes(levels.codes.as<std::uint8_t>(), at(element_count(shape)));
    if (std::ranges::any_of(codes, [&](std::uint8_t code) { return code >= count; }))
        throw_value("codes must be less than the ", count, " levels");
    return feed_forward(w, Moments(call, moments, shape), OnLevels(levels), options);
}

ScaledTensor gptq(const Array& w, const Array& moments, const Recipe& recipe, const GptqOptions& options,
                  GptqReport* report) {
    check_numbers(w, "w");
    CastOutput out = allocate(plan_cast(w.shape, recipe));
    const GptqReport made = gptq_into(w, moments, recipe, out, options);
    if (report != nullptr) *report = made;
    return assemble(std::move(out), recipe, w.shape, w.type.dtype());
}

}  // namespace breccia::inline v0_4
