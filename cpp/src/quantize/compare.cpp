// SPDX-License-Identifier: Apache-2.0
#include "breccia/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <tuple>

#include "contract/kernel_table.hpp"
#include "quantize/paired_rows.hpp"
#include "runtime/threads.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

// Of one tile; tiles are added in their order.
struct Partial {
    double signal = 0, other = 0, dot = 0, noise = 0;
    double worst = 0;  // as in ErrorLanes, but NaN where there is one
    std::int64_t worst_run = -1, reference_nans = 0, nans = 0;
    bool equal = true;
};

double sum_of(const double (&lanes)[ErrorLanes::lanes]) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

void add_sums(const ErrorLanes& sums, Partial& to) {
    to.signal += sum_of(sums.signal);
    to.other += sum_of(sums.other);
    to.dot += sum_of(sums.dot);
    to.noise += sum_of(sums.noise);
}

// A NaN is the largest error there is, and the first one stays.
bool is_worse(double error, double than) { return !std::isnan(than) && (std::isnan(error) || error > than); }

template <class T>
bool both_nan(T x, T y) {
    return std::isnan(x) && std::isnan(y);
}

struct WorstError {
    double error = 0;
    std::int64_t at = -1;
};

template <class T>
WorstError worst_of(const T* x, const T* y, std::int64_t n) {
    WorstError worst;
    for (std::int64_t i = 0; i < n; ++i) {
        const double error = std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
        if (!both_nan(x[i], y[i]) && is_worse(error, worst.error)) worst = {error, i};
    }
    return worst;
}

// One run of a row against another.
template <class T>
class RunComparer {
public:
    using Add = void (*)(const T*, const T*, std::int64_t, ErrorLanes&);

    RunComparer(Add add, Partial& sums) : add_(add), sums_(sums) {}

    void add(const T* x, const T* y, const Run& run) {
        ErrorLanes lanes;
        add_(x, y, run.count, lanes);
        if (!std::isfinite(sum_of(lanes.noise))) return add_carefully(x, y, run);
        add_sums(lanes, sums_);
        const double worst = *std::ranges::max_element(lanes.worst);
        if (worst > 0) sums_.equal = false;
        note_worst(worst, run);
    }

private:
    // A run with a difference that is not finite. Pairs of NaNs are left out.
    void add_carefully(const T* x, const T* y, const Run& run) {
        clean_x_.assign(x, x + run.count);
        clean_y_.assign(y, y + run.count);
        for (std::int64_t i = 0; i < run.count; ++i) {
            sums_.reference_nans += std::isnan(x[i]) ? 1 : 0;
            sums_.nans += std::isnan(y[i]) ? 1 : 0;
            if (both_nan(x[i], y[i])) {
                clean_x_[static_cast<std::size_t>(i)] = clean_y_[static_cast<std::size_t>(i)] = 0;
                continue;
            }
            if (x[i] != y[i]) sums_.equal = false;
        }
        ErrorLanes lanes;
        add_(clean_x_.data(), clean_y_.data(), run.count, lanes);
        add_sums(lanes, sums_);
        // As ErrorLanes::worst holds it: the square for floats, of which different errors have different ones.
        const double error = worst_of(x, y, run.count).error;
        note_worst(std::is_same_v<T, float> ? error * error : error, run);
    }

    void note_worst(double worst, const Run& run) {
        if (!is_worse(worst, sums_.worst)) return;
        sums_.worst = worst;
        sums_.worst_run = run.index;
    }

    Add add_;
    Partial& sums_;
    std::vector<T> clean_x_, clean_y_;
};

// Calls body(x, y, run) with floats, or with doubles where an operand has such.
template <class F>
void read_pair(const KernelTable& table, RowReader& x, RowReader& y, const Run& run, F body) {
    if (x.is_double() || y.is_double())
        body(x.doubles(table, run), y.doubles(table, run));
    else
        body(x.floats(table, run), y.floats(table, run));
}

