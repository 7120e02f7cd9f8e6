// SPDX-License-Identifier: Apache-2.0
//
// Codes of a weight (N, K) as checkpoints of GPTQ and AWQ store them: in 32-bit words that run down the other axis.
// Here codes are bytes as a ScaledTensor has them: row after row, ceil(K * bits / 8) bytes each, and of two codes in a
// byte the first is low.
#pragma once

#include <cstdint>
#include <span>

#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// GPTQ: 4 or 8 bits, K in multiples of 32 / bits. AWQ: 4 bits, N in multiples of 8.
struct WordShape {
    std::int64_t rows = 0;     ///< N
    std::int64_t columns = 0;  ///< K
    int bits = 4;              ///< of a code
    /// Bits of each word that are the other way round in the codes: 0x8888'8888 turns codes that words hold plus 8 into
    /// signed ones, and back.
    std::uint32_t flip = 0;
};

/// GPTQ: words (K * bits / 32, N), each with neighbours along K. Column j of the codes is column order[j] of the words,
/// or column j where `order` is empty. Throws Error where sizes or places do not fit.
BRECCIA_API void codes_from_gptq(std::span<const std::uint32_t> words, WordShape shape,
                                 std::span<const std::int64_t> order, std::span<std::uint8_t> codes);
/// Column j of the words is column order[j] of the codes.
BRECCIA_API void codes_to_gptq(std::span<const std::uint8_t> codes, WordShape shape,
                               std::span<const std::int64_t> order, std::span<std::uint32_t> words);

/// AWQ (GEMM): words (K, N / 8), whose nibbles hold rows 0, 2, 4, 6, 1, 3, 5 and 7 of eight. Throws Error where sizes
/// do not fit.
/// @{
BRECCIA_API void codes_from_awq(std::span<const std::uint32_t> words, WordShape shape, std::span<std::uint8_t> codes);
BRECCIA_API void codes_to_awq(std::span<const std::uint8_t> codes, WordShape shape, std::span<std::uint32_t> words);
/// @}

}  // namespace breccia::inline v0_4
