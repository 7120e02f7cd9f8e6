// SPDX-License-Identifier: Apache-2.0
//
// What the verbs check of layouts and of memory before they touch it.
#pragma once

#include "breccia/ops.hpp"

namespace breccia::inline v0_4 {

/// Arrays of one operand or result, up to four.
class Parts {
public:
    Parts(const Array& array) { add(array); }
    Parts(const ScaledTensor& scaled);
    Parts(const CastOutput& out);
    Parts(const Operand& operand);

    [[nodiscard]] const Array* const* begin() const { return arrays_; }
    [[nodiscard]] const Array* const* end() const { return arrays_ + count_; }

private:
    void add(const Array& array) { arrays_[count_++] = &array; }
    void add(const std::optional<Array>& array) {
        if (array) add(*array);
    }

    const Array* arrays_[4] = {};
    std::size_t count_ = 0;
};

/// The name of a scale's type or format.
inline std::string name_of(ScaleType type) {
    return std::string(is_coded(type) ? info(format_of_scale(type)).name : name_of(static_cast<DType>(type)));
}

/// Throws Error unless element, scale, rule and search are ones there are: what a tensor that exists needs of its
/// recipe, which a cast need not be able to follow.
void check_enumerators(const Recipe& recipe);

/// Whether scales belong to blocks of single rows, along the last axis: neither to whole rows nor to tiles.
bool has_blocks_of_rows(const Layout& layout);

/// Throws Error unless `array` is valid, of numbers, and in memory the core can read.
void check_numbers(const Array& array, std::string_view name);

/// Throws Error unless the parts of a tensor are in memory the core can read.
void check_memory(const ScaledTensor& scaled, std::string_view name);

/// The same of either.
void check_operand(const Operand& operand, std::string_view name);

/// Throws Error unless `out` is an array of numbers of that shape that can be written.
void check_output(const Array& out, const Shape& shape);

/// The same of the shape whose last extent is `last` and whose others are those of `shape`.
void check_output(const Array& out, const Shape& shape, std::int64_t last);

/// Throws Error unless `out` has the parts of the plan: shapes, types, C-contiguous memory, no two in the same place.
void check_output(const CastOutput& out, const CastPlan& plan, const Recipe& recipe);

/// Throws Error when memory between the first and the last element of a part of `out` lies within one of `operand`.
void check_no_overlap(const Parts& out, const Parts& operand);

}  // namespace breccia::inline v0_4
