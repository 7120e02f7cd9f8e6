// SPDX-License-Identifier: Apache-2.0
//
// Writing float32 results into an array of any high-precision type and strides.
#pragma once

#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

struct OutputMatrix {
    std::byte* data = nullptr;
    DType dtype = DType::float32;
    std::int64_t row_stride = 0, col_stride = 0;  // bytes

    /// Where an element lies.
    [[nodiscard]] std::byte* at(std::int64_t row, std::int64_t col) const;
    /// Where the elements lie side by side, aligned, or null.
    [[nodiscard]] void* in_place(std::int64_t row, std::int64_t begin, std::int64_t n) const;
    /// Rounds to the output's type, nearest even.
    void write(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, const float* x) const;

private:
    /// Whether the elements lie side by side, aligned.
    [[nodiscard]] bool is_run(std::int64_t row, std::int64_t begin, std::int64_t n) const;
};

OutputMatrix output_matrix(const Array& out, int axis, const Shape& batch, std::int64_t index);

}  // namespace breccia::inline v0_4
