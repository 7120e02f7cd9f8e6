// SPDX-License-Identifier: Apache-2.0
//
// The C functions of breccia.h over the C++ verbs: pointers become arrays, exceptions a status and a message.
#include <algorithm>
#include <charconv>
#include <new>
#include <optional>
#include <string>

#include "breccia/breccia.h"
#include "breccia/catalogue.hpp"
#include "breccia/error.hpp"
#include "breccia/ops.hpp"
#include "quantize/quantizer.hpp"

struct breccia_recipe {  // NOLINT(readability-identifier-naming): a name of C
    breccia::Recipe recipe;
};

namespace breccia::inline v0_4 {
namespace {

thread_local std::string last_message;

breccia_status failed(breccia_status status, const char* message) noexcept {
    try {
        last_message = message;
    } catch (...) {
        last_message.clear();  // no memory for the sentence either
    }
    return status;
}

template <class Verb>
breccia_status guarded(Verb verb) noexcept {
    try {
        last_message.clear();
        verb();
        return BRECCIA_OK;
    } catch (const Error& error) {
        return failed(error.kind() == Error::Kind::type ? BRECCIA_TYPE_ERROR : BRECCIA_VALUE_ERROR, error.what());
    } catch (const std::bad_alloc&) {
        return failed(BRECCIA_NO_MEMORY, "there is not enough memory");
    } catch (const std::exception& error) {
        return failed(BRECCIA_INTERNAL_ERROR, error.what());
    } catch (...) {
        return failed(BRECCIA_INTERNAL_ERROR, "an exception of an unknown type");
    }
}

template <class T>
T& not_null(T* pointer, const char* name) {
    if (pointer == nullptr) throw_value(std::string(name) + " must not be NULL");
    return *pointer;
}

// A field's value by what it looks like; the catalogue refuses what the field cannot be.
FieldValue value_of(std::string_view text) {
    if (text == "true" || text == "false") return text == "true";
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return number;
    return std::string(text);
}

// "two_level=false,scale_search=mse"
Fields fields_of(std::string_view text) {
    Fields fields;
    while (!text.empty()) {
        const std::string_view field = text.substr(0, text.find(','));
        text.remove_prefix(std::min(text.size(), field.size() + 1));
        const std::size_t equals = field.find('=');
        if (equals == std::string_view::npos || equals == 0)
            throw_value("fields must be name=value, with commas between them, got '" + std::string(field) + "'");
        const auto [at, added] = fields.emplace(field.substr(0, equals), value_of(field.substr(equals + 1)));
        if (!added) throw_value("fields must have each name once, got '" + at->first + "' twice");
    }
    return fields;
}

Shape shape_of(const breccia_matrix& matrix) { return {matrix.rows, matrix.columns}; }

Array borrow(void* memory, ElementType type, const Shape& shape, const std::string& name) {
    if (reinterpret_cast<std::uintptr_t>(memory) % type.size() != 0)
        throw_value(name + " must lie at a multiple of " + std::to_string(type.size()) + " bytes, the size of a " +
                    type.name());
    return Array::borrow(memory, type, shape);
}

Array numbers(const breccia_matrix& matrix, const std::string& name) {
    if (matrix.recipe != nullptr) throw_type(name + " must be of numbers, got a quantized matrix");
    if (matrix.dtype < 0 || matrix.dtype >= dtype_count)
        throw_type(name + ".dtype must be a BRECCIA_ type of numbers, got " + std::to_string(matrix.dtype));
    return borrow(matrix.data, static_cast<DType>(matrix.dtype), shape_of(matrix), name + ".data");
}

const Recipe& recipe_of(const breccia_matrix& matrix, const std::string& name) {
    return not_null(matrix.recipe, (name + ".recipe").c_str()).recipe;
}

CastOutput parts(const breccia_matrix& matrix, const std::string& name) {
    const Recipe& recipe = recipe_of(matrix, name);
    const CastPlan plan = plan_cast(shape_of(matrix), recipe);
    const auto part = [&](void* memory, ElementType type, const Shape& shape, const char* field) {
        if (memory == nullptr && element_count(shape) != 0) throw_value(name + "." + field + " must not be NULL");
        return borrow(memory, type, shape, name + "." + field);
    };
    CastOutput out{part(matrix.data, plan.data_type, plan.data_shape, "data"),
                   part(matrix.scale, plan.scale_type, plan.scale_shape, "scale"), std::nullopt, std::nullopt};
    if (plan.has_zero_point)
        out.zero_point = part(matrix.zero_point, plan.zero_point_type, plan.scale_shape, "zero_point");
    if (plan.has_global_scale)
        out.global_scale = part(matrix.global_scale, DType::float32, plan.global_scale_shape, "global_scale");
    return out;
}

ScaledTensor scaled(const breccia_matrix& matrix, const std::string& name) {
    CastOutput in = parts(matrix, name);
    const Recipe& recipe = recipe_of(matrix, name);
    return assemble(std::move(in), recipe, shape_of(matrix), DType::float32);
}

void check_same_shape(const breccia_matrix& in, const char* name, const breccia_matrix& out) {
    if (shape_of(in) != shape_of(out))
        throw_value("out must have the shape of " + std::string(name) + ", " + to_string(shape_of(in)) + ", got " +
                    to_string(shape_of(out)));
}

void check_not_transposed(const breccia_matrix& matrix, const char* name) {
    if (matrix.transposed != 0)
        throw_value(std::string(name) + ".transposed must be 0, got " + std::to_string(matrix.transposed));
}

// An operand of a product and what it borrows.
class Side {
public:
    Side(const breccia_matrix& matrix, const char* name, bool transpose) {
        if (matrix.recipe != nullptr) {
            scaled_ = scaled(matrix, name);
            if (transpose) scaled_ = scaled_->transposed();
            return;
        }
        array_ = numbers(matrix, name);
        if (transpose) array_ = array_.transposed();
    }
    [[nodiscard]] Operand operand() const { return scaled_ ? Operand(*scaled_) : Operand(array_); }

private:
    std::optional<ScaledTensor> scaled_;
    Array array_;
};

}  // namespace
}  // namespace breccia::inline v0_4

