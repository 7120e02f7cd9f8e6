// SPDX-License-Identifier: Apache-2.0
#include "tensor/checks.hpp"

#include <algorithm>
#include <cstdlib>

#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
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

bool overlap(const Array& a, const Array& b) {
    const Extent x = extent_of(a), y = extent_of(b);
    return x.begin < y.end && y.begin < x.end;
}

// Whether two indices might address the same bytes: from the fastest axis outwards, each step must clear what is
// inside.
bool may_share_elements(const Array& array) {
    if (array.is_contiguous() || array.size() == 0) return false;
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

void check_memory(const Array& array, std::string_view name) {
    if (array.data == nullptr && array.size() != 0)
        throw_value(name, " must be in memory the core can read, got a null pointer");
}

void check_writable(const Array& array, const std::string& name) {
    if (array.read_only) throw_value(name, " must be memory that can be written, got a read-only array");
}

// Codes of a format are bytes, whichever of the names for them an array has.
bool holds(ElementType type, ElementType wanted, std::optional<Format> format) {
    if (type == wanted) return true;
    if (wanted == ElementType(DType::bfloat16)) return type.is_half_word();
    if (!wanted.is_byte() || !format) return false;
    if (type.is_codes()) return type.format() == *format && !is_packed(*format);
    if (type.is_packed_codes()) return type.format() == *format;
    return type.is_byte();
}

// `format`: of the codes the part holds, if they are codes.
void check_part(const Array& part, const std::string& name, const Shape& shape, ElementType type,
                std::optional<Format> format) {
    validate(part, name);
    if (!holds(part.type, type, format))
        throw_type(name, " must be of dtype ", type.name(), ", got ", part.type.name());
    if (part.shape != shape) throw_value(name, ".shape must be ", shape, ", got ", part.shape);
    if (!part.is_contiguous())
        throw_value(name, " must be C-contiguous, got strides ", part.strides, " for shape ", shape);
    check_memory(part, name);
    check_writable(part, name);
}

void check_part(const std::optional<Array>& part, const std::string& name, bool wanted, std::string_view recipe,
                const Shape& shape, ElementType type) {
    if (part.has_value() != wanted)
        throw_value(name, wanted ? " must be an array for " : " must be left out for ", recipe, ", got ",
                    wanted ? "none" : "an array");
    if (part) check_part(*part, name, shape, type, std::nullopt);
}

}  // namespace

Parts::Parts(const ScaledTensor& scaled) {
    add(scaled.data());
    add(scaled.scale());
    add(scaled.zero_point());
    add(scaled.global_scale());
}

Parts::Parts(const CastOutput& out) {
    add(out.data);
    add(out.scale);
    add(out.zero_point);
    add(out.global_scale);
}

Parts::Parts(const Operand& operand)
    : Parts(operand.scaled() != nullptr ? Parts(*operand.scaled()) : Parts(*operand.array())) {}

bool has_blocks_of_rows(const Layout& layout) {
    return layout.axis == -1 &&
           (layout.kind == LayoutKind::per_block_k || (layout.kind == LayoutKind::per_block_mn && layout.block_m == 1));
}

void check_numbers(const Array& array, std::string_view name) {
    if (!array.type.is_number())
        throw_type(name, " must be a float32, float64, float16 or bfloat16 array, got dtype ", array.type.name());
    validate(array, name);
    check_memory(array, name);
}

void check_memory(const ScaledTensor& scaled, std::string_view name) {
    for (const Array* part : Parts(scaled)) check_memory(*part, name);
}

void check_operand(const Operand& operand, std::string_view name) {
    if (operand.scaled() != nullptr) return check_memory(*operand.scaled(), name);
    if (!operand.array()->type.is_number())
        throw_type(name, " must be a ScaledTensor or a float32, float64, float16 or bfloat16 array, got dtype ",
                   operand.array()->type.name());
    check_numbers(*operand.array(), name);
}

void check_output(const Array& out, const Shape& shape, std::int64_t last) {
    const bool fits = out.rank() == shape.size() && out.shape.back() == last &&
                      std::equal(shape.begin(), shape.end() - 1, out.shape.begin());
    if (fits) return check_output(out, out.shape);
    Shape wanted = shape;
    wanted.back() = last;
    check_output(out, wanted);
}

void check_output(const Array& out, const Shape& shape) {
    check_numbers(out, "out");
    check_writable(out, "out");
    if (out.shape != shape) throw_value("out.shape must be ", shape, ", got ", out.shape);
    if (may_share_elements(out)) throw_value("out must not be a view whose elements share memory");
}

void check_output(const CastOutput& out, const CastPlan& plan, const Recipe& recipe) {
    const auto scale_format =
        is_coded(recipe.scale) ? std::optional(format_of_scale(recipe.scale)) : std::optional<Format>();
    check_part(out.data, "data", plan.data_shape, plan.data_type, recipe.element);
    check_part(out.scale, "scale", plan.scale_shape, plan.scale_type, scale_format);
    check_part(out.zero_point, "zero_point", plan.has_zero_point, recipe.name, plan.scale_shape, plan.zero_point_type);
    check_part(out.global_scale, "global_scale", plan.has_global_scale, recipe.name, plan.global_scale_shape,
               DType::float32);
    const Parts parts(out);
    for (const Array* const* a = parts.begin(); a != parts.end(); ++a)
        for (const Array* const* b = a + 1; b != parts.end(); ++b)
            if (overlap(**a, **b)) throw_value("data, scale, zero_point and global_scale must not overlap each other");
}

void check_no_overlap(const Parts& out, const Parts& operand) {
    for (const Array* a : out)
        for (const Array* b : operand)
            if (overlap(*a, *b)) throw_value("out must not overlap an operand's memory");
}

}  // namespace breccia::inline v0_4
