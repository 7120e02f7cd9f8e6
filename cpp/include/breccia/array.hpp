// SPDX-License-Identifier: Apache-2.0
//
// A strided n-dimensional array by reference: the form in which NumPy, torch, JAX and MLX memory reaches the core.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "breccia/codecs/registry.hpp"
#include "breccia/dtype.hpp"
#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// Extents of the axes, the slowest first; strides too.
using Shape = std::vector<std::int64_t>;

/// What one item of an array is: a high-precision number, a plain byte or half-word, or the codes of a format.
class BRECCIA_API ElementType {
public:
    /// Unknown: no verb reads it.
    constexpr ElementType() = default;
    /// Numbers.
    constexpr ElementType(DType dtype) : kind_(Kind::number), index_(static_cast<std::uint8_t>(dtype)) {}

    /// Plain bytes, signed bytes and half-words: codes or bits whose meaning a recipe knows.
    /// @{
    static constexpr ElementType uint8() { return {Kind::byte, 0}; }
    static constexpr ElementType int8() { return {Kind::byte, 1}; }
    static constexpr ElementType uint16() { return {Kind::half_word, 0}; }
    /// @}
    /// One code per byte, as in ml_dtypes arrays.
    static constexpr ElementType codes(Format f) { return {Kind::codes, static_cast<std::uint8_t>(f)}; }
    /// Two 4-bit codes per byte, as in torch.float4_e2m1fn_x2.
    static constexpr ElementType packed_codes(Format f) { return {Kind::packed, static_cast<std::uint8_t>(f)}; }

    /// By the name NumPy, ml_dtypes or torch gives it; `unknown` for anything the core cannot read.
    static ElementType parse(std::string_view name);
    /// What memory of T's holds: float, double, Float16 and BFloat16 are numbers, std::byte stands for std::uint8_t.
    template <class T>
    static constexpr ElementType of();

    /// Which of the kinds above it is.
    /// @{
    [[nodiscard]] constexpr bool is_number() const { return kind_ == Kind::number; }
    [[nodiscard]] constexpr bool is_byte() const { return kind_ == Kind::byte; }
    [[nodiscard]] constexpr bool is_half_word() const { return kind_ == Kind::half_word; }
    [[nodiscard]] constexpr bool is_codes() const { return kind_ == Kind::codes; }
    [[nodiscard]] constexpr bool is_packed_codes() const { return kind_ == Kind::packed; }
    [[nodiscard]] constexpr bool is_unknown() const { return kind_ == Kind::unknown; }
    /// @}
    /// Of numbers, whose type it is; of others without meaning.
    [[nodiscard]] constexpr DType dtype() const { return static_cast<DType>(index_); }
    /// Of codes, packed or not; of others without meaning.
    [[nodiscard]] constexpr Format format() const { return static_cast<Format>(index_); }
    /// Bytes of an item.
    [[nodiscard]] std::size_t size() const;
    /// As parse() takes it: "float32", "uint8", "float8_e4m3fn", "float4_e2m1fn_x2"; "unknown".
    [[nodiscard]] std::string name() const;

    /// Whether elements may be read as T's: the numbers' own type, integers of an element's size (its bits, or a code),
    /// or std::byte for memory of any type.
    template <class T>
    [[nodiscard]] constexpr bool reads_as() const;

    /// Of one kind and type.
    friend constexpr bool operator==(ElementType, ElementType) = default;

private:
    enum class Kind : std::uint8_t { unknown, number, byte, half_word, codes, packed };
    constexpr ElementType(Kind kind, std::uint8_t index) : kind_(kind), index_(index) {}

    Kind kind_ = Kind::unknown;
    std::uint8_t index_ = 0;
};

template <class T>
constexpr ElementType ElementType::of() {
    using Item = std::remove_cv_t<T>;
    if constexpr (std::same_as<Item, float>) return DType::float32;
    if constexpr (std::same_as<Item, double>) return DType::float64;
    if constexpr (std::same_as<Item, Float16>) return DType::float16;
    if constexpr (std::same_as<Item, BFloat16>) return DType::bfloat16;
    if constexpr (std::same_as<Item, std::uint8_t> || std::same_as<Item, std::byte>) return uint8();
    if constexpr (std::same_as<Item, std::int8_t>) return int8();
    if constexpr (std::same_as<Item, std::uint16_t>) return uint16();
    return {};
}

template <class T>
constexpr bool ElementType::reads_as() const {
    using Item = std::remove_cv_t<T>;
    if (std::same_as<Item, std::byte>) return true;
    if (std::integral<Item>) return sizeof(T) == size() && !is_unknown();
    return is_number() && *this == of<Item>();
}

