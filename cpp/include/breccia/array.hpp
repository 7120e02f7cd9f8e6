// SPDX-License-Identifier: Apache-2.0
//
// A strided n-dimensional array by reference: the form in which NumPy, torch, JAX and MLX memory reaches the core.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "breccia/codecs/registry.hpp"
#include "breccia/dtype.hpp"

namespace breccia {

using Shape = std::vector<std::int64_t>;

/// What one item of an array is: a high-precision number, a plain byte or half-word, or the codes of a format.
class ElementType {
public:
    constexpr ElementType() = default;
    constexpr ElementType(DType dtype) : kind_(Kind::number), index_(static_cast<std::uint8_t>(dtype)) {}

    static constexpr ElementType uint8() { return {Kind::byte, 0}; }
    static constexpr ElementType int8() { return {Kind::byte, 1}; }
    static constexpr ElementType uint16() { return {Kind::half_word, 0}; }
    /// One code per byte, as in ml_dtypes arrays.
    static constexpr ElementType codes(Format f) { return {Kind::codes, static_cast<std::uint8_t>(f)}; }
    /// Two 4-bit codes per byte, as in torch.float4_e2m1fn_x2.
    static constexpr ElementType packed_codes(Format f) { return {Kind::packed, static_cast<std::uint8_t>(f)}; }

    /// By the name NumPy, ml_dtypes or torch gives it; `unknown` for anything the core cannot read.
    static ElementType parse(std::string_view name);

    [[nodiscard]] constexpr bool is_number() const { return kind_ == Kind::number; }
    [[nodiscard]] constexpr bool is_byte() const { return kind_ == Kind::byte; }
    [[nodiscard]] constexpr bool is_half_word() const { return kind_ == Kind::half_word; }
    [[nodiscard]] constexpr bool is_codes() const { return kind_ == Kind::codes; }
    [[nodiscard]] constexpr bool is_packed_codes() const { return kind_ == Kind::packed; }
    [[nodiscard]] constexpr bool is_unknown() const { return kind_ == Kind::unknown; }
    [[nodiscard]] constexpr DType dtype() const { return static_cast<DType>(index_); }
    [[nodiscard]] constexpr Format format() const { return static_cast<Format>(index_); }
    [[nodiscard]] std::size_t size() const;
    [[nodiscard]] std::string name() const;

    friend constexpr bool operator==(ElementType, ElementType) = default;

private:
    enum class Kind : std::uint8_t { unknown, number, byte, half_word, codes, packed };
    constexpr ElementType(Kind kind, std::uint8_t index) : kind_(kind), index_(index) {}

    Kind kind_ = Kind::unknown;
    std::uint8_t index_ = 0;
};

/// Shape as the user writes it: "(4, 8)", "(4,)", "()".
std::string to_string(const Shape& shape);

/// Product of the extents. Throws Error when it or its byte count does not fit in 63 bits.
std::int64_t element_count(const Shape& shape, std::size_t item_size = 1);

/// Strides are in bytes and may be zero or negative. `owner` keeps the memory alive; a borrowed array has none and
/// must not outlive what it borrows. An array on another device has shape and type but a null pointer: a ScaledTensor
/// can be made of such arrays, and the verbs refuse them.
struct Array {
    void* data = nullptr;
    ElementType type;
    Shape shape;
    Shape strides;
    std::shared_ptr<const void> owner;

    /// One number that is nowhere; no verb takes it.
    Array() = default;
    /// Throws Error where validate() would.
    Array(void* memory, ElementType element, Shape extents, Shape steps, std::shared_ptr<const void> holder = nullptr);

    static Array allocate(ElementType type, Shape shape);
    /// Borrows C-contiguous memory.
    static Array borrow(void* data, ElementType type, Shape shape);

    [[nodiscard]] std::size_t rank() const { return shape.size(); }
    [[nodiscard]] std::int64_t size() const { return element_count(shape); }
    [[nodiscard]] bool is_contiguous() const;
    [[nodiscard]] Array transposed() const;  ///< last two axes swapped; the same memory

    template <class T>
    [[nodiscard]] T* as() const {
        return static_cast<T*>(data);
    }
};

/// Throws Error, calling the array `name`, unless its type is one there is, it has one stride for each axis, no extent
/// is negative, and each of its elements has an address. A null pointer is let through.
void validate(const Array& array, std::string_view name = "array");

/// C-contiguous byte strides.
Shape contiguous_strides(const Shape& shape, std::size_t item_size);

}  // namespace breccia
