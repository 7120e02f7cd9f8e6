// SPDX-License-Identifier: Apache-2.0
#include "tensor/output.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "breccia/error.hpp"

namespace breccia {
namespace {

struct Extent {
    std::uintptr_t begin = 0, end = 0;
};

// The addresses an array's elements lie between.
Extent extent_of(const Array& array) {
    const auto base = reinterpret_cast<std::uintptr_t>(array.data);
    if (array.size() == 0) return {base, base};
    std::int64_t low = 0, high = static_cast<std::int64_t>(array.type.size());
    for (std::size_t i = 0; i < array.rank(); ++i) {
        const std::int64_t reach = (array.shape[i] - 1) * array.strides[i];
        (reach < 0 ? low : high) += reach;
    }
    return {base + static_cast<std::uintptr_t>(low), base + static_cast<std::uintptr_t>(high)};
}

// Whether two indices might address the same bytes: from the fastest axis outwards, each step must clear what is
// inside.
bool may_share_elements(const Array& array) {
    if (array.size() == 0) return false;
    std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // stride, extent
    for (std::size_t i = 0; i < array.rank(); ++i)
        if (array.shape[i] > 1) axes.emplace_back(std::abs(array.strides[i]), array.shape[i]);
    std::ranges::sort(axes);
    auto inside = static_cast<std::int64_t>(array.type.size());
    for (const auto& [stride, extent] : axes) {
        if (stride < inside) return true;
        inside += stride * (extent - 1);
    }
    return false;
}

template <class T>
void put(std::byte* p, T x) {
    std::memcpy(p, &x, sizeof x);
}

void write_number(std::byte* p, DType dtype, float x) {
    switch (dtype) {
        case DType::float32: return put(p, x);
        case DType::float64: return put(p, static_cast<double>(x));
        case DType::float16: return put(p, to_float16(x));
        case DType::bfloat16: return put(p, to_bfloat16(x));
    }
}

}  // namespace

void check_output(const Array& out, const Shape& shape) {
    if (!out.type.is_number())
        throw_type("out must be a float32, float64, float16 or bfloat16 array, got dtype " + out.type.name());
    if (out.shape != shape) throw_value("out.shape must be " + to_string(shape) + ", got " + to_string(out.shape));
    if (may_share_elements(out)) throw_value("out must not be a view whose elements share memory");
}

void check_no_overlap(const Array& out, const Array& operand) {
    const Extent a = extent_of(out), b = extent_of(operand);
    if (a.begin < b.end && b.begin < a.end) throw_value("out must not overlap an operand's memory");
}

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
    for (std::int64_t i = 0; i < n; ++i) write_number(at(row, begin + i), dtype, x[i]);
}

OutputMatrix output_matrix(const Array& out, int axis, const Shape& batch, std::int64_t index) {
    const NumberMatrix m = number_matrix(out, axis, batch, index);
    return {const_cast<std::byte*>(m.data), m.dtype, m.row_stride, m.col_stride};
}

}  // namespace breccia
