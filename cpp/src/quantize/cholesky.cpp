// SPDX-License-Identifier: Apache-2.0
#include "quantize/cholesky.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "breccia/ops.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t panel = 128;

// A square block in float64, row by row; row i of the transpose of L is what forward substitution adds.
using Doubles = std::vector<double>;

// Factors the first `n` rows and columns of `a`, and leaves transpose(L) in it.
bool factor(Doubles& a, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        double* row = a.data() + i * panel;
        if (!(row[i] > 0) || !std::isfinite(row[i])) return false;
        const double pivot = std::sqrt(row[i]);
        for (std::int64_t j = i; j < n; ++j) row[j] /= pivot;
        for (std::int64_t k = i + 1; k < n; ++k)
            for (std::int64_t j = k; j < n; ++j) a[static_cast<std::size_t>(k * panel + j)] -= row[k] * row[j];
    }
    return true;
}

// Solves x @ transpose(L) = a, of which `turned` is transpose(L), and puts the row x in the place of a.
void substitute(const Doubles& turned, std::int64_t n, float* a) {
    double x[panel];
    std::copy_n(a, n, x);
    for (std::int64_t i = 0; i < n; ++i) {
        const double* row = turned.data() + i * panel;
        x[i] /= row[i];
        for (std::int64_t j = i + 1; j < n; ++j) x[j] -= x[i] * row[j];
    }
    for (std::int64_t i = 0; i < n; ++i) a[i] = static_cast<float>(x[i]);
}

}  // namespace

bool cholesky(const Call& call, LowerHalf& a) {
    const std::int64_t n = a.size();
    std::vector<float> product(static_cast<std::size_t>(n * panel));
    Doubles diagonal(static_cast<std::size_t>(panel * panel));
    const auto matrix = [](float* numbers, Shape shape, std::int64_t stride) {
        Array array = Array::borrow(numbers, DType::float32, std::move(shape));
        array.strides[0] = stride * static_cast<std::int64_t>(sizeof(float));
        return array;
    };
    for (std::int64_t begin = 0; begin < n; begin += panel) {
        const std::int64_t width = std::min(panel, n - begin), rest = n - begin;
        // Takes from every row that is left its product with the columns before, a band of rows at a time.
        const Array right = matrix(a.row(begin), {width, begin}, a.stride(begin)).transposed();
        for (std::int64_t row = begin; begin > 0 && row < n;) {
            const std::int64_t end = std::min(n, (row / LowerHalf::band + 1) * LowerHalf::band);
            matmul_into(matrix(a.row(row), {end - row, begin}, a.stride(row)), right,
                        Array::borrow(product.data() + (row - begin) * width, DType::float32, {end - row, width}));
            row = end;
        }
        const auto subtract = [&](std::int64_t i) {
            if (begin == 0) return;
            float* row = a.row(begin + i) + begin;
            for (std::int64_t j = 0; j < std::min(width, i + 1); ++j)
                row[j] -= product[static_cast<std::size_t>(i * width + j)];
        };
        for (std::int64_t i = 0; i < width; ++i) {
            subtract(i);
            for (std::int64_t j = 0; j <= i; ++j)
                diagonal[static_cast<std::size_t>(j * panel + i)] = static_cast<double>(a.row(begin + i)[begin + j]);
        }
        if (!factor(diagonal, width)) return false;
        for (std::int64_t i = 0; i < width; ++i)
            for (std::int64_t j = 0; j <= i; ++j)
                a.row(begin + i)[begin + j] = static_cast<float>(diagonal[static_cast<std::size_t>(j * panel + i)]);
        parallel_for_each(call, rest - width, 16, [&](std::int64_t i) {
            subtract(width + i);
            substitute(diagonal, width, a.row(begin + width + i) + begin);
        });
    }
    return true;
}

}  // namespace breccia::inline v0_4
