// SPDX-License-Identifier: Apache-2.0
#include <tuple>
#include <utility>

#include "breccia/adamw.hpp"
#include "breccia/gptq.hpp"
#include "breccia/transpose.hpp"
#include "register.hpp"

namespace breccia::python {
namespace {

// The C++ tensor and the NumPy arrays it borrows: (tensor, data, scale, zero_point, global_scale).
class NumpyCast {
public:
    NumpyCast(const Shape& shape, const Recipe& recipe) : recipe_(recipe), shape_(shape) {
        const CastPlan plan = plan_cast(shape, recipe);
        out_.data = add(plan.data_type, plan.data_shape);
        // A bfloat16 scale is half-words: NumPy itself has no such type.
        const bool half_words = plan.scale_type == ElementType(DType::bfloat16);
        out_.scale = add(half_words ? ElementType::uint16() : plan.scale_type, plan.scale_shape);
        out_.zero_point = plan.has_zero_point ? std::optional(add(plan.zero_point_type, plan.scale_shape)) : skip();
        out_.global_scale =
            plan.has_global_scale ? std::optional(add(DType::float32, plan.global_scale_shape)) : skip();
    }

    [[nodiscard]] const CastOutput& out() const { return out_; }

    py::tuple finish(DType original) {
        const auto owned = [&](std::size_t i) { return to_array(arrays_[i], "array", true); };
        ScaledTensor tensor(owned(0), owned(1), recipe_, recipe_.layout,
                            {.zero_point = out_.zero_point ? std::optional(owned(2)) : std::nullopt,
                             .global_scale = out_.global_scale ? std::optional(owned(3)) : std::nullopt,
                             .shape = shape_,
                             .original_dtype = original});
        return py::make_tuple(std::move(tensor), arrays_[0], arrays_[1], arrays_[2], arrays_[3]);
    }

private:
    Array add(ElementType type, const Shape& shape) {
        auto [array, view] = allocate_numpy(type, shape);
        arrays_[count_++] = std::move(array);
        return view;
    }
    std::optional<Array> skip() {
        arrays_[count_++] = py::none();
        return std::nullopt;
    }

