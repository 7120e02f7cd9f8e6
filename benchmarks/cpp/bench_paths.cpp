// SPDX-License-Identifier: Apache-2.0
//
// The measurements behind the tables of cpp/src/matmul/choose.cpp: x (M, 4096) by a weight (4096, 4096)^T on one thread
// by each path that suits the operands, be another quicker or not. The bounds of a row are the least and the largest M,
// or number of bfloat16 terms, at which its path is the quickest of the backend.
#include <benchmark/benchmark.h>

#include "breccia/prepared.hpp"
#include "matmul/paths/paths.hpp"
#include "operands.hpp"

namespace breccia {
namespace {

struct Case {
    std::string backend, path;
    Recipe recipe;
    DType dtype = DType::bfloat16;
    bool prepared = false;
};

void run(benchmark::State& state, const Case& c) {
    const BackendScope scope(c.backend);
    const std::int64_t m = state.range(0);
    const Array x = normal(c.dtype, {m, extent}, 2), y = Array::allocate(DType::float32, {m, extent});
    const ScaledTensor w = cast(weight(), c.recipe);
    const ScaledTensor plain = w.transposed();
    const PreparedWeight prepared = PreparedWeight(w).transposed();
    const Operand operand = c.prepared ? Operand(prepared) : Operand(plain);
    set_num_threads(1);
    if (!multiply_by(c.path, x, operand, y)) return state.SkipWithError("the path does not support these operands");
    for (auto _ : state) {
        multiply_by(c.path, x, operand, y);
        benchmark::ClobberMemory();
    }
}

const int registered = [] {
    const std::pair<const char*, Recipe> recipes[] = {
        {"fp8_1x128", make_recipe("Float8BlockScaling")},
        {"mxfp8", make_recipe("MXFP8BlockScaling")},
        {"mxfp4", make_recipe("MXFP4BlockScaling")},
        {"nvfp4", make_recipe("NVFP4BlockScaling")},
        {"int4", make_recipe("INT4Scaling")},
        {"int8", make_recipe("INT8Scaling")},
    };
    for (const std::string& backend : cpu_info().supported)
        for (const auto& [name, recipe] : recipes)
            for (const DType dtype : {DType::bfloat16, DType::float32})
                for (const bool prepared : {false, true})
                    for (const Path* const one : every_path) {
                        const std::string_view path = one->name;
                        const Case c{.backend = backend,
                                     .path = std::string(path),
                                     .recipe = recipe,
                                     .dtype = dtype,
                                     .prepared = prepared};
                        const std::string full = "paths/" + backend + "/" + name + "/" + std::string(name_of(dtype)) +
                                                 (prepared ? "/prepared/" : "/plain/") + c.path;
                        benchmark::RegisterBenchmark(full.c_str(), [c](benchmark::State& state) { run(state, c); })
                            ->ArgName("M")
                            ->ArgsProduct({{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48}})
                            ->Unit(benchmark::kMillisecond)
                            ->UseRealTime();
                    }
    return 0;
}();

}  // namespace
}  // namespace breccia