using breccia::check_not_transposed, breccia::check_same_shape, breccia::guarded, breccia::not_null;

const char* breccia_last_message(void) { return breccia::last_message.c_str(); }

const char* breccia_version(void) { return breccia::version().data(); }

breccia_status breccia_recipe_new(const char* name, const char* fields, breccia_recipe** recipe) {
    return guarded([&] {
        not_null(recipe, "recipe") = nullptr;
        not_null(name, "name");
        const breccia::Recipe made = breccia::make_recipe(name, breccia::fields_of(fields == nullptr ? "" : fields));
        *recipe = new breccia_recipe{made};
    });
}

void breccia_recipe_free(breccia_recipe* recipe) { delete recipe; }

breccia_status breccia_part_sizes(const breccia_recipe* recipe, int64_t rows, int64_t columns,
                                  breccia_part_bytes* sizes) {
    return guarded([&] {
        breccia_part_bytes& out = not_null(sizes, "sizes");
        const breccia::CastPlan plan = breccia::plan_cast({rows, columns}, not_null(recipe, "recipe").recipe);
        const auto bytes = [](const breccia::Shape& shape, breccia::ElementType type) {
            return breccia::element_count(shape, type.size()) * static_cast<std::int64_t>(type.size());
        };
        out = {bytes(plan.data_shape, plan.data_type), bytes(plan.scale_shape, plan.scale_type),
               plan.has_zero_point ? bytes(plan.scale_shape, plan.zero_point_type) : 0,
               plan.has_global_scale ? bytes(plan.global_scale_shape, breccia::DType::float32) : 0};
    });
}

namespace breccia::inline v0_4 {
namespace {

void cast_matrix(const breccia_matrix* x, const CastOptions& options, const breccia_matrix* out) {
    check_not_transposed(not_null(x, "x"), "x");
    check_not_transposed(not_null(out, "out"), "out");
    check_same_shape(*x, "x", *out);
    cast_into(numbers(*x, "x"), recipe_of(*out, "out"), parts(*out, "out"), options);
}

// A matrix of one row as a vector.
Array row_of(const breccia_matrix& m, const char* name) {
    check_not_transposed(m, name);
    if (m.rows != 1) throw_value(std::string(name) + " must have 1 row, got " + std::to_string(m.rows));
    const Array row = numbers(m, name);
    return Array::borrow(row.data, row.type, {m.columns});
}

}  // namespace
}  // namespace breccia::inline v0_4

breccia_status breccia_cast(const breccia_matrix* x, const breccia_matrix* out) {
    return guarded([&] { breccia::cast_matrix(x, {}, out); });
}

breccia_status breccia_cast_by_importance(const breccia_matrix* x, const breccia_matrix* importance,
                                          const breccia_matrix* out) {
    return guarded([&] {
        breccia::CastOptions options;
        options.importance = breccia::row_of(not_null(importance, "importance"), "importance");
        breccia::cast_matrix(x, options, out);
    });
}

breccia_status breccia_dequantize(const breccia_matrix* scaled, const breccia_matrix* out) {
    return guarded([&] {
        check_not_transposed(not_null(scaled, "scaled"), "scaled");
        check_not_transposed(not_null(out, "out"), "out");
        check_same_shape(*scaled, "scaled", *out);
        breccia::dequantize_into(breccia::scaled(*scaled, "scaled"), breccia::numbers(*out, "out"));
    });
}

breccia_status breccia_requantize(const breccia_matrix* scaled, const breccia_matrix* out) {
    return guarded([&] {
        check_not_transposed(not_null(scaled, "scaled"), "scaled");
        check_not_transposed(not_null(out, "out"), "out");
        check_same_shape(*scaled, "scaled", *out);
        breccia::requantize_into(breccia::scaled(*scaled, "scaled"), breccia::recipe_of(*out, "out"),
                                 breccia::parts(*out, "out"));
    });
}

breccia_status breccia_matmul(const breccia_matrix* a, const breccia_matrix* b, const breccia_matrix* out) {
    return guarded([&] {
        // Before anything is read through them: arguments of one call are evaluated in any order.
        not_null(a, "a");
        not_null(b, "b");
        check_not_transposed(not_null(out, "out"), "out");
        const breccia::Side left(*a, "a", a->transposed != 0), right(*b, "b", b->transposed != 0);
        breccia::matmul_into(left.operand(), right.operand(), breccia::numbers(*out, "out"));
    });
}

breccia_status breccia_linear(const breccia_matrix* x, const breccia_matrix* w, const breccia_matrix* bias,
                              const breccia_matrix* out) {
    return guarded([&] {
        check_not_transposed(not_null(x, "x"), "x");
        check_not_transposed(not_null(w, "w"), "w");
        check_not_transposed(not_null(out, "out"), "out");
        const breccia::Side activations(*x, "x", false), weight(*w, "w", false);
        std::optional<breccia::Array> row;
        if (bias != nullptr) row = breccia::row_of(*bias, "bias");
        breccia::linear_into(activations.operand(), weight.operand(), row ? &*row : nullptr,
                             breccia::numbers(*out, "out"));
    });
}
