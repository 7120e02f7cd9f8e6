// SPDX-License-Identifier: Apache-2.0
#include "quantize/paired_rows.hpp"

#include <algorithm>
#include <cstring>

namespace breccia::inline v0_4 {
namespace {

// One row of the same memory.
Array flattened(const Array& array) { return Array::borrow(array.data, array.type, {array.size()}); }

bool is_flat(const Operand& operand) { return operand.scaled() == nullptr && operand.array()->is_contiguous(); }

int axis_of(const Operand& operand) { return operand.scaled() != nullptr ? operand.scaled()->layout().axis : -1; }

}  // namespace

PairedRows::PairedRows(const Operand& first, const Operand& second) : first_(first), second_(second) {
    if (is_flat(first) && is_flat(second)) {
        flat_first_ = flattened(*first.array());
        flat_second_ = flattened(*second.array());
    } else if (first.scaled() != nullptr && second.scaled() != nullptr && axis_of(first) != axis_of(second)) {
        flat_second_ = dequantize(*second.scaled());
    }
    axis_ = first.scaled() != nullptr ? axis_of(first) : axis_of(second);
    const Shape& shape = this->first().shape();
    batch_ = batch_shape(shape);
    cols_ = shape.empty() ? 1 : shape.back();
    rows_ = shape.size() < 2 ? 1 : shape[shape.size() - 2];
    if (axis_ == -2) std::swap(rows_, cols_);
    runs_of_a_row_ = (cols_ + run - 1) / run;
    runs_ = runs_of_a_row_ == 0 ? 0 : element_count(batch_) * rows_ * runs_of_a_row_;
    runs_of_a_tile_ = std::max<std::int64_t>(1, tile / std::clamp<std::int64_t>(cols_, 1, run));
}

Run PairedRows::run_at(std::int64_t index) const {
    const std::int64_t all_rows = index / runs_of_a_row_;
    Run r;
    r.index = index;
    r.matrix = all_rows / rows_;
    r.row = all_rows % rows_;
    r.begin = index % runs_of_a_row_ * run;
    r.count = std::min(run, cols_ - r.begin);
    r.step = axis_ == -2 ? rows_ : 1;
    r.at = r.matrix * rows_ * cols_ + r.row * (axis_ == -2 ? 1 : cols_) + r.begin * r.step;
    return r;
}

RowReader::RowReader(const Operand& operand, const PairedRows& rows)
    : scaled_(operand.scaled()), array_(operand.array()), batch_(rows.batch()), axis_(rows.axis()) {}

void RowReader::select(std::int64_t matrix) {
    if (selected_ == matrix) return;
    selected_ = matrix;
    if (scaled_ != nullptr)
        codes_ = scaled_matrix(*scaled_, batch_, matrix);
    else
        numbers_ = number_matrix(*array_, axis_, batch_, matrix);
}

const float* RowReader::floats(const KernelTable& kernels, const Run& run) {
    select(run.matrix);
    if (scaled_ == nullptr) return numbers_.read(kernels, run.row, run.begin, run.count, scratch_.values);
    scratch_.values.resize(PairedRows::run);
    codes_.read(kernels, run.row, run.begin, run.count, scratch_, scratch_.values.data());
    return scratch_.values.data();
}

const double* RowReader::doubles(const KernelTable& kernels, const Run& run) {
    wide_.resize(PairedRows::run);
    if (!is_double()) {
        const float* x = floats(kernels, run);
        std::copy_n(x, run.count, wide_.data());
        return wide_.data();
    }
    select(run.matrix);
    const std::byte* p = numbers_.data + run.row * numbers_.row_stride + run.begin * numbers_.col_stride;
    if (numbers_.col_stride == sizeof(double) && reinterpret_cast<std::uintptr_t>(p) % sizeof(double) == 0)
        return reinterpret_cast<const double*>(p);
    for (std::int64_t i = 0; i < run.count; ++i)
        std::memcpy(&wide_[static_cast<std::size_t>(i)], p + i * numbers_.col_stride, sizeof(double));
    return wide_.data();
}

}  // namespace breccia::inline v0_4
