// SPDX-License-Identifier: Apache-2.0
//
// The verbs as handlers of XLA's foreign function interface, so that compiled JAX code on a CPU calls the core without
// passing through Python. Part of the extension where jaxlib's headers were found when it was built.
//
// A ScaledTensor is its arrays (data, scale and, where there are, zero point and global scale) and a description:
// recipe, layout and packing as text, see read_description and python/breccia/frameworks/jax/ffi.py.
#include <charconv>
#include <cstring>

#include <xla/ffi/api/ffi.h>

#include "../register.hpp"
#include "breccia/catalogue.hpp"
#include "breccia/error.hpp"

namespace breccia::python {
namespace {

namespace ffi = xla::ffi;
using Text = std::string_view;

ElementType element_type(ffi::DataType type) {
    switch (type) {
        case ffi::F32: return DType::float32;
        case ffi::F64: return DType::float64;
        case ffi::F16: return DType::float16;
        case ffi::BF16: return DType::bfloat16;
        case ffi::U8: return ElementType::uint8();
        case ffi::S8: return ElementType::int8();
        case ffi::F8E4M3FN: return ElementType::codes(format_of<Float8E4M3FN>);
        case ffi::F8E5M2: return ElementType::codes(format_of<Float8E5M2>);
        case ffi::F8E4M3FNUZ: return ElementType::codes(format_of<Float8E4M3FNUZ>);
        case ffi::F8E5M2FNUZ: return ElementType::codes(format_of<Float8E5M2FNUZ>);
        case ffi::F8E4M3: return ElementType::codes(format_of<Float8E4M3>);
        case ffi::F8E3M4: return ElementType::codes(format_of<Float8E3M4>);
        case ffi::F8E4M3B11FNUZ: return ElementType::codes(format_of<Float8E4M3B11FNUZ>);
        case ffi::F8E8M0FNU: return ElementType::codes(format_of<Float8E8M0FNU>);
        default: throw_type("an operand has an unsupported dtype");
    }
}

Array array_of(ffi::AnyBuffer buffer) {
    const auto extents = buffer.dimensions();
    return Array::borrow(buffer.untyped_data(), element_type(buffer.element_type()),
                         Shape(extents.begin(), extents.end()));
}

Text take(Text& rest, char separator) {
    const std::size_t end = std::min(rest.find(separator), rest.size());
    const Text found = rest.substr(0, end);
    rest.remove_prefix(std::min(rest.size(), end + 1));
    return found;
}

std::int64_t integer(Text text) {
    std::int64_t value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    return value;
}

FieldValue field_value(const FieldSpec& spec, Text text) {
    if (text == "None") return std::monostate{};
    if (spec.kind == FieldSpec::Kind::choice) return std::string(text);
    if (spec.kind == FieldSpec::Kind::boolean) return text == "True";
    return integer(text);
}

// "NVFP4BlockScaling,E2M1,16,E4M3,True,amax,transformer_engine": fields in the catalogue's order.
Recipe read_recipe(Text text) {
    const Text name = take(text, ',');
    Fields fields;
    for (const RecipeRow& row : catalogue())
        if (row.name == name)
            for (const FieldSpec& spec : row.fields) fields.emplace(spec.name, field_value(spec, take(text, ',')));
    return make_recipe(name, fields);
}

// "PerBlockMN,1,16,-1"
Layout read_layout(Text text) {
    const Text kind = take(text, ',');
    const std::int64_t rows = integer(take(text, ',')), cols = integer(take(text, ','));
    const int axis = static_cast<int>(integer(text));
    if (kind == "PerBlockK") return Layout::per_block_k(cols, axis);
    if (kind == "PerBlockMN") return Layout::per_block_mn(rows, cols, axis);
    if (kind == "PerChannel") return Layout::per_channel(axis);
    Layout layout = Layout::per_tensor();
    layout.axis = axis;
    return layout;
}

// "recipe|layout|packing", packing being "one", "two" or "odd" as in breccia.value.form.Form. `at` counts the operands
// that have been read.
ScaledTensor read_tensor(Text description, const ffi::RemainingArgs& operands, std::size_t& at) {
    const auto next = [&] { return array_of(operands.get<ffi::AnyBuffer>(at++).value()); };
    const Recipe recipe = read_recipe(take(description, '|'));
    const Layout layout = read_layout(take(description, '|'));
    const Text packing = take(description, '|');
    Array data = next(), scale = next();
    Extras extras;
    if (description.find('z') != Text::npos) extras.zero_point = next();
    if (description.find('g') != Text::npos) extras.global_scale = next();
    Shape shape = data.shape;
    if (packing != "one") {
        std::int64_t& columns = shape[shape.size() - static_cast<std::size_t>(-layout.axis)];
        columns = 2 * columns - (packing == "odd" ? 1 : 0);
    }
    extras.shape = std::move(shape);
    return {std::move(data), std::move(scale), recipe, layout, std::move(extras)};
}

CastOutput outputs(const Recipe& recipe, const ffi::RemainingRets& results) {
    std::size_t at = 0;
    const auto next = [&] { return array_of(*results.get<ffi::AnyBuffer>(at++).value()); };
    CastOutput out{.data = next(), .scale = next(), .zero_point = std::nullopt, .global_scale = std::nullopt};
    if (recipe.has_second_number()) out.zero_point = next();
    if (recipe.two_level) out.global_scale = next();
    return out;
}

template <class Body>
ffi::Error guarded(Body body) {
    try {
        body();
        return ffi::Error::Success();
    } catch (const std::exception& error) {
        return ffi::Error::InvalidArgument(error.what());
    }
}

// x, then the magnitudes that `amax` says are given, or for stochastic rounding the seed's low and high half.
ffi::Error cast_handler(ffi::RemainingArgs operands, ffi::RemainingRets results, Text recipe_text,
                        std::int64_t hadamard_block, std::int64_t hadamard_seed, bool square_blocks, bool amax) {
    return guarded([&] {
        const Recipe recipe = read_recipe(recipe_text);
        CastOptions options;
        options.hadamard_block = hadamard_block;
        options.hadamard_seed = static_cast<std::uint64_t>(hadamard_seed);
        options.square_blocks = square_blocks;
        if (amax) {
            const auto given = operands.get<ffi::AnyBuffer>(1).value();
            const auto* first = static_cast<const float*>(given.untyped_data());
            options.amax.assign(first, first + given.element_count());
        } else if (operands.size() > 1) {
            std::uint32_t halves[2];
            std::memcpy(halves, operands.get<ffi::AnyBuffer>(1).value().untyped_data(), sizeof halves);
            options.seed = halves[0] | std::uint64_t{halves[1]} << 32;
        }
        cast_into(array_of(operands.get<ffi::AnyBuffer>(0).value()), recipe, outputs(recipe, results), options);
    });
}

ffi::Error dequantize_handler(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> result, Text tensor) {
    return guarded([&] {
        std::size_t at = 0;
        dequantize_into(read_tensor(tensor, operands, at), array_of(*result));
    });
}

ffi::Error requantize_handler(ffi::RemainingArgs operands, ffi::RemainingRets results, Text tensor, Text recipe_text) {
    return guarded([&] {
        const Recipe recipe = read_recipe(recipe_text);
        std::size_t at = 0;
        requantize_into(read_tensor(tensor, operands, at), recipe, outputs(recipe, results));
    });
}

// An operand without a description is an array of numbers.
struct AnyOperand {
    AnyOperand(Text description, const ffi::RemainingArgs& operands, std::size_t& at) {
        if (description.empty())
            array = array_of(operands.get<ffi::AnyBuffer>(at++).value());
        else
            tensor.emplace(read_tensor(description, operands, at));
    }
    [[nodiscard]] Operand get() const { return tensor ? Operand(*tensor) : Operand(array); }

