// SPDX-License-Identifier: Apache-2.0
//
// The C functions of breccia.h over the public C++ verbs: pointers become arrays, exceptions a status and a message.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "breccia/breccia.h"
#include "breccia/catalogue.hpp"
#include "breccia/cpu.hpp"
#include "breccia/error.hpp"
#include "breccia/formats.hpp"
#include "breccia/ops.hpp"
#include "runtime/call.hpp"
#include "tensor/spelling.hpp"

// NOLINTBEGIN(readability-identifier-naming): names of C
struct breccia_recipe {
    breccia::Recipe recipe;
};
struct breccia_weight {
    breccia::PreparedWeight prepared;
};
// NOLINTEND(readability-identifier-naming)

namespace breccia::inline v0_4 {
namespace {

// Cut off where it is longer. Without a destructor: a program may call while it ends.
thread_local char last_message[1024];

breccia_status failed(breccia_status status, std::string_view message) noexcept {
    const std::size_t size = std::min(message.size(), sizeof last_message - 1);
    last_message[message.copy(last_message, size)] = 0;
    return status;
}

template <class Verb>
breccia_status guarded(Verb verb) noexcept {
    const IeeeArithmetic arithmetic;  // of what is computed here: verbs have their own
    last_message[0] = 0;
    try {
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
    if (pointer == nullptr) throw_value(name, " must not be NULL");
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
            throw_value("fields must be name=value, with commas between them, got '", field, "'");
        const auto [at, added] = fields.emplace(field.substr(0, equals), value_of(field.substr(equals + 1)));
        if (!added) throw_value("fields must have each name once, got '", at->first, "' twice");
    }
    return fields;
}

// A struct of the caller's, whose `size` says how much of it there is: a shorter one ends with zeros, and of a longer
// one the rest must be zero. No struct has members that an older header has not, so far.
template <class T>
T taken(const T* given, const std::string& name) {
    static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
    constexpr std::size_t first = sizeof(T), most = 4096;
    std::size_t size = 0;
    std::memcpy(&size, &not_null(given, name.c_str()), sizeof size);
    if (size < first || size > most)
        throw_value(name, ".size must be the sizeof of its struct, at least ", first, ", got ", size);
    T known{};
    std::memcpy(&known, given, std::min(size, sizeof(T)));
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw_value(name, " must have zeros in the members that this library does not know, got another at byte ",
                        i, " (breccia ", version(), ")");
    if constexpr (requires { known.reserved; })
        if (known.reserved != 0) throw_value(name, ".reserved must be 0, got ", known.reserved);
    return known;
}

template <class T>
T taken_or_zero(const T* given, const std::string& name) {
    return given == nullptr ? T{} : taken(given, name);
}

Shape shape_of(std::int64_t batch, std::int64_t rows, std::int64_t columns, const std::string& name) {
    if (batch < 0) throw_value(name, "batch must be at least 0, got ", batch);
    if (batch == 0) return {rows, columns};
    return {batch, rows, columns};
}
// Of a breccia_matrix or a breccia_output.
template <class Matrix>
Shape shape_of(const Matrix& matrix, const std::string& name) {
    return shape_of(matrix.batch, matrix.rows, matrix.columns, name + ".");
}

// What belongs to a breccia_matrix is read alone.
template <class Matrix>
Array borrow(const void* memory, ElementType type, const Shape& shape, const std::string& name) {
    if (reinterpret_cast<std::uintptr_t>(memory) % type.size() != 0)
        throw_value(name, " must lie at a multiple of ", type.size(), " bytes, the size of a ", type.name());
    Array array = Array::borrow(const_cast<void*>(memory), type, shape);
    array.read_only = std::is_same_v<Matrix, breccia_matrix>;
    return array;
}

// Of a part that there is none of, which a verb would neither read nor write.
void check_null(const void* memory, const std::string& name, const std::string& owner) {
    if (memory != nullptr) throw_value(name, " must be NULL for ", owner, ", which have no such part");
}

template <class Matrix>
Array numbers(const Matrix& matrix, const std::string& name) {
    if (matrix.recipe != nullptr) throw_type(name, " must be of numbers, got a quantized matrix");
    if constexpr (std::is_same_v<Matrix, breccia_matrix>)
        if (matrix.prepared != nullptr) throw_type(name, " must be of numbers, got a prepared weight");
    check_null(matrix.scale, name + ".scale", "numbers");
    check_null(matrix.zero_point, name + ".zero_point", "numbers");
    check_null(matrix.global_scale, name + ".global_scale", "numbers");
    if (matrix.dtype < 0 || matrix.dtype >= dtype_count)
        throw_type(name, ".dtype must be a BRECCIA_ type of numbers, got ", matrix.dtype);
    return borrow<Matrix>(matrix.data, static_cast<DType>(matrix.dtype), shape_of(matrix, name), name + ".data");
}

template <class Matrix>
const Recipe& recipe_of(const Matrix& matrix, const std::string& name) {
    return not_null(matrix.recipe, (name + ".recipe").c_str()).recipe;
}

// The parts that a plan asks for, where a matrix or an output says that they are.
template <class Matrix>
CastOutput parts(const Matrix& matrix, const CastPlan& plan, const std::string& name) {
    const auto part = [&](const void* memory, ElementType type, const Shape& shape, const char* field) {
        if (memory == nullptr && element_count(shape) != 0) throw_value(name, ".", field, " must not be NULL");
        return borrow<Matrix>(memory, type, shape, name + "." + field);
    };
    CastOutput out{part(matrix.data, plan.data_type, plan.data_shape, "data"),
                   part(matrix.scale, plan.scale_type, plan.scale_shape, "scale"), std::nullopt, std::nullopt};
    const std::string owner = "codes of " + std::string(matrix.recipe->recipe.name);
    if (plan.has_zero_point)
        out.zero_point = part(matrix.zero_point, plan.zero_point_type, plan.scale_shape, "zero_point");
    else
        check_null(matrix.zero_point, name + ".zero_point", owner);
    if (plan.has_global_scale)
        out.global_scale = part(matrix.global_scale, DType::float32, plan.global_scale_shape, "global_scale");
    else
        check_null(matrix.global_scale, name + ".global_scale", owner);
    return out;
}

// Scales in float as the codes that have their values.
Array codes_of(const Array& scales, ScaleType type, const std::string& name) {
    const Format format = format_of_scale(type);
    const auto count = static_cast<std::size_t>(scales.size());
    Array codes = Array::allocate(ElementType::uint8(), scales.shape);
    const std::span<std::uint8_t> made(codes.as<std::uint8_t>(), count);
    encode({scales.as<const float>(), count}, format, made);
    std::vector<float> decoded(count);
    decode(made, format, decoded);
    for (std::size_t i = 0; i < count; ++i) {
        const float given = scales.as<const float>()[i];
        if (given == decoded[i] || (std::isnan(given) && std::isnan(decoded[i]))) continue;
        throw_value(name, " must be values of ", info(format).name, ", got ", given, " for scale ", i);
    }
    return codes;
}

ScaledTensor scaled(const breccia_matrix& matrix, const std::string& name) {
    if (matrix.prepared != nullptr) return matrix.prepared->prepared.tensor();
    const Recipe& recipe = recipe_of(matrix, name);
    const Shape shape = shape_of(matrix, name);
    CastPlan plan = plan_cast(shape, recipe);
    if (matrix.scale_form != BRECCIA_SCALES_OF_RECIPE && matrix.scale_form != BRECCIA_SCALES_FLOAT32)
        throw_value(name, ".scale_form must be one of the BRECCIA_SCALES_ constants, got ", matrix.scale_form);
    const bool as_float = matrix.scale_form == BRECCIA_SCALES_FLOAT32;
    if (as_float) plan.scale_type = DType::float32;
    if (matrix.global_scales != 0 && matrix.batch != 0) plan.global_scale_shape = {matrix.batch, 1, 1};
    CastOutput in = parts(matrix, plan, name);
    if (as_float && is_coded(recipe.scale)) in.scale = codes_of(in.scale, recipe.scale, name + ".scale");
    return {std::move(in.data),
            std::move(in.scale),
            recipe,
            recipe.layout,
            {.zero_point = std::move(in.zero_point), .global_scale = std::move(in.global_scale), .shape = shape}};
}

// What is read, but for operands of breccia_matmul.
breccia_matrix as_stored(const breccia_matrix* given, const char* name) {
    const breccia_matrix matrix = taken(given, name);
    if (matrix.transposed != 0) throw_value(name, ".transposed must be 0, got ", matrix.transposed);
    return matrix;
}

// The verbs that keep the shape look at what they read, which is `given` and of that name, before they ask what to
// write.
void check_shape(const breccia_output& out, const Shape& given, const std::string& name) {
    const Shape made = shape_of(out, "out");
    if (given != made) throw_value("out must have the shape of ", name, ", ", given, ", got ", made);
}
CastOutput codes_to_write(const breccia_output& out, const Shape& given, const std::string& name) {
    check_shape(out, given, name);
    return parts(out, plan_cast(given, recipe_of(out, "out")), "out");
}

// What an operand of a product borrows.
using Side = std::variant<Array, ScaledTensor>;
Side side_of(const breccia_matrix& matrix, const char* name) {
    if (matrix.prepared == nullptr && matrix.recipe == nullptr) return numbers(matrix, name);
    return scaled(matrix, name);
}
Operand operand(const Side& side) {
    return std::visit([](const auto& x) { return Operand(x); }, side);
}

// Numbers (1, columns), or a batch of such, without the axis of rows.
Array row_of(const breccia_matrix* given, const char* name) {
    const breccia_matrix m = as_stored(given, name);
    if (m.rows != 1) throw_value(name, " must have 1 row, got ", m.rows);
    Array row = numbers(m, name);
    row.shape.erase(row.shape.end() - 2);
    row.strides.erase(row.strides.end() - 2);
    return row;
}

CastOptions cast_options(const breccia_cast_options* given) {
    const breccia_cast_options o = taken_or_zero(given, "options");
    CastOptions options;
    if (o.importance != nullptr) options.importance = row_of(o.importance, "options.importance");
    if (o.amax_count < 0 || (o.amax_count > 0 && o.amax == nullptr))
        throw_value("options.amax_count must be the number of what options.amax points to, got ", o.amax_count);
    if (o.amax != nullptr) options.amax.assign(o.amax, o.amax + o.amax_count);
    if (o.stochastic != 0) options.seed = o.seed;
    options.offset = o.offset;
    options.row_length = o.row_length;
    return options;
}

Precision precision_of(const breccia_product_options* given) {
    const breccia_precision precision = taken_or_zero(given, "options").precision;
    if (precision != BRECCIA_EXACT && precision != BRECCIA_FAST)
        throw_value("options.precision must be BRECCIA_EXACT or BRECCIA_FAST, got ", precision);
    return precision == BRECCIA_FAST ? Precision::fast : Precision::exact;
}

}  // namespace
}  // namespace breccia::inline v0_4

