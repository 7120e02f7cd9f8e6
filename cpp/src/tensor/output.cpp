// SPDX-License-Identifier: Apache-2.0
#include "tensor/output.hpp"

#include "tensor/number.hpp"

namespace breccia::inline v0_4 {

std::byte* OutputMatrix::at(std::int64_t row, std::int64_t col) const {
    return data + row * row_stride + col * col_stride;
}

bool OutputMatrix::is_run(std::int64_t row, std::int64_t begin, std::int64_t n) const {
    const auto item = static_cast<std::int64_t>(size_of(dtype));
    return (col_stride == item || n <= 1) && reinterpret_cast<std::uintptr_t>(at(row, begin)) % size_of(dtype) == 0;
}

void* OutputMatrix::in_place(std::int64_t row, std::int64_t begin, std::int64_t n) const {
    return is_run(row, begin, n) ? at(row, begin) : nullptr;
}

void OutputMatrix::write(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                         const float* x) const {
    if (is_run(row, begin, n)) return kernels.dequantize.store[static_cast<std::size_t>(dtype)](x, n, at(row, begin));
    for (std::int64_t i = 0; i < n; ++i) store_number(at(row, begin + i), dtype, x[i]);
}

OutputMatrix output_matrix(const Array& out, int axis, const Shape& batch, std::int64_t index) {
    const NumberMatrix m = number_matrix(out, axis, batch, index);
    return {const_cast<std::byte*>(m.data), m.dtype, m.row_stride, m.col_stride};
}

}  // namespace breccia::inline v0_4