    std::optional<ScaledTensor> tensor;
    Array array;
};

ffi::Error matmul_handler(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> result, Text a, Text b,
                          Text precision) {
    return guarded([&] {
        std::size_t at = 0;
        const AnyOperand left(a, operands, at), right(b, operands, at);
        matmul_into(left.get(), right.get(), array_of(*result), parse_precision(precision));
    });
}

XLA_FFI_DEFINE_HANDLER(cast_symbol, cast_handler,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<Text>("recipe")
                           .Attr<std::int64_t>("hadamard_block")
                           .Attr<std::int64_t>("hadamard_seed")
                           .Attr<bool>("square_blocks")
                           .Attr<bool>("amax"));
XLA_FFI_DEFINE_HANDLER(dequantize_symbol, dequantize_handler,
                       ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<Text>("tensor"));
XLA_FFI_DEFINE_HANDLER(requantize_symbol, requantize_handler,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<Text>("tensor").Attr<Text>("recipe"));
XLA_FFI_DEFINE_HANDLER(
    matmul_symbol, matmul_handler,
    ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<Text>("a").Attr<Text>("b").Attr<Text>("precision"));

py::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

void register_xla(py::module_& m) {
    m.def("xla_handlers", [] {
        py::dict handlers;
        handlers["cast"] = capsule(cast_symbol);
        handlers["dequantize"] = capsule(dequantize_symbol);
        handlers["requantize"] = capsule(requantize_symbol);
        handlers["matmul"] = capsule(matmul_symbol);
        return handlers;
    });
}

}  // namespace breccia::python