using namespace breccia;  // of functions that have names of their own

const char* breccia_last_message(void) { return last_message; }

const char* breccia_version(void) { return breccia::version().data(); }

breccia_status breccia_recipe_new(const char* name, const char* fields, breccia_recipe** recipe) {
    return guarded([&] {
        not_null(recipe, "recipe") = nullptr;
        not_null(name, "name");
        const Recipe made = make_recipe(name, fields_of(fields == nullptr ? "" : fields));
        *recipe = new breccia_recipe{made};
    });
}

void breccia_recipe_free(breccia_recipe* recipe) { delete recipe; }

breccia_status breccia_part_sizes(const breccia_recipe* recipe, int64_t batch, int64_t rows, int64_t columns,
                                  breccia_part_bytes* sizes) {
    return guarded([&] {
        breccia_part_bytes out = taken(sizes, "sizes");
        const CastPlan plan = plan_cast(shape_of(batch, rows, columns, ""), not_null(recipe, "recipe").recipe);
        const auto bytes = [](const Shape& shape, ElementType type) {
            return element_count(shape, type.size()) * static_cast<std::int64_t>(type.size());
        };
        out.data = bytes(plan.data_shape, plan.data_type);
        out.scale = bytes(plan.scale_shape, plan.scale_type);
        out.zero_point = plan.has_zero_point ? bytes(plan.scale_shape, plan.zero_point_type) : 0;
        out.global_scale = plan.has_global_scale ? bytes(plan.global_scale_shape, DType::float32) : 0;
        std::memcpy(sizes, &out, std::min(out.size, sizeof out));
    });
}

