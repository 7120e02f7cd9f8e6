// SPDX-License-Identifier: Apache-2.0
//
// Where one way to multiply is quicker than another. What each path computes is right on either side of a threshold:
// what it can compute at all, its own supports() or its first lines say.
#pragma once

#include <cstdint>
#include <string_view>

namespace breccia::inline v0_4 {

/// A vector is an activation, or a bfloat16 term of one.
struct Thresholds {
    std::string_view backend;
    std::int64_t integer_rows = 0;   ///< in_place_integer: the most activations; more share the decoding elsewhere
    std::int64_t integer_terms = 1;  ///< in_place_integer: the fewest bfloat16 terms of an activation
    std::int64_t tile_vectors = 3;   ///< tiles: the fewest vectors
    std::int64_t tile_passes = 1;    ///< tiles: the most passes over the weight, where panels take one term
    std::int64_t tile_passes_of_terms = 2;   ///< tiles: the same, where panels take several
    std::int64_t lane_rows = 3;              ///< lanes: the fewest activations by rows in place, turned for every pass
    std::int64_t lane_bytes = 2;             ///< lanes: the fewest vectors by codes of a byte
    std::int64_t lane_vectors = 0;           ///< lanes: the most vectors by rows in place
    std::int64_t prepared_lane_vectors = 0;  ///< lanes: the most by prepared weights, or where panels are of float32
    std::int64_t bf16_rows = 8;              ///< in_place_bf16: the most activations
    std::int64_t bf16_passes = 2;            ///< in_place_bf16: the most passes over the weight
    std::int64_t f32_rows = 0;               ///< in_place_f32: the most activations
    std::int64_t dequantized_rows = 3;       ///< rows_f32: the most activations
    std::int64_t panel_terms = 0;            ///< panels_bf16: the most bfloat16 terms of an activation
};

/// Those of a backend. One that has none of its own takes every path that supports the operands.
const Thresholds& thresholds_of(std::string_view backend);

/// Every path is worth it, wherever it supports the operands.
const Thresholds& no_thresholds();

}  // namespace breccia::inline v0_4