Partial compare_tile(const PairedRows& rows, std::int64_t tile, const KernelTable& table,
                     const CompareKernels& kernels) {
    Partial sums;
    RowReader first(rows.first(), rows), second(rows.second(), rows);
    std::tuple comparers(RunComparer<float>(kernels.add, sums), RunComparer<double>(kernels.add_doubles, sums));
    rows.for_each_run(tile, [&](const Run& run) {
        read_pair(table, first, second, run,
                  [&]<class T>(const T* x, const T* y) { std::get<RunComparer<T>>(comparers).add(x, y, run); });
    });
    return sums;
}

// The first of the largest errors in a run, at its place in C order.
WorstError worst_of_run(const PairedRows& rows, std::int64_t run_index, const KernelTable& table) {
    RowReader first(rows.first(), rows), second(rows.second(), rows);
    const Run run = rows.run_at(run_index);
    WorstError worst;
    read_pair(table, first, second, run, [&](const auto* x, const auto* y) { worst = worst_of(x, y, run.count); });
    worst.at = run.at + run.step * worst.at;
    return worst;
}

using BinCounts = std::array<std::int64_t, magnitude_bins>;

// Neighbours often fall into one bin; four tables keep an increment from waiting for the last.
class BinCounter {
public:
    void count(const std::uint16_t* bins, std::int64_t n) {
        std::int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (std::size_t j = 0; j < 4; ++j) ++tables_[j][bins[i + static_cast<std::int64_t>(j)]];
        for (; i < n; ++i) ++tables_[0][bins[i]];
    }
    /// Before a table's 32 bits overflow: after each tile.
    void move_to(BinCounts& total) {
        for (std::size_t i = 0; i < total.size(); ++i)
            for (auto& table : tables_) total[i] += table[i];
        tables_ = {};
    }

private:
    std::array<std::array<std::uint32_t, magnitude_bins>, 4> tables_{};
};

// Of (second - first) / unit, or of the first alone where both are one operand.
Magnitudes count_magnitudes(const Call& call, const Operand& first, const Operand& second, bool difference,
                            float unit) {
    const KernelTable& table = call.kernels;
    const CompareKernels& compare = table.compare;
    const PairedRows rows(first, second);
    std::mutex adding;
    BinCounts total{};
    std::uint32_t largest = 0;
    parallel_for(call, rows.tiles(), 1, [&](std::int64_t begin, std::int64_t end) {
        BinCounter counter;
        BinCounts counts{};
        std::uint32_t most = 0;
        RowReader x(rows.first(), rows), y(rows.second(), rows);
        std::array<std::uint16_t, PairedRows::run> bins{};
        for (std::int64_t tile = begin; tile < end; ++tile) {
            rows.for_each_run(tile, [&](const Run& run) {
                const float* from = x.floats(table, run);
                const float* to = difference ? y.floats(table, run) : nullptr;
                most = std::max(most, compare.bins(from, to, unit, run.count, bins.data()));
                counter.count(bins.data(), run.count);
            });
            counter.move_to(counts);
        }
        const std::lock_guard lock(adding);
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += counts[i];
        largest = std::max(largest, most);
    });
    Magnitudes result;
    std::copy_n(total.begin() + first_magnitude_bin, Magnitudes::size, result.counts.begin());
    result.zeros = total.front();
    result.not_finite = total.back();
    result.largest = float_from_bits(largest);
    return result;
}

void check_pair(const Operand& reference, const Operand& tensor) {
    check_operand(reference, "reference");
    check_operand(tensor, "tensor");
    if (reference.shape() != tensor.shape())
        throw_value("tensor.shape must be that of reference, ", reference.shape(), ", got ", tensor.shape());
}

}  // namespace

double Comparison::sqnr_db() const {
    if (equal) return std::numeric_limits<double>::infinity();
    if (!std::isfinite(noise)) return -std::numeric_limits<double>::infinity();
    return signal > 0 && noise > 0 ? 10 * std::log10(signal / noise) : std::numeric_limits<double>::quiet_NaN();
}

