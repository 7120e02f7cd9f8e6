// SPDX-License-Identifier: Apache-2.0
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

// A ScaledTensor or an array, kept alive for the duration of a call.
class PyOperand {
public:
    PyOperand(py::handle object, const char* argument) {
        if (py::isinstance<ScaledTensor>(object))
            scaled_ = &object.cast<const ScaledTensor&>();
        else
            array_ = to_array(object, argument);
    }
    [[nodiscard]] Operand get() const { return scaled_ != nullptr ? Operand(*scaled_) : Operand(array_); }

private:
    const ScaledTensor* scaled_ = nullptr;
    Array array_;
};

}  // namespace

void register_ops(py::module_& m) {
    m.def("plan_cast", [](const Shape& shape, const Recipe& recipe) {
        const CastPlan plan = plan_cast(shape, recipe);
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

    m.def("cast", [](py::handle x, const Recipe& recipe) {
        const Array array = to_array(x, "x");
        if (!array.type.is_number())
            throw_type("x must be a float32, float64, float16 or bfloat16 array, got dtype " + array.type.name());
        NumpyCast result(array.shape, recipe);
        {
            const py::gil_scoped_release release;
            cast_into(array, recipe, result.out());
        }
        return result.finish(array.type.dtype());
    });

    m.def("cast_into", [](py::handle x, const Recipe& recipe, py::handle data, py::handle scale, py::handle zero_point,
                          py::handle global_scale) {
        const Array array = to_array(x, "x");
        const CastOutput out = outputs(data, scale, zero_point, global_scale);
        const py::gil_scoped_release release;
        cast_into(array, recipe, out);
    });

    m.def("dequantize", [](const ScaledTensor& scaled, std::string_view dtype) {
        auto [array, view] = allocate_numpy(parse_dtype(dtype), scaled.shape());
        {
            const py::gil_scoped_release release;
            dequantize_into(scaled, view);
        }
        return array;
    });

    m.def("dequantize_into", [](const ScaledTensor& scaled, py::handle out) {
        const Array view = to_output(out, "out");
        const py::gil_scoped_release release;
        dequantize_into(scaled, view);
    });

    m.def("requantize", [](const ScaledTensor& scaled, const Recipe& recipe) {
        NumpyCast result(scaled.shape(), recipe);
        {
            const py::gil_scoped_release release;
            requantize_into(scaled, recipe, result.out());
        }
        return result.finish(scaled.original_dtype());
    });

    m.def("requantize_into", [](const ScaledTensor& scaled, const Recipe& recipe, py::handle data, py::handle scale,
                                py::handle zero_point, py::handle global_scale) {
        const CastOutput out = outputs(data, scale, zero_point, global_scale);
        const py::gil_scoped_release release;
        requantize_into(scaled, recipe, out);
    });

    m.def("matmul_shape", [](const Shape& a, const Shape& b) { return py::tuple(py::cast(matmul_shape(a, b))); });

    m.def("matmul", [](py::handle a, py::handle b, std::string_view out_dtype) {
        const PyOperand left(a, "a"), right(b, "b");
        const Operand lhs = left.get(), rhs = right.get();
        auto [array, view] = allocate_numpy(parse_dtype(out_dtype), matmul_shape(lhs.shape(), rhs.shape()));
        {
            const py::gil_scoped_release release;
            matmul_into(lhs, rhs, view, current_precision());
        }
        return array;
    });

    m.def("matmul_into", [](py::handle a, py::handle b, py::handle out) {
        const PyOperand left(a, "a"), right(b, "b");
        const Operand lhs = left.get(), rhs = right.get();
        const Array view = to_output(out, "out");
        const py::gil_scoped_release release;
        matmul_into(lhs, rhs, view, current_precision());
    });
}

}  // namespace breccia::python
