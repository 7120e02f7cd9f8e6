// SPDX-License-Identifier: Apache-2.0
//
// What the machine can do at most: bytes per second copied, read and stored, at sizes that stay in the caches and that
// do not, and floating point operations per second of each kind of instruction the matmul kernels use. On one thread
// and on as many as the process may run on, each with memory of its own.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "breccia/breccia.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace breccia {
namespace {

constexpr std::int64_t mebibyte = 1 << 20;

void copy(benchmark::State& state) {
    const auto bytes = static_cast<std::size_t>(state.range(0) * mebibyte);
    const std::vector<char> from(bytes, 1);
    std::vector<char> to(bytes);
    for (auto _ : state) {
        std::memcpy(to.data(), from.data(), bytes);
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(2 * bytes));
}

// Eight chains of 64-byte vectors, or what the target makes of them.
using Words = std::uint64_t __attribute__((vector_size(64)));

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("default", "avx2", "avx512f")))
#endif
std::uint64_t read_all(const std::uint64_t* p, std::int64_t count) {
    Words sum[8] = {};
    for (std::int64_t i = 0; i + 64 <= count; i += 64)
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            Words x;
            std::memcpy(&x, p + i + 8 * j, sizeof x);
            sum[j] ^= x;
        }
    std::uint64_t all = 0;
    for (const Words& words : sum)
        for (int lane = 0; lane < 8; ++lane) all ^= words[lane];
    return all;
}

void read(benchmark::State& state) {
    const std::int64_t bytes = state.range(0) * mebibyte;
    const std::vector<std::uint64_t> words(static_cast<std::size_t>(bytes / 8), 1);
    for (auto _ : state) benchmark::DoNotOptimize(read_all(words.data(), bytes / 8));
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * bytes);
}

void store(benchmark::State& state) {
    const auto bytes = static_cast<std::size_t>(state.range(0) * mebibyte);
    std::vector<char> to(bytes);
    for (auto _ : state) {
        std::memset(to.data(), 1, bytes);
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(bytes));
}

/// A loop of one instruction on enough independent registers to hide its latency.
struct Peak {
    const char* name;
    const char* feature;  ///< of cpu_info()
    void (*run)(std::int64_t rounds);
    double flop;  ///< of a round
};

#if defined(__x86_64__)
// A register the compiler may not reason about.
#define BRECCIA_OPAQUE(x) __asm__ volatile("" : "+v"(x))

__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t rounds) {
    __m256 sum[12], a = _mm256_set1_ps(0.5F), b = _mm256_set1_ps(0.25F);
    for (__m256& s : sum) s = _mm256_setzero_ps();
    for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (__m256& s : sum) s = _mm256_fmadd_ps(s, a, b);
#pragma GCC unroll 12
        for (__m256& s : sum) BRECCIA_OPAQUE(s);
    }
}

__attribute__((target("avx512f"))) void fma_avx512(std::int64_t rounds) {
    __m512 sum[16], a = _mm512_set1_ps(0.5F), b = _mm512_set1_ps(0.25F);
    for (__m512& s : sum) s = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (__m512& s : sum) s = _mm512_fmadd_ps(s, a, b);
#pragma GCC unroll 16
        for (__m512& s : sum) BRECCIA_OPAQUE(s);
    }
}

__attribute__((target("avx512f,avx512bf16"))) void dot_bf16(std::int64_t rounds) {
    __m512 sum[16];
    const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3F00));
    for (__m512& s : sum) s = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (__m512& s : sum) s = _mm512_dpbf16_ps(s, a, a);
#pragma GCC unroll 16
        for (__m512& s : sum) BRECCIA_OPAQUE(s);
    }
}

// Two by two tiles of results, as a product has. Its speed depends on the data, so that is not constant.
__attribute__((target("amx-tile,amx-bf16"))) void tiles_bf16(std::int64_t rounds) {
    struct alignas(64) Config {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Config config;
    alignas(64) std::uint16_t data[4][512];
    std::uint32_t random = 1;
    for (auto& tile : data)
        for (std::uint16_t& x : tile) {
            random = random * 1664525U + 1013904223U;
            x = static_cast<std::uint16_t>((random >> 16 & 0x807FU) | 0x3F00U);
        }
    _tile_loadconfig(&config);
    _tile_loadd(4, data[0], 64);
    _tile_loadd(5, data[1], 64);
    _tile_loadd(6, data[2], 64);
    _tile_loadd(7, data[3], 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

constexpr Peak peaks[] = {
    {"fp32_avx2", "avx2", fma_avx2, 12 * 8 * 2.0},
    {"fp32_avx512", "avx512", fma_avx512, 16 * 16 * 2.0},
    {"bf16_avx512", "avx512_bf16", dot_bf16, 16 * 16 * 4.0},
    {"bf16_amx", "amx_bf16", tiles_bf16, 4 * 16 * 16 * 32 * 2.0},
};
#elif defined(__aarch64__)
void fma_neon(std::int64_t rounds) {
    using Lanes = float __attribute__((vector_size(16)));
    Lanes sum[16] = {}, a = {0.5F, 0.5F, 0.5F, 0.5F};
    for (std::int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
        for (Lanes& s : sum) __asm__ volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(s) : "w"(a));
}

constexpr Peak peaks[] = {{"fp32_neon", "neon", fma_neon, 16 * 4 * 2.0}};
#endif

#if defined(__x86_64__) || defined(__aarch64__)
void compute(benchmark::State& state, const Peak& peak) {
    constexpr std::int64_t rounds = 10'000;
    for (auto _ : state) peak.run(rounds);
    // Not kIsIterationInvariantRate: that counts the iterations of all threads for each of them.
    state.counters["FLOP/s"] =
        benchmark::Counter(peak.flop * rounds * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
#endif

const bool registered = [] {
    const CpuInfo cpu = cpu_info();  // also asks the system for the tile registers
    std::vector<int> threads{1};
    const auto processors = static_cast<int>(std::thread::hardware_concurrency());
    if (processors > 1) threads.push_back(processors);
    for (const int count : threads) {
        benchmark::RegisterBenchmark("limit/memcpy", copy)->Arg(16)->Arg(256)->Threads(count)->UseRealTime();
        benchmark::RegisterBenchmark("limit/store", store)->Arg(16)->Arg(256)->Threads(count)->UseRealTime();
        benchmark::RegisterBenchmark("limit/read", read)->Arg(8)->Arg(16)->Arg(256)->Threads(count)->UseRealTime();
#if defined(__x86_64__) || defined(__aarch64__)
        for (const Peak& peak : peaks)
            if (std::ranges::find(cpu.features, peak.feature) != cpu.features.end())
                benchmark::RegisterBenchmark((std::string("limit/flops/") + peak.name).c_str(),
                                             [&peak](benchmark::State& state) { compute(state, peak); })
                    ->Threads(count)
                    ->UseRealTime();
#endif
    }
    return true;
}();

}  // namespace
}  // namespace breccia
