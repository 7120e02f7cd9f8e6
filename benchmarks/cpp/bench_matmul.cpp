// SPDX-License-Identifier: Apache-2.0
//
// x (M, 4096) by a weight (4096, 4096)^T, per recipe, backend and M, one thread. Bytes per second count the packed
// weight with its scales, FLOP/s two per product of elements. "/rotating" takes weights in turn, more than the
// last-level cache holds.
#include <memory>
#include <random>

#include <benchmark/benchmark.h>

#include "breccia/breccia.hpp"

namespace breccia {
namespace {

constexpr std::int64_t extent = 4096;

Array normal(DType dtype, Shape shape, unsigned seed) {
    Array array = Array::allocate(dtype, std::move(shape));
    std::mt19937 random(seed);
    std::normal_distribution<float> value(0.0F, 0.02F);
    for (std::int64_t i = 0; i < array.size(); ++i) {
        const float x = value(random);
        if (dtype == DType::float32)
            array.as<float>()[i] = x;
        else
            array.as<BFloat16>()[i] = to_bfloat16(x);
    }
    return array;
}

const Array& weight() {
    static const Array w = normal(DType::float32, {extent, extent}, 1);
    return w;
}

void run(benchmark::State& state, const std::string& backend, const Recipe& recipe, DType dtype, bool rotate) {
    set_num_threads(1);
    const BackendScope scope(backend);
    const std::int64_t m = state.range(0);
    const Array x = normal(dtype, {m, extent}, 2), y = Array::allocate(DType::float32, {m, extent});
    constexpr std::int64_t more_than_cache = std::int64_t{256} << 20;
    std::vector<ScaledTensor> weights;
    std::int64_t bytes = 0;
    do {
        weights.push_back(cast(weight(), recipe).transposed());
        bytes += weights.back().nbytes();
    } while (rotate && bytes < more_than_cache);
    std::size_t turn = 0;
    for (auto _ : state) {
        matmul_into(x, weights[turn++ % weights.size()], y);
        benchmark::ClobberMemory();
    }
    const auto done = static_cast<std::int64_t>(state.iterations());
    state.SetBytesProcessed(done * weights.front().nbytes());
    state.counters["FLOP/s"] =
        benchmark::Counter(static_cast<double>(2 * m * extent * extent), benchmark::Counter::kIsIterationInvariantRate);
}

const int registered = [] {
    const std::pair<const char*, Recipe> recipes[] = {
        {"fp8_1x128", make_recipe("Float8BlockScaling")},
        {"fp8_128x128", make_recipe("Float8BlockScaling", {{"block_m", std::int64_t{128}}})},
        {"mxfp8", make_recipe("MXFP8BlockScaling")},
        {"mxfp4", make_recipe("MXFP4BlockScaling")},
        {"nvfp4", make_recipe("NVFP4BlockScaling")},
        {"int4", make_recipe("INT4Scaling")},
        {"int8", make_recipe("INT8Scaling")},
    };
    for (const std::string& backend : cpu_info().supported)
        for (const auto& [name, recipe] : recipes)
            for (const DType dtype : {DType::bfloat16, DType::float32})
                for (const bool rotate : {false, true})
                    benchmark::RegisterBenchmark(
                        ("matmul/" + backend + "/" + name + "/" + std::string(name_of(dtype)) +
                         (rotate ? "/rotating" : ""))
                            .c_str(),
                        [=](benchmark::State& state) { run(state, backend, recipe, dtype, rotate); })
                        ->Arg(1)
                        ->Arg(4)
                        ->Arg(16)
                        ->Arg(512)
                        ->Unit(benchmark::kMillisecond);
    return 0;
}();

}  // namespace
}  // namespace breccia
