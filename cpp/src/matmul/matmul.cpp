// SPDX-License-Identifier: Apache-2.0
//
// The verbs of two operands: matmul, and linear, which multiplies by the transpose of a stored weight and adds a bias.
#include <algorithm>
#include <atomic>
#include <utility>

#include "breccia/cpu.hpp"
#include "matmul/choose.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

// What a verb multiplies, of arguments that it has checked.
struct Factors {
    const Call& call;
    const Operand &a, &b;
    int k_axis;  // of b
    const Array& out;
    Precision precision = Precision::exact;
    const Array* bias = nullptr;
};

WorkBuffer<double> numbers_of(const Array& bias) {
    WorkBuffer<double> numbers(bias.size());
    for (std::int64_t j = 0; j < bias.size(); ++j)
        numbers.data()[j] = load_number<double>(bias.as<const std::byte>() + j * bias.strides[0], bias.type.dtype());
    return numbers;
}

// Calls multiply(product) for the products that there are: one for each matrix of a batch of weights, whose order is
// left open, else one.
template <class Multiply>
void for_each_product(const Factors& f, Multiply multiply_one) {
    const Shape& shape = f.out.shape;
    if (f.out.size() == 0) return;
    const WorkBuffer<double> bias = f.bias != nullptr ? numbers_of(*f.bias) : WorkBuffer<double>();
    const Shape batch = batch_shape(shape);
    const std::int64_t members = element_count(batch);
    const bool one_weight = element_count(batch_shape(f.b.shape())) == 1;
    const auto product_of = [&](std::int64_t begin, std::int64_t end) {
        Product product{.call = f.call,
                        .w = Rows(f.b, f.k_axis, batch, one_weight ? 0 : begin),
                        .prepared = PreparedRows(f.b, batch, one_weight ? 0 : begin),
                        .a = {},
                        .c = {},
                        .m = shape[shape.size() - 2],
                        .n = shape.back(),
                        .k = f.a.shape().back(),
                        .precision = f.precision,
                        .bias = bias.data()};
        for (std::int64_t index = begin; index < end; ++index) {
            product.a.push_back(Rows(f.a, -1, batch, index));
            product.c.push_back(output_matrix(f.out, -1, batch, index));
        }
        return product;
    };
    if (one_weight)
        multiply_one(product_of(0, members));
    else
        for_each_large(f.call, members, [&](std::int64_t i) { multiply_one(product_of(i, i + 1)); });
}

void check_product(const Operand& a, const Operand& b, const Array& out) {
    check_operand(a, "a");
    check_operand(b, "b");
    check_output(out, matmul_shape(a.shape(), b.shape()));
    check_no_overlap(out, a);
    check_no_overlap(out, b);
}

void check_linear_shapes(const Shape& x, const Shape& w) {
    if (x.size() < 2) throw_value("x must be at least 2-D, got shape ", x);
    if (w.size() != 2) throw_value("w must be 2-D, got shape ", w);
    if (x.back() != w.back()) throw_value("x must have the ", w.back(), " columns of w, got shape ", x);
}

void check_bias(const Array* bias, std::int64_t rows) {
    if (bias == nullptr) return;
    check_numbers(*bias, "bias");
    if (bias->rank() != 1 || bias->shape[0] != rows)
        throw_value("bias must have shape ", to_string({rows}), ", got ", bias->shape);
}

}  // namespace

Shape matmul_shape(const Shape& a, const Shape& b) {
    if (a.size() < 2) throw_value("a must be at least 2-D, got shape ", a);
    if (b.size() < 2) throw_value("b must be at least 2-D, got shape ", b);
    const std::int64_t k_a = a.back(), k_b = b[b.size() - 2];
    if (k_a != k_b)
        throw_value("matmul shape mismatch: b must be (..., ", k_a, ", N) for a of shape ", a, ", got shape ", b);
    const Shape batch_a = batch_shape(a), batch_b = batch_shape(b);
    Shape shape(std::max(batch_a.size(), batch_b.size()));
    for (std::size_t i = 0; i < shape.size(); ++i) {
        const auto extent = [&](const Shape& batch) {
            return i < batch.size() ? batch[batch.size() - 1 - i] : std::int64_t{1};
        };
        const std::int64_t n_a = extent(batch_a), n_b = extent(batch_b);
        if (n_a != n_b && n_a != 1 && n_b != 1)
            throw_value("matmul batch mismatch: the leading axes of a, ", batch_a, ", and b, ", batch_b,
                        ", do not broadcast");
        shape[shape.size() - 1 - i] = n_a == 1 ? n_b : n_a;
    }
    shape.push_back(a[a.size() - 2]);
    shape.push_back(b.back());
    return shape;
}

void multiply_checked(const Call& call, const Operand& a, const Operand& b, int k_axis, const Array& out,
                      Precision precision, const Array* bias) {
    for_each_product({call, a, b, k_axis, out, precision, bias}, [](const Product& product) { multiply(product); });
}

void matmul_into(const Operand& a, const Operand& b, const Array& out, Precision precision) {
    const Call call;
    check_product(a, b, out);
    multiply_checked(call, a, b, -2, out, precision);
}

Array matmul(const Operand& a, const Operand& b, DType out_dtype, Precision precision) {
    Array out = Array::allocate(out_dtype, matmul_shape(a.shape(), b.shape()));
    matmul_into(a, b, out, precision);
    return out;
}

void linear_into(const Operand& x, const Operand& w, const Array* bias, const Array& out, Precision precision) {
    const Call call;
    check_operand(x, "x");
    check_operand(w, "w");
    check_linear_shapes(x.shape(), w.shape());
    check_output(out, x.shape(), w.shape().front());
    check_bias(bias, w.shape().front());
    check_no_overlap(out, x);
    check_no_overlap(out, w);
    if (bias != nullptr) check_no_overlap(out, *bias);
    multiply_checked(call, x, w, -1, out, precision, bias);
}

Array linear(const Operand& x, const Operand& w, const Array* bias, DType out_dtype, Precision precision) {
    check_operand(x, "x");
    check_operand(w, "w");
    check_linear_shapes(x.shape(), w.shape());
    Shape shape = x.shape();
    shape.back() = w.shape().front();
    Array out = Array::allocate(out_dtype, std::move(shape));
    linear_into(x, w, bias, out, precision);
    return out;
}

Product question(const Call& call, const Operand& a, const Operand& b, Precision precision) {
    const Shape shape = matmul_shape(a.shape(), b.shape());
    return {.call = call,
            .w = Rows(b, -2, {}, 0),
            .prepared = PreparedRows(b, {}, 0),
            .a = {Rows(a, -1, {}, 0)},
            .c = {},
            .m = shape[shape.size() - 2],
            .n = shape.back(),
            .k = a.shape().back(),
            .precision = precision};
}

bool multiply_by(std::string_view path, const Operand& a, const Operand& b, const Array& out, const Array* bias) {
    const Call call;
    const auto* chosen = std::ranges::find(every_path, path, &Path::name);
    if (chosen == std::end(every_path)) throw_value("path must be one that there is, got '", path, "'");
    check_product(a, b, out);
    std::atomic<bool> all{true};
    for_each_product({.call = call, .a = a, .b = b, .k_axis = -2, .out = out, .bias = bias},
                     [&](const Product& product) {
                         if (!(*chosen)->suits(product) || (*chosen)->multiply(product, 3) != Refusal::none)
                             all = false;
                     });
    return all;
}

}  // namespace breccia::inline v0_4
