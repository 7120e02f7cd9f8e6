// SPDX-License-Identifier: Apache-2.0
//
// A BackendScope holds for the whole of a verb, on whatever threads it works: a verb takes its kernels once, on the
// thread that called it. Any other look for them fails here, since BRECCIA_CPU names a backend that there is not.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "../support.hpp"
#include "breccia/adamw.hpp"
#include "breccia/gptq.hpp"

namespace breccia {
namespace {

int failures = 0, shared_out = 0;

/// Two threads to a verb, and all that it shares out done by the one that did not call it.
void use_another_thread() {
    set_num_threads(2);
    set_executor([](int count, const std::function<void(int)>& task) {
        std::thread([&] {
            for (int i = 0; i < count; ++i) task(i);
        }).join();
        ++shared_out;
    });
}

void check(const std::string& verb, const std::function<void()>& call) {
    shared_out = 0;
    try {
        call();
        if (shared_out > 0) return;
        std::printf("%s has given no thread any work\n", verb.c_str());
    } catch (const std::exception& error) {
        std::printf("%s: %s\n", verb.c_str(), error.what());
    }
    ++failures;
}

void check_step(DType dtype) {
    constexpr std::int64_t count = 1 << 16, group = 32;
    const auto moment = [] {
        const Array codes = Array::allocate(ElementType::uint8(), {count}),
                    scale = Array::allocate(ElementType::uint8(), {count / group});
        std::fill_n(codes.as<std::uint8_t>(), count, std::uint8_t{0});
        std::fill_n(scale.as<std::uint8_t>(), count / group, std::uint8_t{127});
        return Moment{.codes = codes, .scale = scale, .exponents = {}};
    };
    std::vector<float> numbers = heavy_tailed(1, count, 3, 1);
    const Array weights = rounded(numbers, dtype, {count}), gradients = rounded(numbers, dtype, {count});
    check("adamw_step", [&] { adamw_step(weights, gradients, moment(), moment(), recipes::mxfp8{}, {}); });
}

void check_verbs() {
    constexpr std::int64_t rows = 512, cols = 512, experts = 8;
    std::vector<float> values = heavy_tailed(rows, cols, 1, 1), activations = heavy_tailed(64, cols, 2, 1);
    const Array x = array_of(values, {rows, cols}), a = array_of(activations, {64, cols});
    const std::vector<std::int64_t> offsets{0, 1, 9, 9, 20, 40, 50, 60, 64};
    std::vector<std::uint8_t> codes(values.size());
    check("encode", [&] { encode(values, format_of<Float8E4M3FN>, codes); });
    check("decode", [&] { decode(codes, format_of<Float8E4M3FN>, values); });
    check("magnitudes", [&] { magnitudes(x); });
    std::vector<float> columns(cols, 2.0F), products(cols * cols, 0.25F);
    for (std::int64_t i = 0; i < cols; ++i) products[static_cast<std::size_t>(i * cols + i)] = 2;
    CastOptions by_importance;
    by_importance.importance = array_of(columns, {cols});
    const Array moments = array_of(products, {cols, cols});
    for (const DType dtype : {DType::float32, DType::bfloat16}) check_step(dtype);
    Sample cases(sanitized);
    for (const Recipe& recipe : all_recipes()) {
        if (!cases.takes()) continue;
        const auto check_it = [&](const char* verb, const std::function<void()>& call) {
            check(verb + (" of " + describe(recipe)), call);
        };
        const ScaledTensor w = cast(x, recipe);
        check_it("cast", [&] { cast(x, recipe); });
        for (const char* to : {"DelayedScaling", "NVFP4BlockScaling"})
            if (recipe.name != to)
                check_it(("requantize to " + std::string(to)).c_str(), [&] { requantize(w, make_recipe(to)); });
        check_it("dequantize", [&] { dequantize(w); });
        if (!recipe.is_expanded()) {
            check_it("cast by importance", [&] { cast(x, recipe, by_importance); });
            check_it("gptq", [&] { gptq(x, moments, recipe); });
        }
        check_it("compare", [&] { compare(x, w); });
        check_it("error_magnitudes", [&] { error_magnitudes(x, w, 1); });
        check_it("count_codes", [&] { count_codes(w); });
        const PreparedWeight prepared(w.transposed());
        for (const std::int64_t m : {1, 4, 64}) {
            Array some = a;
            some.shape[0] = m;
            check_it("matmul", [&] { matmul(some, w.transposed()); });
            check_it("matmul by a prepared weight", [&] { matmul(some, prepared); });
            check_it("linear", [&] { linear(some, w); });
        }
        const Array parts = Array::borrow(values, {experts, rows / experts, cols});
        const ScaledTensor stack = cast(parts, recipe);
        check_it("grouped_matmul", [&] { grouped_matmul(a, stack, offsets); });
        check_it("matmul of a batch",
                 [&] { matmul(Array::borrow(values, {experts, rows / experts, cols}), stack.transposed()); });
    }
}

}  // namespace
}  // namespace breccia

int main() {
#if defined(_WIN32)
    _putenv_s("BRECCIA_CPU", "none");
#else
    setenv("BRECCIA_CPU", "none", 1);
#endif
    try {
        breccia::cpu_info();
        std::puts("a look for kernels outside of the scope does not fail");
        return EXIT_FAILURE;
    } catch (const breccia::Error&) {}  // as it is meant to
    const breccia::BackendScope scope("portable");
    breccia::use_another_thread();
    breccia::check_verbs();
    return breccia::failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
