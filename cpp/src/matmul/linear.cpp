// SPDX-License-Identifier: Apache-2.0
//
// A product by the transpose of a stored weight, and the bias.
#include "breccia/error.hpp"
#include "matmul/product.hpp"
#include "runtime/ieee_arithmetic.hpp"
#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {
namespace {

Shape linear_shape(const Shape& x, const Shape& w) {
    if (x.size() < 2) throw_value("x must be at least 2-D, got shape " + to_string(x));
    if (w.size() != 2) throw_value("w must be 2-D, got shape " + to_string(w));
    if (x.back() != w.back())
        throw_value("x must have the " + std::to_string(w.back()) + " columns of w, got shape " + to_string(x));
    Shape shape = x;
    shape.back() = w.front();
    return shape;
}

void check_bias(const Array* bias, const Shape& w) {
    if (bias == nullptr) return;
    check_numbers(*bias, "bias");
    if (bias->shape != Shape{w.front()})
        throw_value("bias must have shape " + to_string({w.front()}) + ", got " + to_string(bias->shape));
}

// One number of an array, which float64 holds exactly, whatever its type.
double load(const std::byte* at, DType dtype) {
    const auto as = [&]<class T>(T value) {
        std::memcpy(&value, at, sizeof value);
        return value;
    };
    switch (dtype) {
        case DType::float32: return as(float{});
        case DType::float64: return as(double{});
        case DType::float16: return to_float(as(Float16{}));
        case DType::bfloat16: return to_float(as(BFloat16{}));
    }
    return 0;
}

void store(std::byte* at, DType dtype, double value) {
    const auto put = [&](auto rounded) { std::memcpy(at, &rounded, sizeof rounded); };
    const auto single = static_cast<float>(value);
    switch (dtype) {
        case DType::float32: return put(single);
        case DType::float64: return put(value);
        case DType::float16: return put(to_float16(single));
        case DType::bfloat16: return put(to_bfloat16(single));
    }
}

// Adds the bias to each row. A sum of two float32 numbers in float64, rounded to float32, is that of float32.
void add_bias(const Array& out, const Array& bias) {
    const IeeeArithmetic arithmetic;
    const std::int64_t columns = out.shape.back();
    const std::int64_t rows = columns == 0 ? 0 : out.size() / columns;
    std::vector<double> added(static_cast<std::size_t>(columns));
    for (std::int64_t j = 0; j < columns; ++j)
        added[static_cast<std::size_t>(j)] =
            load(static_cast<const std::byte*>(bias.data) + j * bias.strides[0], bias.type.dtype());
    const std::size_t outer = out.rank() - 1;
    Shape at(outer, 0);
    for (std::int64_t row = 0; row < rows; ++row) {
        auto* first = static_cast<std::byte*>(out.data);
        for (std::size_t d = 0; d < outer; ++d) first += at[d] * out.strides[d];
        for (std::int64_t j = 0; j < columns; ++j) {
            std::byte* item = first + j * out.strides.back();
            store(item, out.type.dtype(), load(item, out.type.dtype()) + added[static_cast<std::size_t>(j)]);
        }
        for (std::size_t d = outer; d-- > 0;) {
            if (++at[d] < out.shape[d]) break;
            at[d] = 0;
        }
    }
}

}  // namespace

void linear_into(const Operand& x, const Operand& w, const Array* bias, const Array& out, Precision precision) {
    check_operand(x, "x");
    check_operand(w, "w");
    check_output(out, linear_shape(x.shape(), w.shape()));
    check_bias(bias, w.shape());
    check_no_overlap(out, x);
    check_no_overlap(out, w);
    if (bias != nullptr) check_no_overlap(out, *bias);
    multiply_checked(kernels(), x, w, -1, out, precision);
    if (bias != nullptr) add_bias(out, *bias);
}

Array linear(const Operand& x, const Operand& w, const Array* bias, DType out_dtype, Precision precision) {
    check_operand(x, "x");
    check_operand(w, "w");
    Array out = Array::allocate(out_dtype, linear_shape(x.shape(), w.shape()));
    linear_into(x, w, bias, out, precision);
    return out;
}

}  // namespace breccia::inline v0_4
