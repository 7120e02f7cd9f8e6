// SPDX-License-Identifier: Apache-2.0
//
// cast, dequantize and requantize of a 2048 x 2048 tensor, per recipe and backend, one thread, beside memcpy.
// Bytes per second count what is read and what is written.
#include <cstring>
#include <memory>
#include <random>

#include <benchmark/benchmark.h>

#include "breccia/breccia.hpp"

namespace breccia {
namespace {

constexpr std::int64_t extent = 2048;

const Array& input() {
    static const Array x = [] {
        Array array = Array::allocate(DType::float32, {extent, extent});
        std::mt19937 random(1);
        std::normal_distribution<float> value(0.0F, 0.02F);
        for (std::int64_t i = 0; i < extent * extent; ++i) array.as<float>()[i] = value(random);
        return array;
    }();
    return x;
}

void set_bytes(benchmark::State& state, std::int64_t bytes) {
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * bytes);
}

void copy(benchmark::State& state) {
    const auto bytes = static_cast<std::size_t>(extent * extent) * sizeof(float);
    const Array out = Array::allocate(DType::float32, {extent, extent});
    for (auto _ : state) {
        std::memcpy(out.data, input().data, bytes);
        benchmark::ClobberMemory();
    }
    set_bytes(state, static_cast<std::int64_t>(2 * bytes));
}

void run_cast(benchmark::State& state, const std::string& backend, const Recipe& recipe) {
    const BackendScope scope(backend);
    const CastOutput out = allocate(plan_cast({extent, extent}, recipe));
    for (auto _ : state) {
        cast_into(input(), recipe, out);
        benchmark::ClobberMemory();
    }
    set_bytes(state, extent * extent * 4 + out.data.size());
}

void run_dequantize(benchmark::State& state, const std::string& backend, const Recipe& recipe, DType dtype) {
    const BackendScope scope(backend);
    const ScaledTensor scaled = cast(input(), recipe);
    const Array out = Array::allocate(dtype, {extent, extent});
    for (auto _ : state) {
        dequantize_into(scaled, out);
        benchmark::ClobberMemory();
    }
    set_bytes(state, extent * extent * static_cast<std::int64_t>(size_of(dtype)) + scaled.data().size());
}

void run_requantize(benchmark::State& state, const std::string& backend, const Recipe& from, const Recipe& to) {
    const BackendScope scope(backend);
    const ScaledTensor scaled = cast(input(), from);
    const CastOutput out = allocate(plan_cast({extent, extent}, to));
    for (auto _ : state) {
        requantize_into(scaled, to, out);
        benchmark::ClobberMemory();
    }
    set_bytes(state, scaled.data().size() + out.data.size());
}

std::vector<std::pair<std::string, Recipe>> recipes() {
    std::vector<std::pair<std::string, Recipe>> all;
    for (const RecipeRow& row : catalogue()) all.emplace_back(row.short_name, make_recipe(row.name));
    all.emplace_back("block128x128", make_recipe("Float8BlockScaling", {{"block_m", std::int64_t{128}}}));
    all.emplace_back("nvfp4-mse", make_recipe("NVFP4BlockScaling", {{"scale_search", std::string("mse")}}));
    all.emplace_back("int4-mse", make_recipe("INT4Scaling", {{"scale_search", std::string("mse")}}));
    return all;
}

const bool registered = [] {
    set_num_threads(1);
    benchmark::RegisterBenchmark("memcpy", copy);
    for (const std::string& backend : cpu_info().supported) {
        for (const auto& [name, recipe] : recipes()) {
            benchmark::RegisterBenchmark(("cast/" + name + "/" + backend).c_str(), run_cast, backend, recipe);
            for (const DType dtype : {DType::float32, DType::bfloat16})
                benchmark::RegisterBenchmark(
                    ("dequantize/" + name + "/" + std::string(name_of(dtype)) + "/" + backend).c_str(), run_dequantize,
                    backend, recipe, dtype);
        }
        benchmark::RegisterBenchmark(("requantize/block-nvfp4/" + backend).c_str(), run_requantize, backend,
                                     make_recipe("Float8BlockScaling"), make_recipe("NVFP4BlockScaling"));
    }
    return true;
}();

}  // namespace
}  // namespace breccia
