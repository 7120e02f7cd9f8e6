// SPDX-License-Identifier: Apache-2.0
#include "matmul/product.hpp"

#include <algorithm>

namespace breccia::inline v0_4 {

void Product::read(const KernelTable& table, std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count,
                   Scratch& scratch, float* out, std::int64_t stride) const {
    while (rows > 0) {
        const std::int64_t here = std::min(rows, m - row % m);
        a[static_cast<std::size_t>(row / m)].read(table, row % m, here, at, count, scratch, out, stride);
        out += here * stride;
        row += here;
        rows -= here;
    }
}

void* Product::in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                        std::int64_t& stride) const {
    const OutputMatrix& to = c[static_cast<std::size_t>(row / m)];
    const auto item = static_cast<std::int64_t>(size_of(dtype));
    stride = to.row_stride / item;
    const bool fits = to.dtype == dtype && row % m + rows <= m && to.row_stride % item == 0;
    return fits ? to.in_place(row % m, begin, count) : nullptr;
}

void Product::write(const KernelTable& table, std::int64_t row, std::int64_t begin, std::int64_t count,
                    const float* x) const {
    c[static_cast<std::size_t>(row / m)].write(table, row % m, begin, count, x);
}

}  // namespace breccia::inline v0_4
