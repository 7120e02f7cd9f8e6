// SPDX-License-Identifier: Apache-2.0
//
// Arrays of any type, shape and strides as the parts of a ScaledTensor, with any recipe and layout. What the
// constructor takes, every verb takes or refuses by an Error, and every backend gives the same bytes.
#include <algorithm>
#include <optional>

#include "input.hpp"
#include "one_nan.hpp"

namespace breccia::fuzz {
namespace {

/// Whether verbs are tried with it. A shape without elements has a product with some: (1, 0) by (0, 2^31).
bool is_small(const Shape& shape) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) {
        if (n < 0 || n > 1 << 13) return false;
        count *= std::max<std::int64_t>(n, 1);
        if (count > 1 << 13) return false;
    }
    return true;
}

template <class F>
auto tried(F f) -> std::optional<decltype(f())> {
    try {
        return f();
    } catch (const Error& error) {
        expect(std::strlen(error.what()) > 8, "a message");
        return std::nullopt;
    }
}

bool same(const Array& a, const Array& b) {
    return a.shape == b.shape && a.type == b.type &&
           (a.size() == 0 || std::memcmp(a.data, b.data, static_cast<std::size_t>(a.size()) * a.type.size()) == 0);
}

Array comparable(const Array& array) { return array.type.is_number() ? with_one_nan(array) : array; }

/// The same on every backend: bytes, or a refusal.
template <class F>
void equal_everywhere(F f, const char* what) {
    std::optional<Array> wanted;
    {
        const BackendScope scope("portable");
        wanted = tried(f);
    }
    for (const std::string& name : cpu_info().supported) {
        const BackendScope scope(name);
        const std::optional<Array> given = tried(f);
        expect(given.has_value() == wanted.has_value(), what);
        if (wanted) expect(same(comparable(*given), comparable(*wanted)), what);
    }
}

void check_algebra(const ScaledTensor& tensor) {
    const ScaledTensor turned = tensor.transposed();
    const ScaledTensor back = turned.transposed();
    expect(back.shape() == tensor.shape() && back.layout() == tensor.layout(), "a transpose undone");
    expect(tensor.nbytes() >= 0 && turned.nbytes() == tensor.nbytes(), "nbytes");
    (void)tensor.layout().scale_shape(tensor.shape());
}

void check_verbs(Input& in, const ScaledTensor& tensor) {
    const auto dtype = static_cast<DType>(in.below(dtype_count));
    equal_everywhere([&] { return dequantize(tensor, dtype); }, "dequantize");
    equal_everywhere([&] { return dequantize(tensor.transposed(), dtype); }, "dequantize a view");
    if (const auto to = tried([&] { return any_recipe(in); })) (void)tried([&] { return requantize(tensor, *to); });
    Shape shape = tensor.shape();
    if (shape.size() < 2) return;
    shape = {1 + in.below(9), in.one_in(8) ? in.extent() : shape.back()};
    if (!is_small(shape)) return;
    const auto other = tried([&] { return any_array(in, static_cast<DType>(in.below(dtype_count)), shape); });
    if (!other) return;
    const auto precision = in.one_in(2) ? Precision::fast : Precision::exact;
    (void)tried([&] { return matmul(*other, tensor.transposed(), dtype, precision); });
    if (const auto ready = tried([&] { return PreparedWeight(tensor); }))
        (void)tried([&] { return matmul(*other, ready->transposed(), dtype, precision); });
}

void from_parts(Input& in) {
    const auto recipe = tried([&] { return any_recipe(in); });
    if (!recipe) return;
    const Layout layout = in.one_in(3) ? any_layout(in) : recipe->layout;
    const Shape shape = in.shape();
    ElementType type = ElementType::uint8();
    Shape data_shape = shape, scale_shape = in.shape();
    ElementType scale_type = element_type(recipe->scale);
    Extras extras;
    if (const auto plan = tried([&] { return plan_cast(shape, *recipe); }); plan && !in.one_in(4)) {
        type = plan->data_type;
        data_shape = plan->data_shape;
        extras.shape = shape;
        if (plan->has_global_scale) extras.global_scale = any_array(in, DType::float32, plan->global_scale_shape);
        if (plan->has_zero_point) extras.zero_point = any_array(in, plan->zero_point_type, plan->scale_shape);
    }
    if (const auto fits = tried([&] { return layout.scale_shape(shape); }); fits && !in.one_in(4)) scale_shape = *fits;
    if (in.one_in(8)) type = any_type(in);
    if (in.one_in(8)) scale_type = any_type(in);
    if (in.one_in(8)) extras.shape = in.shape();
    if (in.one_in(8)) extras.zero_point = any_array(in, any_type(in), in.shape());
    if (in.one_in(8)) extras.global_scale = any_array(in, any_type(in), in.shape());
    const Array data = any_array(in, type, data_shape), scale = any_array(in, scale_type, scale_shape);
    const ScaledTensor tensor(data, scale, *recipe, layout, extras);
    check_algebra(tensor);
    if (is_small(tensor.shape())) check_verbs(in, tensor);
}

void from_numbers(Input& in) {
    const Recipe recipe = any_recipe(in);
    const Array x = any_array(in, static_cast<DType>(in.below(dtype_count)), in.shape());
    CastOptions options;
    if (in.one_in(4)) options.seed = static_cast<std::uint64_t>(in.extent());
    if (in.one_in(4)) options.hadamard_block = in.extent();
    if (in.one_in(8)) options.factor = static_cast<float>(in.extent());
    options.square_blocks = in.one_in(8);
    const auto part = [&](auto which) { equal_everywhere([&] { return which(cast(x, recipe, options)); }, "cast"); };
    if (!is_small(x.shape)) {
        (void)tried([&] { return plan_cast(x.shape, recipe); });
        return;
    }
    part([](const ScaledTensor& made) { return made.data(); });
    part([](const ScaledTensor& made) { return made.scale(); });
    if (const auto made = tried([&] { return cast(x, recipe, options); })) {
        check_algebra(*made);
        check_verbs(in, *made);
    }
}

}  // namespace
}  // namespace breccia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace breccia;
    fuzz::Input in(data, size);
    set_num_threads(1);
    try {
        in.one_in(2) ? fuzz::from_parts(in) : fuzz::from_numbers(in);
    } catch (const Error&) {
        return 0;  // a refusal
    }
    return 0;
}
