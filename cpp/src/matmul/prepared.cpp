// SPDX-License-Identifier: Apache-2.0
#include "breccia/prepared.hpp"

#include "matmul/interleaved.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {
namespace {

bool is_aligned(const ScaledTensor& w) {
    return reinterpret_cast<std::uintptr_t>(w.data().data) % cache_line == 0 &&
           reinterpret_cast<std::uintptr_t>(w.scale().data) % cache_line == 0;
}

bool is_in_order(const ScaledTensor& w) {
    const auto in_order = [&](const Array& array) {
        return (w.layout().axis == -1 ? array : array.transposed()).is_contiguous();
    };
    const bool wide = is_coded(w.scale_type()) || w.scale_type() == ScaleType::float32;
    return wide && w.is_packed() == is_packed(w.recipe().element) && in_order(w.data()) &&
           (w.layout().kind == LayoutKind::per_tensor || in_order(w.scale())) &&
           (!w.zero_point() || w.layout().kind == LayoutKind::per_tensor || in_order(*w.zero_point()));
}

// A contiguous copy of an array's items, last axis `axis`.
Array copy_in_order(const Array& from, int axis) {
    const Array view = axis == -2 && from.rank() >= 2 ? from.transposed() : from;
    Array to = Array::allocate(from.type, view.shape);
    copy_elements(view, to.as<std::byte>());
    return axis == -2 && from.rank() >= 2 ? to.transposed() : to;
}

// Two codes to a byte, where the operand has one.
Array pack_codes(const Array& from) {
    Shape shape = from.shape;
    const std::int64_t cols = shape.back();
    shape.back() = (cols + 1) / 2;
    Array to = Array::allocate(ElementType::uint8(), shape);
    const auto* in = from.as<const std::uint8_t>();
    auto* out = to.as<std::uint8_t>();
    for (std::int64_t row = 0; row < (cols == 0 ? 0 : from.size() / cols); ++row, in += cols)
        for (std::int64_t i = 0; i < cols; i += 2)
            *out++ = static_cast<std::uint8_t>((in[i] & 15) | (i + 1 < cols ? in[i + 1] << 4 : 0));
    return to;
}

Array widened(const KernelTable& table, const Array& scale) {
    const DType dtype = scale.type.dtype();
    if (dtype == DType::float32) return scale;
    Array to = Array::allocate(DType::float32, scale.shape);
    table.dequantize.load[static_cast<std::size_t>(dtype)](scale.data, scale.size(), to.as<float>());
    return to;
}

ScaledTensor ready(const KernelTable& table, const ScaledTensor& w) {
    if (w.data().rank() < 2 || (is_in_order(w) && is_aligned(w))) return w;
    const int axis = w.layout().axis;
    const auto turned = [&](const Array& array) { return axis == -2 ? array.transposed() : array; };
    Array data = turned(copy_in_order(w.data(), axis));
    if (!w.is_packed() && is_packed(w.recipe().element)) data = pack_codes(data);
    // A scale without its constant axis has nothing to turn.
    const bool full = w.scale().rank() == w.data().rank();
    const auto copy_blocks = [&](const Array& array) { return copy_in_order(array, full ? axis : -1); };
    Array scale = copy_blocks(w.scale());
    if (scale.type.is_half_word()) scale.type = DType::bfloat16;
    if (scale.type.is_number() && !is_coded(w.recipe().scale)) {
        if (full) scale = turned(scale);
        scale = widened(table, scale);
        if (full) scale = turned(scale);
    }
    Extras extras{.zero_point = std::nullopt,
                  .global_scale = w.global_scale(),
                  .shape = w.shape(),
                  .original_dtype = w.original_dtype()};
    if (w.zero_point()) extras.zero_point = copy_blocks(*w.zero_point());
    return {turned(data), std::move(scale), w.recipe(), w.layout(), std::move(extras)};
}

}  // namespace

PreparedWeight::PreparedWeight(const ScaledTensor& weight) : tensor_(weight) {
    check_memory(weight, "weight");
    if (weight.interleaved_ != nullptr || element_count(weight.shape()) == 0) return;
    const IeeeArithmetic arithmetic;
    const KernelTable& table = kernels();
    if (weight.data().rank() < 2 || !is_in_order(weight)) tensor_ = ready(table, weight);
    tensor_.interleaved_ = interleave(table, tensor_);
    if (tensor_.interleaved_ == nullptr) tensor_ = ready(table, weight);
}

std::int64_t ScaledTensor::packed_nbytes() const {
    if (interleaved_ == nullptr) return 0;
    const auto size = [](const std::optional<Array>& array) { return array ? array->size() : 0; };
    return interleaved_->codes.size() + interleaved_->scales.size() + size(interleaved_->zero_points) +
           size(interleaved_->special);
}

PreparedWeight PreparedWeight::transposed() const { return {Ready{}, tensor_.transposed()}; }

}  // namespace breccia::inline v0_4
