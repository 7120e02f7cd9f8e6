// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <variant>

#include "breccia/error.hpp"
#include "breccia/ops.hpp"
#include "output.hpp"
#include "threads.hpp"

namespace breccia {
namespace {

// Panels of 128 x 256 floats: two of them stay in the second-level cache.
constexpr std::int64_t panel_rows = 128, panel_k = 256;

// One operand of one product as rows of length K, K contiguous.
class Rows {
public:
    // `axis` is where K lies in the operand: -1 for a, -2 for b.
    Rows(const Operand& operand, int axis, const Shape& batch, std::int64_t index) {
        if (const ScaledTensor* scaled = operand.scaled()) {
            const ScaledMatrix m = scaled_matrix(*scaled, batch, index);
            along_k_ = scaled->layout().axis == axis;
            matrix_ = m;
            return;
        }
        NumberMatrix m = number_matrix(*operand.array(), axis, batch, index);
        const auto item = static_cast<std::int64_t>(size_of(m.dtype));
        along_k_ = m.col_stride == item || m.row_stride != item;
        if (!along_k_) {
            std::swap(m.rows, m.cols);
            std::swap(m.row_stride, m.col_stride);
        }
        matrix_ = m;
    }

    struct Panel {
        const float* data;
        std::int64_t stride;
    };

    // Rows [row, row + rows), elements [k, k + n) of each, in `buffer` unless they can be used where they are.
    Panel read(const KernelTable& kernels, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n,
               Scratch& scratch, float* buffer) const {
        if (const auto* numbers = std::get_if<NumberMatrix>(&matrix_); numbers != nullptr && along_k_) {
            const bool plain = numbers->dtype == DType::float32 && numbers->row_stride % 4 == 0 &&
                               numbers->col_stride == 4 &&
                               reinterpret_cast<std::uintptr_t>(numbers->data) % alignof(float) == 0;
            if (plain)
                return {reinterpret_cast<const float*>(numbers->data + row * numbers->row_stride) + k,
                        numbers->row_stride / 4};
        }
        if (along_k_) {
            for (std::int64_t i = 0; i < rows; ++i) read_run(kernels, row + i, k, n, scratch, buffer + i * panel_k);
        } else {
            float run[panel_rows];
            for (std::int64_t j = 0; j < n; ++j) {
                read_run(kernels, k + j, row, rows, scratch, run);
                for (std::int64_t i = 0; i < rows; ++i) buffer[i * panel_k + j] = run[i];
            }
        }
        return {buffer, panel_k};
    }

private:
    void read_run(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, Scratch& scratch,
                  float* out) const {
        if (const auto* scaled = std::get_if<ScaledMatrix>(&matrix_)) {
            scaled->read(kernels, row, begin, n, scratch, out);
        } else {
            const float* x = std::get<NumberMatrix>(matrix_).read(kernels, row, begin, n, scratch.values);
            std::copy(x, x + n, out);
        }
    }

    std::variant<NumberMatrix, ScaledMatrix> matrix_;
    bool along_k_ = true;
};

void check_operand(const Operand& operand, const char* name) {
    const Array* array = operand.array();
    if (array != nullptr && !array->type.is_number())
        throw_type(std::string(name) + " must be a ScaledTensor or a float32, float64, float16 or bfloat16 array, got dtype " +
                   array->type.name());
}

void check_overlap(const Array& out, const Operand& operand) {
    check_no_overlap(out, operand.scaled() != nullptr ? operand.scaled()->data() : *operand.array());
}

}  // namespace

Shape matmul_shape(const Shape& a, const Shape& b) {
    if (a.size() < 2) throw_value("a must be at least 2-D, got shape " + to_string(a));
    if (b.size() < 2) throw_value("b must be at least 2-D, got shape " + to_string(b));
    const std::int64_t k_a = a.back(), k_b = b[b.size() - 2];
    if (k_a != k_b)
        throw_value("matmul shape mismatch: a.shape[-1]=" + std::to_string(k_a) + " != b.shape[-2]=" + std::to_string(k_b));
    const Shape batch_a = batch_shape(a), batch_b = batch_shape(b);
    Shape shape(std::max(batch_a.size(), batch_b.size()));
    for (std::size_t i = 0; i < shape.size(); ++i) {
        const auto extent = [&](const Shape& batch) {
            return i < batch.size() ? batch[batch.size() - 1 - i] : std::int64_t{1};
        };
        const std::int64_t n_a = extent(batch_a), n_b = extent(batch_b);
        if (n_a != n_b && n_a != 1 && n_b != 1)
            throw_value("matmul batch mismatch: the leading axes of a, " + to_string(batch_a) + ", and b, " +
                        to_string(batch_b) + ", do not broadcast");
        shape[shape.size() - 1 - i] = n_a == 1 ? n_b : n_a;
    }
    shape.push_back(a[a.size() - 2]);
    shape.push_back(b.back());
    return shape;
}

void matmul_into(const Operand& a, const Operand& b, const Array& out) {
    check_operand(a, "a");
    check_operand(b, "b");
    const Shape shape = matmul_shape(a.shape(), b.shape());
    check_output(out, shape);
    check_overlap(out, a);
    check_overlap(out, b);
    const Shape batch = batch_shape(shape);
    const std::int64_t m = shape[shape.size() - 2], n = shape.back(), k = a.shape().back();
    const std::int64_t n_panels = (n + panel_rows - 1) / panel_rows;
    const KernelTable& table = kernels();
    parallel_for(element_count(batch) * n_panels, 1, [&](std::int64_t begin, std::int64_t end) {
        Scratch scratch;
        std::vector<float> buffers(static_cast<std::size_t>(2 * panel_rows * panel_k + panel_rows * panel_rows));
        float* a_buffer = buffers.data();
        float* b_buffer = a_buffer + panel_rows * panel_k;
        float* c_buffer = b_buffer + panel_rows * panel_k;
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t index = unit / n_panels, j = unit % n_panels * panel_rows;
            const std::int64_t cols = std::min(panel_rows, n - j);
            const Rows rows_a(a, -1, batch, index), rows_b(b, -2, batch, index);
            const OutputMatrix c = output_matrix(out, -1, batch, index);
            for (std::int64_t i = 0; i < m; i += panel_rows) {
                const std::int64_t rows = std::min(panel_rows, m - i);
                std::fill(c_buffer, c_buffer + rows * panel_rows, 0.0F);
                for (std::int64_t at = 0; at < k; at += panel_k) {
                    const std::int64_t depth = std::min(panel_k, k - at);
                    const auto panel_a = rows_a.read(table, i, rows, at, depth, scratch, a_buffer);
                    const auto panel_b = rows_b.read(table, j, cols, at, depth, scratch, b_buffer);
                    table.dot_block({.a = panel_a.data,
                                     .b = panel_b.data,
                                     .c = c_buffer,
                                     .a_stride = panel_a.stride,
                                     .b_stride = panel_b.stride,
                                     .c_stride = panel_rows,
                                     .rows_a = rows,
                                     .rows_b = cols,
                                     .k = depth});
                }
                for (std::int64_t r = 0; r < rows; ++r) c.write(table, i + r, j, cols, c_buffer + r * panel_rows);
            }
        }
    });
}

Array matmul(const Operand& a, const Operand& b, DType out_dtype) {
    Array out = Array::allocate(out_dtype, matmul_shape(a.shape(), b.shape()));
    matmul_into(a, b, out);
    return out;
}

}  // namespace breccia
