// SPDX-License-Identifier: Apache-2.0
//
// The ways to multiply. Each is in the file of its name, and cpu_info()["kernels"] and docs/kernels.md call it so.
// Which of them is the quickest: matmul/choose.cpp.
#pragma once

#include <array>
#include <limits>

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// Why a path does not multiply though shapes and formats suit it: a value that it finds when it begins.
enum class Refusal : std::uint8_t {
    none,
    zero_points,  ///< of the weight, beyond -8 … 15
    scales,       ///< of codes, so large, so small, negative or NaN that they cannot go into the codes
    range,        ///< activations so large or so small that a product may leave float32's range though the sum does not
    digits,       ///< activations that six digits in base 256 do not hold exactly, of a step's largest on
    passes        ///< activations of so many terms that they take more passes over the weight than the rule allows
};

/// What a rule allows of what only values tell.
struct Limits {
    static constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max() / 1024;  // is multiplied
    std::int64_t passes = any;                                                            ///< over the weight
    std::int64_t terms = any;                                                             ///< of an activation
};

/// How a path would take a product.
struct Entry {
    int terms = 1;              ///< bfloat16 numbers that add up to an activation
    bool coded = false;         ///< activations are codes, multiplied without their scales
    bool in_tiles = false;      ///< matrix tiles multiply the codes as integers: the processor has such tiles, and
                                ///< scales are common to a multiple of 64 elements
    bool suits_panels = false;  ///< panels_bf16 takes such activations in fewer steps than most
};

struct Path {
    std::string_view name;
    /// None where it cannot: it has no kernel for the format, or the layout in memory does not suit. Reads no value.
    std::optional<Entry> (*suits)(const Product&);
    /// Of what suits. Where it refuses it has written nothing.
    Refusal (*multiply)(const Product&, const Limits&);
    std::array<Refusal, 3> refusals;  ///< all that it may come to; the rest are none
};

inline std::optional<Entry> suits_anything(const Product& /*product*/) { return Entry{}; }

/// A path for weights whose codes and scales run along K.
template <std::optional<Entry> (*Suits)(const Product&, const ScaledMatrix&),
          Refusal (*Multiply)(const Product&, const ScaledMatrix&, const Limits&)>
constexpr Path path_of_codes(std::string_view name, std::array<Refusal, 3> refusals) {
    return {.name = name,
            .suits = [](const Product& product) -> std::optional<Entry> {
                const ScaledMatrix* codes = product.w.scaled_along_k();
                return codes != nullptr ? Suits(product, *codes) : std::nullopt;
            },
            .multiply = [](const Product& product,
                           const Limits& limits) { return Multiply(product, *product.w.scaled_along_k(), limits); },
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

/// All of them.
inline constexpr const Path* every_path[] = {&paths::in_place_integer, &paths::tiles,          &paths::lanes,
                                             &paths::in_place_bf16,    &paths::in_place_f32,   &paths::rows_f32,
                                             &paths::panels_bf16,      &paths::panels_integer, &paths::panels_f32};

}  // namespace breccia::inline v0_4
