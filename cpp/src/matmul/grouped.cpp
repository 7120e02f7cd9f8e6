// SPDX-License-Identifier: Apache-2.0
//
// Products of the rows of many experts by the weight of each.
#include <algorithm>

#include "breccia/cpu.hpp"
#include "breccia/ops.hpp"
#include "matmul/product.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

std::byte* first_of(const Array& array, std::int64_t index) {
    auto* data = static_cast<std::byte*>(array.data);
    return data == nullptr ? data : data + index * array.strides[0];  // null where there are no elements
}

Array rows_of(const Array& whole, std::int64_t begin, std::int64_t end) {
    Array part = whole;
    if (begin < end) part.data = first_of(whole, begin);  // else behind the last row, where no address need be
    part.shape[0] = end - begin;
    return part;
}

Array member_of(const Array& stack, std::int64_t index) {
    Array part = stack;
    part.data = first_of(stack, index);
    part.shape.erase(part.shape.begin());
    part.strides.erase(part.strides.begin());
    return part;
}

// A part of each array of a tensor that has an axis for it; scales of a whole tensor hold for every part.
template <class Cut>
ScaledTensor part_of(const ScaledTensor& whole, const Shape& shape, Cut cut) {
    const auto part = [&](const Array& array) { return array.rank() == 0 ? array : cut(array); };
    Extras extras{.shape = shape, .original_dtype = whole.original_dtype()};
    if (whole.zero_point()) extras.zero_point = part(*whole.zero_point());
    if (const auto& global = whole.global_scale()) extras.global_scale = global->size() == 1 ? *global : part(*global);
    return {cut(whole.data()), part(whole.scale()), whole.recipe(), whole.layout(), std::move(extras)};
}

void check_weights(const ScaledTensor& w) {
    check_memory(w, "w_stack");
    if (w.shape().size() != 3 || w.shape()[0] == 0)
        throw_value("w_stack must be (E, N, K) of one expert or more, got shape ", w.shape());
}

void check_rows(const Operand& x, std::int64_t columns) {
    check_operand(x, "x");
    if (x.shape().size() != 2 || x.shape()[1] != columns)
        throw_value("x must be (T, ", columns, "), got shape ", x.shape());
    if (x.scaled() == nullptr) return;
    const Layout& layout = x.scaled()->layout();
    if (layout.axis != -1 || (layout.kind == LayoutKind::per_block_mn && layout.block_m != 1))
        throw_value("x must be scaled along its rows, each by itself, got ", name_of(layout.kind));
}

void check_offsets(std::span<const std::int64_t> offsets, std::int64_t experts, std::int64_t rows) {
    if (std::ssize(offsets) != experts + 1)
        throw_value("offsets must have ", experts + 1, " numbers, one more than experts, got ", offsets.size());
    if (offsets.front() != 0 || offsets.back() > rows || !std::ranges::is_sorted(offsets))
        throw_value("offsets must rise from 0 to at most ", rows, ", got ", Shape(offsets.begin(), offsets.end()));
}

void fill_with_zeros(const Array& rows) {
    for (std::int64_t i = 0; i < rows.shape[0]; ++i)
        for (std::int64_t j = 0; j < rows.shape[1]; ++j)
            std::fill_n(first_of(rows, i) + j * rows.strides[1], rows.type.size(), std::byte{0});
}

}  // namespace

void grouped_matmul_into(const Operand& x, const ScaledTensor& w_stack, std::span<const std::int64_t> offsets,
                         const Array& out, Precision precision) {
    const Call call;
    check_weights(w_stack);
    const std::int64_t experts = w_stack.shape()[0], n = w_stack.shape()[1], k = w_stack.shape()[2];
    check_rows(x, k);
    const std::int64_t rows = x.shape()[0];
    check_offsets(offsets, experts, rows);
    check_output(out, {rows, n});
    check_no_overlap(out, x);
    check_no_overlap(out, w_stack);
    fill_with_zeros(rows_of(out, offsets.back(), rows));

    const auto multiply = [&](std::int64_t expert) {
        const std::int64_t begin = offsets[static_cast<std::size_t>(expert)];
        const std::int64_t end = offsets[static_cast<std::size_t>(expert) + 1];
        if (begin == end) return;
        const auto its_rows = [&](const Array& array) { return rows_of(array, begin, end); };
        const ScaledTensor weight =
            part_of(w_stack, {n, k}, [&](const Array& array) { return member_of(array, expert); });
        if (x.scaled() != nullptr) {
            const ScaledTensor activations = part_of(*x.scaled(), {end - begin, k}, its_rows);
            multiply_checked(call, activations, weight, -1, its_rows(out), precision);
        } else {
            const Array activations = its_rows(*x.array());
            multiply_checked(call, activations, weight, -1, its_rows(out), precision);
        }
    };
    for_each_large(call, experts, multiply);
}

Array grouped_matmul(const Operand& x, const ScaledTensor& w_stack, std::span<const std::int64_t> offsets,
                     DType out_dtype, Precision precision) {
    check_weights(w_stack);
    check_rows(x, w_stack.shape()[2]);
    Array out = Array::allocate(out_dtype, {x.shape()[0], w_stack.shape()[1]});
    grouped_matmul_into(x, w_stack, offsets, out, precision);
    return out;
}

}  // namespace breccia::inline v0_4
