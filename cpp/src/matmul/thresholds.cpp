// SPDX-License-Identifier: Apache-2.0
#include "matmul/thresholds.hpp"

#include <algorithm>
#include <limits>

namespace breccia::inline v0_4 {
namespace {

// Measured by benchmarks/cpp/bench_paths.cpp, which times every path at every number of activations whatever stands
// here: breccia_benchmarks --benchmark_filter=paths/<backend>/. A number that is the same for all is in thresholds.hpp.
constexpr Thresholds measured[] = {
    // --benchmark_filter=paths/portable/
    {.backend = "portable"},
    // --benchmark_filter=paths/avx2/
    {.backend = "avx2", .integer_rows = 1, .f32_rows = 8},
    // --benchmark_filter=paths/avx512/
    {.backend = "avx512", .integer_rows = 1, .f32_rows = 8},
    // --benchmark_filter=paths/avx512_bf16/
    {.backend = "avx512_bf16",
     .integer_rows = 2,
     .integer_terms = 2,
     .lane_vectors = 24,
     .prepared_lane_vectors = 48,
     .panel_terms = 2},
    // --benchmark_filter=paths/amx/; vdpbf16ps issues every other cycle there, vpdpbusd twice in each
    {.backend = "amx", .integer_rows = 2, .lane_vectors = 4, .prepared_lane_vectors = 4, .panel_terms = 3},
    // --benchmark_filter=paths/neon/, under qemu alone
    {.backend = "neon", .integer_rows = 1, .f32_rows = 4},
};

}  // namespace

const Thresholds& no_thresholds() {
    constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max() / 1024;  // is multiplied
    static constexpr Thresholds none{.backend = "",
                                     .integer_rows = any,
                                     .tile_vectors = 1,
                                     .tile_passes = any,
                                     .tile_passes_of_terms = any,
                                     .lane_rows = 1,
                                     .lane_bytes = 1,
                                     .lane_vectors = any,
                                     .prepared_lane_vectors = any,
                                     .bf16_rows = any,
                                     .bf16_passes = any,
                                     .f32_rows = any,
                                     .dequantized_rows = any,
                                     .panel_terms = any};
    return none;
}

const Thresholds& thresholds_of(std::string_view backend) {
    const auto* row = std::ranges::find(measured, backend, &Thresholds::backend);
    return row != std::end(measured) ? *row : no_thresholds();
}

}  // namespace breccia::inline v0_4
