// SPDX-License-Identifier: Apache-2.0
#include "breccia/array.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>

#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {

namespace {

// A kind of number or a format from beyond their lists, whose size and name nobody can tell.
bool is_listed(ElementType type) {
    if (type.is_number()) return static_cast<int>(type.dtype()) < dtype_count;
    if (type.is_codes() || type.is_packed_codes()) return static_cast<std::size_t>(type.format()) < format_table.size();
    return !type.is_unknown();
}

void check_type(ElementType type, std::string_view name) {
    if (!is_listed(type)) throw_type(name, " must have one of the core's types, got an unknown one");
}

// Throws Error unless offsets from the first element, and addresses where there is memory, fit in 63 bits.
void check_reach(const Array& array, std::string_view name) {
    if (array.size() == 0) return;
    const auto fail = [&] {
        throw_value(name, " must have elements within 2^63 bytes, got shape ", array.shape, " with strides ",
                    array.strides);
    };
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    std::int64_t low = 0, high = static_cast<std::int64_t>(array.type.size());
    for (std::size_t i = 0; i < array.rank(); ++i) {
        const std::int64_t steps = array.shape[i] - 1, stride = array.strides[i];
        if (steps == 0 || stride == 0) continue;
        if (stride < -most || steps > most / std::abs(stride)) fail();
        const std::int64_t reach = steps * stride;
        if (reach < 0 ? low < -most - reach : high > most - reach) fail();
        (reach < 0 ? low : high) += reach;
    }
    if (array.data == nullptr) return;
    const auto first = reinterpret_cast<std::uintptr_t>(array.data);
    if (first < static_cast<std::uintptr_t>(-low) || first + static_cast<std::uintptr_t>(high) < first) fail();
}

}  // namespace

void validate(const Array& array, std::string_view name) {
    check_type(array.type, name);
    if (array.strides.size() != array.rank())
        throw_value(name, " must have one stride for each axis, got shape ", array.shape, " and strides ",
                    array.strides);
    element_count(array.shape, array.type.size());
    check_reach(array, name);
}

Array::Array(void* memory, ElementType element, Shape extents, Shape steps, std::shared_ptr<const void> holder)
    : data(memory), type(element), shape(std::move(extents)), strides(std::move(steps)), owner(std::move(holder)) {
    validate(*this);
}

Format parse_format(std::string_view name) {
    if (const auto format = find_format(name)) return *format;
    std::string known;
    for (const FormatInfo& format : format_table)
        known += (known.empty() ? "'" : ", '") + std::string(format.name) + "'";
    throw_value("format must be one of ", known, ", got '", name, "'");
}

ElementType ElementType::parse(std::string_view name) {
    for (int i = 0; i < dtype_count; ++i)
        if (name == name_of(static_cast<DType>(i))) return static_cast<DType>(i);
    if (name == "uint8") return uint8();
    if (name == "int8") return int8();
    if (name == "uint16") return uint16();
    constexpr std::string_view two = "_x2";
    if (name.ends_with(two))
        if (const auto format = find_format(name.substr(0, name.size() - two.size())); format && is_packed(*format))
            return packed_codes(*format);
    if (const auto format = find_format(name)) return codes(*format);
    return {};
}

std::size_t ElementType::size() const {
    if (is_number() && is_listed(*this)) return size_of(dtype());
    return is_half_word() ? 2 : 1;
}

std::string ElementType::name() const {
    if (!is_listed(*this)) return "unknown";
    switch (kind_) {
        case Kind::number: return std::string(name_of(dtype()));
        case Kind::byte: return index_ == 0 ? "uint8" : "int8";
        case Kind::half_word: return "uint16";
        case Kind::codes: return std::string(info(format()).name);
        case Kind::packed: return std::string(info(format()).name) + "_x2";
        case Kind::unknown: break;
    }
    return "unknown";
}

std::string to_string(const Shape& shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    return text + (shape.size() == 1 ? ",)" : ")");
}

std::int64_t element_count(const Shape& shape, std::size_t item_size) {
    if (std::ranges::any_of(shape, [](std::int64_t n) { return n < 0; }))
        throw_value("shape ", shape, " must not have a negative extent");
    constexpr std::int64_t longest = std::int64_t{1} << 60;  // twice as much is a number still
    if (std::ranges::any_of(shape, [](std::int64_t n) { return n > longest; }))
        throw_value("shape ", shape, " must not have an extent above 2^60");
    if (std::ranges::find(shape, 0) != shape.end()) return 0;
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) {
        if (extent > std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(item_size) / count)
            throw_value("shape ", shape, " must have fewer than 2^63 bytes");
        count *= extent;
    }
    return count;
}

Shape contiguous_strides(const Shape& shape, std::size_t item_size) {
    Shape strides(shape.size(), static_cast<std::int64_t>(item_size));
    if (std::ranges::find(shape, 0) != shape.end()) return strides;  // no element to step to; a product may overflow
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    return strides;
}

Array Array::allocate(ElementType type, Shape shape) {
    check_type(type, "array");
    const auto bytes = static_cast<std::size_t>(element_count(shape, type.size())) * type.size();
    constexpr std::align_val_t cache_line{64};
    std::shared_ptr<void> memory(::operator new(bytes, cache_line), [](void* p) { ::operator delete(p, cache_line); });
    Array array = borrow(memory.get(), type, std::move(shape));
    array.owner = std::move(memory);
    return array;
}

Array Array::borrow(void* data, ElementType type, Shape shape) {
    check_type(type, "array");
    element_count(shape, type.size());
    Shape strides = contiguous_strides(shape, type.size());
    return {data, type, std::move(shape), std::move(strides), nullptr};
}

Array Array::borrow_bytes(const void* first, std::size_t bytes, bool read_only, ElementType type, Shape shape) {
    check_type(type, "array");
    const auto wanted = static_cast<std::size_t>(element_count(shape, type.size())) * type.size();
    if (bytes != wanted)
        throw_value("memory must have the ", wanted, " bytes of an array of ", type.name(), " of shape ", shape,
                    ", got ", bytes, " bytes");
    Array array = borrow(const_cast<void*>(first), type, std::move(shape));
    array.read_only = read_only;
    return array;
}

void Array::throw_unreadable(ElementType type, ElementType wanted, std::size_t size) {
    throw_type("as<T>() of an array of ", type.name(), " needs a T of that type, an integer of ", type.size(),
               " bytes or std::byte, got ",
               wanted.is_unknown() ? "a T of " + std::to_string(size) + " bytes" : wanted.name());
}

void Array::throw_read_only() { throw_value("as<T>() of a read-only array needs a const T, got one that is not"); }

bool Array::is_contiguous() const {
    if (strides.size() != rank()) return false;
    if (size() == 0) return true;
    auto expected = static_cast<std::int64_t>(type.size());
    for (std::size_t i = shape.size(); i-- > 0; expected *= shape[i])
        if (shape[i] != 1 && strides[i] != expected) return false;
    return true;
}

Array Array::transposed() const {
    validate(*this);
    Array result = *this;
    const std::size_t n = rank();
    if (n >= 2) {
        std::swap(result.shape[n - 1], result.shape[n - 2]);
        std::swap(result.strides[n - 1], result.strides[n - 2]);
    }
    return result;
}

}  // namespace breccia::inline v0_4
