// SPDX-License-Identifier: Apache-2.0
//
// Two operands of one shape, walked side by side in runs of a row that fit the first-level cache.
#pragma once

#include "tensor/checks.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

/// Elements [begin, begin + count) of a row of a matrix of the batch.
struct Run {
    std::int64_t index = 0;  ///< among all runs
    std::int64_t matrix = 0, row = 0, begin = 0, count = 0;
    std::int64_t at = 0, step = 1;  ///< in C order: the place of the first, and how much further each next one is
};

class PairedRows {
public:
    static constexpr std::int64_t run = 2048;      ///< elements at most
    static constexpr std::int64_t tile = 1 << 16;  ///< elements, about; of the shape alone, whoever takes it

    /// Borrows. Where the operands' codes run along different axes, the second is dequantized.
    PairedRows(const Operand& first, const Operand& second);

    [[nodiscard]] Operand first() const { return flat_first_ ? Operand(*flat_first_) : first_; }
    [[nodiscard]] Operand second() const { return flat_second_ ? Operand(*flat_second_) : second_; }
    [[nodiscard]] const Shape& batch() const { return batch_; }
    [[nodiscard]] int axis() const { return axis_; }
    [[nodiscard]] std::int64_t tiles() const { return (runs_ + runs_of_a_tile_ - 1) / runs_of_a_tile_; }

    template <class F>
    void for_each_run(std::int64_t tile_index, F body) const {
        const std::int64_t end = std::min(runs_, (tile_index + 1) * runs_of_a_tile_);
        for (std::int64_t i = tile_index * runs_of_a_tile_; i < end; ++i) body(run_at(i));
    }

    [[nodiscard]] Run run_at(std::int64_t index) const;

private:
    Operand first_, second_;
    std::optional<Array> flat_first_, flat_second_;
    Shape batch_;
    int axis_ = -1;
    std::int64_t rows_ = 0, cols_ = 0, runs_of_a_row_ = 0, runs_ = 0, runs_of_a_tile_ = 1;
};

/// Reads the runs of one operand, on one thread. What it returns lasts until the next run is read.
class RowReader {
public:
    RowReader(const Operand& operand, const PairedRows& rows);

    /// Whether its numbers do not fit float32.
    [[nodiscard]] bool is_double() const { return array_ != nullptr && array_->type == ElementType(DType::float64); }
    const float* floats(const KernelTable& kernels, const Run& run);
    const double* doubles(const KernelTable& kernels, const Run& run);

private:
    void select(std::int64_t matrix);

    const ScaledTensor* scaled_ = nullptr;
    const Array* array_ = nullptr;
    const Shape& batch_;
    int axis_;
    std::int64_t selected_ = -1;
    ScaledMatrix codes_;
    NumberMatrix numbers_;
    Scratch scratch_;
    std::vector<double> wide_;
};

}  // namespace breccia::inline v0_4