breccia_status breccia_cast(const breccia_matrix* x, const breccia_output* out, const breccia_cast_options* options) {
    return guarded([&] {
        const breccia_matrix from = as_stored(x, "x");
        const breccia_output to = taken(out, "out");
        const Array given = numbers(from, "x");
        const CastOutput codes = codes_to_write(to, given.shape, "x");
        cast_into(given, to.recipe->recipe, codes, cast_options(options));
    });
}

breccia_status breccia_dequantize(const breccia_matrix* scaled, const breccia_output* out) {
    return guarded([&] {
        const breccia_matrix from = as_stored(scaled, "scaled");
        const breccia_output to = taken(out, "out");
        const ScaledTensor tensor = breccia::scaled(from, "scaled");
        check_shape(to, tensor.shape(), "scaled");
        dequantize_into(tensor, numbers(to, "out"));
    });
}

breccia_status breccia_requantize(const breccia_matrix* scaled, const breccia_output* out) {
    return guarded([&] {
        const breccia_matrix from = as_stored(scaled, "scaled");
        const breccia_output to = taken(out, "out");
        const ScaledTensor tensor = breccia::scaled(from, "scaled");
        const CastOutput codes = codes_to_write(to, tensor.shape(), "scaled");
        requantize_into(tensor, to.recipe->recipe, codes);
    });
}