/// Shape as the user writes it: "(4, 8)", "(4,)", "()".
BRECCIA_API std::string to_string(const Shape& shape);

/// Product of the extents. Throws Error when it or its byte count does not fit in 63 bits.
BRECCIA_API std::int64_t element_count(const Shape& shape, std::size_t item_size = 1);

/// Strides are in bytes and may be zero or negative. `owner` keeps the memory alive; a borrowed array has none and
/// must not outlive what it borrows. An array on another device has shape and type but a null pointer: a ScaledTensor
/// can be made of such arrays, and the verbs refuse them. One borrowed from memory that is const is read-only: the
/// verbs do not write to it.
struct BRECCIA_API Array {
    void* data = nullptr;               ///< the first element, that of index zero
    ElementType type;                   ///< of an element
    Shape shape;                        ///< in elements
    Shape strides;                      ///< in bytes, one for each axis
    std::shared_ptr<const void> owner;  ///< what keeps the memory alive; null where it is borrowed
    bool read_only = false;             ///< the verbs do not write to it

    /// Of shape (), without memory and of no type: to be assigned to. Every verb refuses it.
    Array() = default;
    /// Throws Error where validate() would.
    Array(void* memory, ElementType element, Shape extents, Shape steps, std::shared_ptr<const void> holder = nullptr);

    /// C-contiguous memory of its own, on a cache line, not set to anything. Throws Error for a shape that cannot be,
    /// std::bad_alloc where there is no memory.
    static Array allocate(ElementType type, Shape shape);
    /// Borrows C-contiguous memory. Throws Error for a shape that cannot be.
    static Array borrow(void* data, ElementType type, Shape shape);
    /// Borrows a vector, std::array or span whose items tell the type (see ElementType::of), read-only if they are
    /// const. Throws Error unless it has exactly the items of that shape.
    template <std::ranges::contiguous_range R>
    requires std::ranges::borrowed_range<R> && std::ranges::sized_range<R>
    static Array borrow(R&& memory, Shape shape) {
        return borrow(std::forward<R>(memory), ElementType::of<std::ranges::range_value_t<R>>(), std::move(shape));
    }
    /// The same of memory that holds something else than its items say, such as codes in bytes.
    template <std::ranges::contiguous_range R>
    requires std::ranges::borrowed_range<R> && std::ranges::sized_range<R>
    static Array borrow(R&& memory, ElementType type, Shape shape) {
        static_assert(!ElementType::of<std::ranges::range_value_t<R>>().is_unknown(),
                      "breccia::Array::borrow: items must be float, double, Float16, BFloat16, bytes or uint16_t");
        using Item = std::remove_reference_t<std::ranges::range_reference_t<R>>;
        const auto* first = std::ranges::data(memory);
        return borrow_bytes(first, std::ranges::size(memory) * sizeof(Item), std::is_const_v<Item>, type,
                            std::move(shape));
    }

    [[nodiscard]] std::size_t rank() const { return shape.size(); }           ///< number of axes
    [[nodiscard]] std::int64_t size() const { return element_count(shape); }  ///< number of elements
    [[nodiscard]] bool is_contiguous() const;                                 ///< in C order
    [[nodiscard]] Array transposed() const;  ///< last two axes swapped; the same memory

    /// The memory as T's. Throws Error unless the elements may be read so (see ElementType::reads_as), and for a T that
    /// is not const if the array is read-only. `data` is there for those who know better.
    template <class T>
    [[nodiscard]] T* as() const {
        if (!type.reads_as<T>()) throw_unreadable(type, ElementType::of<T>(), sizeof(T));
        if (!std::is_const_v<T> && read_only) throw_read_only();
        return static_cast<T*>(data);
    }

private:
    static Array borrow_bytes(const void* first, std::size_t bytes, bool read_only, ElementType type, Shape shape);
    [[noreturn]] static void throw_unreadable(ElementType type, ElementType wanted, std::size_t size);
    [[noreturn]] static void throw_read_only();
};

/// Throws Error, calling the array `name`, unless its type is one there is, it has one stride for each axis, no extent
/// is negative, and each of its elements has an address. A null pointer is let through.
BRECCIA_API void validate(const Array& array, std::string_view name = "array");

/// C-contiguous byte strides.
BRECCIA_API Shape contiguous_strides(const Shape& shape, std::size_t item_size);

}  // namespace breccia::inline v0_4