    const Recipe& recipe_;
    const Shape& shape_;
    CastOutput out_;
    std::array<py::object, 4> arrays_;
    std::size_t count_ = 0;
};

CastOutput outputs(py::handle data, py::handle scale, py::handle zero_point, py::handle global_scale) {
    return {to_output(data, "data"), to_output(scale, "scale"), to_optional_array(zero_point, "zero_point"),
            to_optional_array(global_scale, "global_scale")};
}

// Memory of a plan's outputs by address, C-contiguous; 0 for what the plan has not.
using Addresses = std::array<std::uintptr_t, 4>;

CastOutput outputs_at(const CastPlan& plan, const Addresses& addresses) {
    const auto at = [&](std::size_t i, ElementType type, const Shape& shape) {
        return Array::borrow(reinterpret_cast<void*>(addresses[i]), type, shape);
    };
    CastOutput out{at(0, plan.data_type, plan.data_shape), at(1, plan.scale_type, plan.scale_shape), std::nullopt,
                   std::nullopt};
    if (plan.has_zero_point) out.zero_point = at(2, plan.zero_point_type, plan.scale_shape);
    if (plan.has_global_scale) out.global_scale = at(3, DType::float32, plan.global_scale_shape);
    return out;
}

using Offset = std::pair<std::int64_t, std::int64_t>;

// seed: an integer modulo 2^64, or None. hadamard: (block, seed) or None. factor: a number or None. amax: numbers in a
// list, or None. offset: (position, row length). importance: an array or None.
CastOptions options_of(py::handle seed, py::handle hadamard, py::handle factor, bool square_blocks, py::handle amax,
                       Offset offset, py::handle importance) {
    const auto low_bits = [](py::handle integer) {
        const auto bits = PyLong_AsUnsignedLongLongMask(integer.ptr());
        if (bits == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
        return std::uint64_t{bits};
    };
    CastOptions options;
    if (!seed.is_none()) options.seed = low_bits(seed);
    if (!hadamard.is_none()) {
        const auto pair = hadamard.cast<py::tuple>();
        options.hadamard_block = to_integer(pair[0], "hadamard_block");
        options.hadamard_seed = low_bits(pair[1]);
    }
    if (!factor.is_none()) options.factor = factor.cast<float>();
    options.square_blocks = square_blocks;
    if (!amax.is_none()) options.amax = amax.cast<std::vector<float>>();
    std::tie(options.offset, options.row_length) = offset;
    if (!importance.is_none()) options.importance = to_array(importance, "importance");
    return options;
}

// A new array of that type, filled by fill(view).
template <class Fill>
py::array new_array(py::handle dtype, const char* argument, const Shape& shape, Fill fill) {
    const std::pair<py::array, Array> made = allocate_numpy(parse_dtype(to_text(dtype, argument)), shape);
    released([&] { fill(made.second); });
    return made.first;
}

}  // namespace

Precision parse_precision(std::string_view name) {
    if (name == "exact") return Precision::exact;
    if (name == "fast") return Precision::fast;
    throw_value("precision must be 'exact' or 'fast', got '" + std::string(name) + "'");
}

void register_ops(py::module_& m) {
    m.def("plan_cast", [](py::handle shape, const Recipe& recipe) {
        const CastPlan plan = plan_cast(to_shape(shape, "shape"), recipe);
        py::dict result;
        result["data"] = py::make_tuple(plan.data_shape, plan.data_type.name());
        result["scale"] = py::make_tuple(plan.scale_shape, plan.scale_type.name());
        result["zero_point"] = plan.has_zero_point
                                   ? py::object(py::make_tuple(plan.scale_shape, plan.zero_point_type.name()))
                                   : py::none();
        result["global_scale"] =
            plan.has_global_scale ? py::object(py::make_tuple(plan.global_scale_shape, "float32")) : py::none();
        return result;
    });

    const auto none = [](const char* name) { return py::arg_v(name, py::none()); };
    m.def(
        "cast",
        [](py::handle x, const Recipe& recipe, py::handle seed, py::handle hadamard, py::handle factor,
           bool square_blocks, py::handle amax, Offset offset, py::handle importance) {
            const CastOptions options = options_of(seed, hadamard, factor, square_blocks, amax, offset, importance);
            const Array array = to_array(x, "x");
            if (!array.type.is_number())
                throw_type("x must be a float32, float64, float16 or bfloat16 array, got dtype " + array.type.name());
            NumpyCast result(array.shape, recipe);
            released([&] { cast_into(array, recipe, result.out(), options); });
            return result.finish(array.type.dtype());
        },
        py::arg("x"), py::arg("recipe"), none("seed"), none("hadamard"), none("factor"),
        py::arg("square_blocks") = false, none("amax"), py::arg("offset") = Offset{}, none("importance"));

    m.def(
        "cast_into",
        [](py::handle x, const Recipe& recipe, py::handle data, py::handle scale, py::handle zero_point,
           py::handle global_scale, py::handle seed, py::handle hadamard, py::handle factor, bool square_blocks,
           py::handle amax, Offset offset, py::handle importance) {
            const Array array = to_array(x, "x");
            const CastOutput out = outputs(data, scale, zero_point, global_scale);
            const CastOptions options = options_of(seed, hadamard, factor, square_blocks, amax, offset, importance);
            const Released release;
            cast_into(array, recipe, out, options);
        },
        py::arg("x"), py::arg("recipe"), py::arg("data"), py::arg("scale"), py::arg("zero_point"),
        py::arg("global_scale"), none("seed"), none("hadamard"), none("factor"), py::arg("square_blocks") = false,
        none("amax"), py::arg("offset") = Offset{}, none("importance"));

    m.def(
        "cast_at",
        [](std::uintptr_t pointer, Shape shape, Shape strides, std::string_view dtype, const Recipe& recipe,
           const Addresses& addresses, py::handle seed, py::handle hadamard, py::handle factor, bool square_blocks,
           py::handle amax, Offset offset, py::handle importance) {
            const Array x = borrow_elements(pointer, std::move(shape), std::move(strides), dtype);
            const CastOptions options = options_of(seed, hadamard, factor, square_blocks, amax, offset, importance);
            const Released release;
            cast_into(x, recipe, outputs_at(plan_cast(x.shape, recipe), addresses), options);
        },
        py::arg("pointer"), py::arg("shape"), py::arg("strides"), py::arg("dtype"), py::arg("recipe"),
        py::arg("addresses"), none("seed"), none("hadamard"), none("factor"), py::arg("square_blocks") = false,
        none("amax"), py::arg("offset") = Offset{}, none("importance"));

    m.attr("GPTQ_DAMP") = GptqOptions{}.damp;
    m.def("more_damping", &more_damping, py::arg("damp"));
    m.def("gptq", [](py::handle w, py::handle moments, const Recipe& recipe, bool act_order, double damp) {
        const Array weights = to_array(w, "w"), given = to_array(moments, "moments");
        NumpyCast result(weights.shape, recipe);
        const GptqReport report = released(
            [&] { return gptq_into(weights, given, recipe, result.out(), {.act_order = act_order, .damp = damp}); });
        return py::make_tuple(result.finish(weights.type.dtype()), report.damp, report.dead, report.nearest);
    });
    m.def("gptq_on_levels", [](py::handle w, py::handle moments, py::handle scale, py::handle offset, py::handle levels,
                               py::handle codes, bool act_order, double damp) {
        const Array weights = to_array(w, "w"), given = to_array(moments, "moments");
        const LevelCodes on{to_array(scale, "scale"), to_array(offset, "offset"), to_array(levels, "levels"),
                            to_output(codes, "codes")};
        const GptqReport report =
            released([&] { return gptq_into(weights, given, on, {.act_order = act_order, .damp = damp}); });
        return py::make_tuple(report.damp, report.dead, report.nearest);
    });

    m.def(
        "adamw_step",
        [](py::handle weights, py::handle gradients, const py::tuple& first, const py::tuple& second,
           const Recipe& recipe, double lr, double beta1, double beta2, double eps, double weight_decay,
           std::int64_t step) {
            const auto moment = [](const py::tuple& parts, const char* name) {
                return Moment{to_output(parts[0], name), to_output(parts[1], name), to_optional_array(parts[2], name)};
            };
            const Array w = to_output(weights, "weights"), g = to_array(gradients, "gradients");
            const Moment m = moment(first, "first"), v = moment(second, "second");
            const Released release;
            adamw_step(
                w, g, m, v, recipe,
                {.lr = lr, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay, .step = step});
        },
        py::arg("weights"), py::arg("gradients"), py::arg("first"), py::arg("second"), py::arg("recipe"), py::arg("lr"),
        py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("step"));

    m.def("dequantize", [](const ScaledTensor& scaled, py::handle dtype) {
        return new_array(dtype, "dtype", scaled.shape(), [&](const Array& out) { dequantize_into(scaled, out); });
    });

    m.def("dequantize_into", [](const ScaledTensor& scaled, py::handle out) {
        const Array view = to_output(out, "out");
        const Released release;
        dequantize_into(scaled, view);
    });

    m.def("requantize", [](const ScaledTensor& scaled, const Recipe& recipe) {
        NumpyCast result(scaled.shape(), recipe);
        released([&] { requantize_into(scaled, recipe, result.out()); });
        return result.finish(scaled.original_dtype());
    });

    m.def("requantize_into", [](const ScaledTensor& scaled, const Recipe& recipe, py::handle data, py::handle scale,
                                py::handle zero_point, py::handle global_scale) {
        const CastOutput out = outputs(data, scale, zero_point, global_scale);
        const Released release;
        requantize_into(scaled, recipe, out);
    });

    m.def("requantize_at", [](const ScaledTensor& scaled, const Recipe& recipe, const Addresses& addresses) {
        const Released release;
        requantize_into(scaled, recipe, outputs_at(plan_cast(scaled.shape(), recipe), addresses));
    });

    m.def("transpose", [](const ScaledTensor& scaled) {
        const Shape shape = transpose_shape(scaled);
        NumpyCast result(shape, scaled.recipe());
        const TransposeReport report = released([&] { return transpose_into(scaled, result.out()); });
        return py::make_tuple(result.finish(scaled.original_dtype()), report.rounded, report.lost);
    });

    // A prepared weight is a ScaledTensor to Python: the same values in memory of the core's own.
    m.def(
        "prepare", [](const ScaledTensor& weight) { return released([&] { return PreparedWeight(weight).tensor(); }); },
        py::arg("weight"));

    m.def("matmul_shape", [](py::handle a, py::handle b) {
        return py::tuple(py::cast(matmul_shape(to_shape(a, "a.shape"), to_shape(b, "b.shape"))));
    });

    m.def(
        "matmul",
        [](py::handle a, py::handle b, py::handle out_dtype, py::handle precision) {
            const Precision allowed = parse_precision(to_text(precision, "precision"));
            const PyOperand left(a, "a"), right(b, "b");
            const Operand lhs = left.get(), rhs = right.get();
            return new_array(out_dtype, "out_dtype", matmul_shape(lhs.shape(), rhs.shape()),
                             [&](const Array& out) { matmul_into(lhs, rhs, out, allowed); });
        },
        py::arg("a"), py::arg("b"), py::arg("out_dtype"), py::arg("precision") = "exact");

    m.def(
        "matmul_into",
        [](py::handle a, py::handle b, py::handle out, py::handle precision) {
            const Precision allowed = parse_precision(to_text(precision, "precision"));
            const PyOperand left(a, "a"), right(b, "b");
            const Operand lhs = left.get(), rhs = right.get();
            const Array view = to_output(out, "out");
            const Released release;
            matmul_into(lhs, rhs, view, allowed);
        },
        py::arg("a"), py::arg("b"), py::arg("out"), py::arg("precision") = "exact");

    m.def("linear", [](py::handle x, py::handle w, py::handle bias, py::handle out_dtype, py::handle precision) {
        const Precision allowed = parse_precision(to_text(precision, "precision"));
        const PyOperand left(x, "x"), right(w, "w");
        const Operand rows = left.get(), weight = right.get();
        const std::optional<Array> added = bias.is_none() ? std::nullopt : std::optional(to_array(bias, "bias"));
        Shape shape = rows.shape();
        shape.at(shape.size() - 1) = weight.shape().at(0);
        return new_array(out_dtype, "out_dtype", shape,
                         [&](const Array& out) { linear_into(rows, weight, added ? &*added : nullptr, out, allowed); });
    });

    m.def("linear_into", [](py::handle x, py::handle w, py::handle bias, py::handle out, py::handle precision) {
        const Precision allowed = parse_precision(to_text(precision, "precision"));
        const PyOperand left(x, "x"), right(w, "w");
        const Operand rows = left.get(), weight = right.get();
        const std::optional<Array> added = bias.is_none() ? std::nullopt : std::optional(to_array(bias, "bias"));
        const Array view = to_output(out, "out");
        const Released release;
        linear_into(rows, weight, added ? &*added : nullptr, view, allowed);
    });

    m.def("grouped_matmul", [](py::handle x, const ScaledTensor& w_stack, const std::vector<std::int64_t>& offsets,
                               py::handle out_dtype) {
        const PyOperand activations(x, "x");
        const Operand rows = activations.get();
        return new_array(out_dtype, "out_dtype", {rows.shape().at(0), w_stack.shape().at(1)},
                         [&](const Array& out) { grouped_matmul_into(rows, w_stack, offsets, out); });
    });

    m.def("grouped_matmul_into",
          [](py::handle x, const ScaledTensor& w_stack, const std::vector<std::int64_t>& offsets, py::handle out) {
              const PyOperand activations(x, "x");
              const Operand rows = activations.get();
              const Array view = to_output(out, "out");
              const Released release;
              grouped_matmul_into(rows, w_stack, offsets, view);
          });
}

}  // namespace breccia::python