breccia_status breccia_matmul(const breccia_matrix* a, const breccia_matrix* b, const breccia_output* out,
                              const breccia_product_options* options) {
    return guarded([&] {
        const breccia_matrix left = taken(a, "a"), right = taken(b, "b");
        const breccia_output to = taken(out, "out");
        const auto factor = [](const breccia_matrix& matrix, const char* name) {
            Side side = side_of(matrix, name);
            if (matrix.transposed != 0) std::visit([](auto& x) { x = x.transposed(); }, side);
            return side;
        };
        const Side one = factor(left, "a"), other = factor(right, "b");
        matmul_into(operand(one), operand(other), numbers(to, "out"), precision_of(options));
    });
}

breccia_status breccia_linear(const breccia_matrix* x, const breccia_matrix* w, const breccia_matrix* bias,
                              const breccia_output* out, const breccia_product_options* options) {
    return guarded([&] {
        const breccia_matrix left = as_stored(x, "x"), right = as_stored(w, "w");
        const breccia_output to = taken(out, "out");
        const Side activations = side_of(left, "x"), weight = side_of(right, "w");
        std::optional<Array> row;
        if (bias != nullptr) row = row_of(bias, "bias");
        linear_into(operand(activations), operand(weight), row ? &*row : nullptr, numbers(to, "out"),
                    precision_of(options));
    });
}

breccia_status breccia_grouped_matmul(const breccia_matrix* x, const breccia_matrix* w, const int64_t* offsets,
                                      const breccia_output* out, const breccia_product_options* options) {
    return guarded([&] {
        const breccia_matrix left = as_stored(x, "x"), right = as_stored(w, "w");
        not_null(offsets, "offsets");
        const breccia_output to = taken(out, "out");
        const Side activations = side_of(left, "x");
        const ScaledTensor stack = scaled(right, "w");
        if (stack.shape().size() != 3)
            throw_value("w must be a batch of matrices, one to each expert, got shape ", stack.shape());
        grouped_matmul_into(operand(activations), stack, {offsets, static_cast<std::size_t>(stack.shape().front()) + 1},
                            numbers(to, "out"), precision_of(options));
    });
}

breccia_status breccia_prepare(const breccia_matrix* w, breccia_weight** prepared) {
    return guarded([&] {
        not_null(prepared, "prepared") = nullptr;
        const breccia_matrix weight = as_stored(w, "w");
        *prepared = new breccia_weight{PreparedWeight(scaled(weight, "w"))};
    });
}

void breccia_weight_free(breccia_weight* prepared) { delete prepared; }

breccia_status breccia_shutdown(void) {
    return guarded([] { breccia::shutdown(); });
}

breccia_status breccia_set_threads(int32_t count) {
    return guarded([&] { set_num_threads(count); });
}

int32_t breccia_threads(void) {
    int32_t count = 0;
    guarded([&] { count = num_threads(); });
    return count;
}