double Comparison::cosine() const {
    const double norm = std::sqrt(signal) * std::sqrt(other);
    if (norm == 0) return equal ? 1 : 0;
    return dot / norm;
}

Comparison compare(const Operand& reference, const Operand& tensor) {
    const Call call;
    check_pair(reference, tensor);
    const KernelTable& table = call.kernels;
    const CompareKernels& compare = table.compare;
    const PairedRows rows(reference, tensor);
    std::vector<Partial> partials(static_cast<std::size_t>(rows.tiles()));
    parallel_for_each(call, rows.tiles(), 1, [&](std::int64_t tile) {
        partials[static_cast<std::size_t>(tile)] = compare_tile(rows, tile, table, compare);
    });
    Comparison result;
    result.count = element_count(reference.shape());
    double worst = 0;
    std::int64_t worst_run = -1;
    for (const Partial& part : partials) {
        result.signal += part.signal;
        result.other += part.other;
        result.dot += part.dot;
        result.noise += part.noise;
        result.reference_nans += part.reference_nans;
        result.nans += part.nans;
        result.equal = result.equal && part.equal;
        if (!is_worse(part.worst, worst)) continue;
        worst = part.worst;
        worst_run = part.worst_run;
    }
    if (worst_run < 0) return result;
    const WorstError found = worst_of_run(rows, worst_run, table);
    result.max_error = found.error;
    result.max_error_at = found.at;
    return result;
}

Magnitudes magnitudes(const Operand& x) {
    const Call call;
    check_operand(x, "x");
    return count_magnitudes(call, x, x, false, 1);
}

Magnitudes error_magnitudes(const Operand& reference, const Operand& tensor, float unit) {
    const Call call;
    check_pair(reference, tensor);
    if (!(unit > 0) || std::isinf(unit)) throw_value("unit must be positive and finite, got ", unit);
    return count_magnitudes(call, reference, tensor, true, unit);
}

std::vector<std::int64_t> count_codes(const ScaledTensor& scaled) {
    const Call call;
    check_memory(scaled, "scaled");
    const BlockGrid& grid = scaled.grid();
    const Shape batch = batch_shape(scaled.shape());
    const std::int64_t pieces = scaled.is_packed() ? (grid.cols + 1) / 2 : grid.cols;
    const std::size_t codes = std::size_t{1} << static_cast<unsigned>(info(scaled.recipe().element).bits);
    std::vector<std::int64_t> total(codes);
    std::mutex adding;
    const std::int64_t grain = std::max<std::int64_t>(1, PairedRows::tile / std::max<std::int64_t>(grid.cols, 1));
    parallel_for(call, pieces == 0 ? 0 : element_count(batch) * grid.rows, grain,
                 [&](std::int64_t begin, std::int64_t end) {
                     std::array<std::array<std::int64_t, 256>, 2> bytes{};
                     std::array<std::int64_t, 16> unused{};  // high nibbles that end rows of an odd number of codes
                     ScaledMatrix matrix;
                     for (std::int64_t i = begin; i < end; ++i) {
                         const std::int64_t row = i % grid.rows;
                         if (i == begin || row == 0) matrix = scaled_matrix(scaled, batch, i / grid.rows);
                         const std::uint8_t* p = matrix.data + row * matrix.row_stride;
                         for (std::int64_t j = 0; j < pieces; ++j)
                             ++bytes[static_cast<std::size_t>(j % 2)][p[j * matrix.col_stride]];
                         if (matrix.packed && grid.cols % 2 != 0) ++unused[p[(pieces - 1) * matrix.col_stride] >> 4U];
                     }
                     const std::lock_guard lock(adding);
                     for (std::size_t byte = 0; byte < 256; ++byte) {
                         const std::int64_t count = bytes[0][byte] + bytes[1][byte];
                         total[byte & (codes - 1)] += count;
                         if (matrix.packed) total[byte >> 4U] += count;
                     }
                     if (matrix.packed)
                         for (std::size_t code = 0; code < unused.size(); ++code) total[code] -= unused[code];
                 });
    return total;
}

}  // namespace breccia::inline v0_4
