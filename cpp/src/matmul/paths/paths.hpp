// SPDX-License-Identifier: Apache-2.0
//
// The ways to multiply. Each is in the file of its name, and cpu_info()["kernels"] and docs/kernels.md call it so.
// Which of them is the quickest: matmul/choose.cpp.
#pragma once

#include <array>

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// Why a path does not multiply though shapes and formats suit it: a value that it finds when it begins.
enum class Refusal : std::uint8_t {
    none,
    zero_points,  ///< of the weight, beyond -8 … 15
    scales,       ///< of codes, so large, so small, negative or NaN that they cannot go into the codes
    range,        ///< activations so large or so small that a product may leave float32's range though the sum does not
    digits,       ///< activations that six digits in base 256 do not hold exactly, of a step's largest on
    terms         ///< more activations and terms of them than the path takes at a time
};

/// What rules tell products apart by. A product is of one kind of each group, a rule is for some.
using Kinds = std::uint16_t;
namespace kinds {

/// The weight: numbers (or codes that do not run along K), codes of a byte, two codes to a byte.
inline constexpr Kinds numbers = 1, bytes = 2, four_bits = 4, any_weight = 7;
/// Elements of K to a scale: up to 16, up to 64, more.
inline constexpr Kinds blocks_to_16 = 8, blocks_to_64 = 16, long_blocks = 32, any_block = 56;
/// Whether it is a PreparedWeight.
inline constexpr Kinds as_stored = 64, prepared = 128, any_storage = 192;
/// Activations as the path takes them. A term is one of the bfloat16 numbers that add up to an activation: one for
/// bfloat16 and all that Precision::fast rounds, two for float16, three for others.
inline constexpr Kinds one_term = 256, two_terms = 512, three_terms = 1024;
inline constexpr Kinds decoded = 2048;         ///< codes that become numbers of up to three terms
inline constexpr Kinds codes = 4096;           ///< multiplied without their scales
inline constexpr Kinds codes_in_tiles = 8192;  ///< the same, where matrix tiles of integers multiply them
inline constexpr Kinds any_activations = 16128;

}  // namespace kinds

/// The kind of activations that are multiplied as the numbers they stand for.
inline Kinds as_numbers(const Product& product, int terms) {
    if (terms == 3 && product.a.front().scaled_along_k() != nullptr) return kinds::decoded;
    return terms == 1 ? kinds::one_term : terms == 2 ? kinds::two_terms : kinds::three_terms;
}
inline Kinds as_numbers(const Product& product) { return as_numbers(product, product.terms()); }

struct Path {
    std::string_view name;
    /// The kind of the activations, or none where it cannot multiply: it has no kernel for the format, or the layout in
    /// memory does not suit. Reads no value.
    std::optional<Kinds> (*suits)(const Product&);
    /// Of what suits, where values make an activation no more than so many terms. Where it refuses it has written
    /// nothing.
    Refusal (*multiply)(const Product&, int most_terms);
    std::array<Refusal, 3> refusals;  ///< all that it may come to; the rest are none
};

inline std::optional<Kinds> suits_anything(const Product& product) { return as_numbers(product); }

/// A path for weights whose codes and scales run along K.
template <std::optional<Kinds> (*Suits)(const Product&, const ScaledMatrix&),
          Refusal (*Multiply)(const Product&, const ScaledMatrix&, int most_terms)>
constexpr Path path_of_codes(std::string_view name, std::array<Refusal, 3> refusals) {
    return {.name = name,
            .suits = [](const Product& product) -> std::optional<Kinds> {
                const ScaledMatrix* codes = product.w.scaled_along_k();
                return codes != nullptr ? Suits(product, *codes) : std::nullopt;
            },
            .multiply = [](const Product& product,
                           int most_terms) { return Multiply(product, *product.w.scaled_along_k(), most_terms); },
            .refusals = refusals};
}

namespace paths {

/// One or two activations by codes that are small integers, read in place: integer dot products.
extern const Path in_place_integer;

/// Up to 16 activations by rows of codes in place: matrix tiles.
extern const Path tiles;

/// Up to 48 activations by 16 weight rows at a time, one in each lane: bfloat16 dot products.
extern const Path lanes;

/// Up to 16 activations by rows of codes read in place: bfloat16 dot products.
extern const Path in_place_bf16;

/// Up to eight activations by rows of codes read in place: float32. For processors without bfloat16 dot products.
extern const Path in_place_f32;

/// Up to three activations by weight rows dequantized to float32, one at a time.
extern const Path rows_f32;

/// Any number of activations by panels of codes decoded to bfloat16; scales multiply sums of blocks.
extern const Path panels_bf16;

/// Any number of activations that are INT8 codes by codes that are small integers: integer dot products, panels of the
/// weight as bytes; scales multiply sums of blocks.
extern const Path panels_integer;

/// Any operands: panels dequantized to float32.
extern const Path panels_f32;

}  // namespace paths

/// All of them, in the order in which the tables try them.
inline constexpr const Path* every_path[] = {
    &paths::in_place_integer, &paths::panels_integer, &paths::tiles,       &paths::lanes,     &paths::in_place_bf16,
    &paths::in_place_f32,     &paths::rows_f32,       &paths::panels_bf16, &paths::panels_f32};

}  // namespace breccia::inline v0_4
