// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "breccia/error.hpp"
#include "breccia/ops.hpp"
#include "quantize/row_source.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

void dequantize_into(const ScaledTensor& scaled, const Array& out) {
    const Call call;
    const Shape& shape = scaled.shape();
    check_memory(scaled, "scaled");
    check_output(out, shape);
    check_no_overlap(out, scaled);
    if (element_count(shape) == 0) return;
    const KernelTable& table = call.kernels;
    const Shape batch = batch_shape(shape);
    const BlockGrid& grid = scaled.grid();
    const std::int64_t grain = std::max<std::int64_t>(1, parallel_grain / std::max<std::int64_t>(grid.cols, 1));
    const bool has_kernel = out.type.dtype() != DType::float64;
    parallel_for(call, element_count(batch) * grid.rows, grain, [&](std::int64_t begin, std::int64_t end) {
        Scratch scratch;
        ScaledMatrix matrix;
        OutputMatrix target;
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t index = i / grid.rows, row = i % grid.rows;
            if (i == begin || row == 0) {
                matrix = scaled_matrix(scaled, batch, index);
                target = output_matrix(out, scaled.layout().axis, batch, index);
            }
            for (std::int64_t col = 0; col < grid.cols; col += piece_cols) {
                const std::int64_t n = std::min(piece_cols, grid.cols - col);
                void* direct = has_kernel ? target.in_place(row, col, n) : nullptr;
                if (direct != nullptr) {
                    matrix.read(table, row, col, n, scratch, direct, target.dtype);
                } else {
                    scratch.values.resize(piece_cols);
                    matrix.read(table, row, col, n, scratch, scratch.values.data());
                    target.write(table, row, col, n, scratch.values.data());
                }
            }
        }
    });
}

Array dequantize(const ScaledTensor& scaled, DType dtype) {
    Array out = Array::allocate(dtype, scaled.shape());
    dequantize_into(scaled, out);
    return out;
}

}  // namespace breccia::inline v0_4
