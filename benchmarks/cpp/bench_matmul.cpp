// SPDX-License-Identifier: Apache-2.0
//
// x (M, 4096) by a weight (4096, 4096)^T: every kernel of every backend, by recipe, type of x, plain or prepared
// weight, M and threads. Bytes per second count the packed weight with its scales, FLOP/s two per product of elements.
// "/rotating" takes weights in turn, more than the last-level cache holds. memory/read is what memory itself gives.
#include <memory>

#include <benchmark/benchmark.h>

#include "operands.hpp"

namespace breccia {
namespace {

struct Case {
    std::string backend;
    Recipe recipe;
    DType dtype = DType::bfloat16;  // of numbers as activations
    bool fp8 = false;               // activations are FP8 in blocks of 128
    bool prepared = false, rotating = false;
};

Operand operand(const std::vector<ScaledTensor>& plain, const std::vector<PreparedWeight>& prepared, std::size_t i) {
    return prepared.empty() ? Operand(plain[i % plain.size()]) : Operand(prepared[i % prepared.size()]);
}

void run(benchmark::State& state, const Case& c) {
    const std::int64_t m = state.range(0);
    const auto threads = static_cast<int>(state.range(1));
    const BackendScope scope(c.backend);
    const Array x = normal(c.fp8 ? DType::float32 : c.dtype, {m, extent}, 2);
    std::vector<ScaledTensor> plain, codes;
    if (c.fp8) codes.push_back(cast(x, make_recipe("Float8BlockScaling")));
    const Operand a = c.fp8 ? Operand(codes.front()) : Operand(x);
    const Array y = Array::allocate(DType::float32, {m, extent});
    constexpr std::int64_t more_than_cache = std::int64_t{256} << 20;
    std::vector<PreparedWeight> prepared;
    std::int64_t bytes = 0;
    do {
        const ScaledTensor w = cast(weight(), c.recipe);
        bytes += w.nbytes();
        if (c.prepared)
            prepared.push_back(PreparedWeight(w).transposed());
        else
            plain.push_back(w.transposed());
    } while (c.rotating && bytes < more_than_cache);
    const std::int64_t one = (c.prepared ? prepared.front().nbytes() : plain.front().nbytes());
    set_num_threads(threads);
    std::size_t turn = 0;
    for (auto _ : state) {
        matmul_into(a, operand(plain, prepared, turn++), y);
        benchmark::ClobberMemory();
    }
    set_num_threads(1);
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * one);
    state.counters["FLOP/s"] =
        benchmark::Counter(static_cast<double>(2 * m * extent * extent), benchmark::Counter::kIsIterationInvariantRate);
}

// Adds up 256 MiB as integers, eight chains of sums, which compilers turn into vectors.
void read(benchmark::State& state) {
    std::vector<std::uint64_t> x(std::size_t{32} << 20, 1);
    for (auto _ : state) {
        std::uint64_t sums[32] = {};
        for (std::size_t i = 0; i < x.size(); i += 32)
            for (std::size_t j = 0; j < 32; ++j) sums[j] += x[i + j];
        benchmark::DoNotOptimize(sums);
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * x.size() * sizeof(x[0])));
}

const int registered = [] {
    benchmark::RegisterBenchmark("memory/read", read)->Unit(benchmark::kMillisecond);
    const std::pair<const char*, Recipe> recipes[] = {
        {"fp8_1x128", make_recipe("Float8BlockScaling")},
        {"fp8_128x128", make_recipe("Float8BlockScaling", {{"block_m", std::int64_t{128}}})},
        {"fp8_tensor", make_recipe("Float8CurrentScaling")},
        {"mxfp8", make_recipe("MXFP8BlockScaling")},
        {"mxfp4", make_recipe("MXFP4BlockScaling")},
        {"nvfp4", make_recipe("NVFP4BlockScaling")},
        {"int4", make_recipe("INT4Scaling")},
        {"int8", make_recipe("INT8Scaling")},
    };
    struct Activations {
        const char* name;
        DType dtype;
        bool fp8;
    };
    const Activations activations[] = {
        {"bfloat16", DType::bfloat16, false}, {"float32", DType::float32, false}, {"fp8", DType::float32, true}};
    for (const std::string& backend : cpu_info().supported)
        for (const auto& [name, recipe] : recipes)
            for (const auto& [x_name, dtype, fp8] : activations)
                for (const bool prepared : {false, true})
                    for (const bool rotating : {false, true}) {
                        const Case c{.backend = backend,
                                     .recipe = recipe,
                                     .dtype = dtype,
                                     .fp8 = fp8,
                                     .prepared = prepared,
                                     .rotating = rotating};
                        const std::string full = "matmul/" + backend + "/" + name + "/" + x_name +
                                                 (prepared ? "/prepared" : "/plain") + (rotating ? "/rotating" : "");
                        auto* bench =
                            benchmark::RegisterBenchmark(full.c_str(), [c](benchmark::State& state) { run(state, c); });
                        bench->ArgNames({"M", "threads"})->ArgsProduct({{1, 4, 16, 64, 512}, {1, 2}});
                        bench->Unit(benchmark::kMillisecond)->UseRealTime();
                    }
    return 0;
}();

}  // namespace
}  // namespace breccia
