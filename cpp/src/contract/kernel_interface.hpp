// SPDX-License-Identifier: Apache-2.0
//
// The matmul kernels of a backend. A weight is N rows of K contiguous codes, activations are M rows of K numbers. A
// kernel computes c(n, m), so that no weight need be transposed. What kernels read and write is in kernel_interface/:
//     panels.hpp    decoded panels              in_place.hpp  rows of codes in place
//     integer.hpp   the same, as integers       lanes.hpp     16 rows across lanes, or in matrix tiles
#pragma once

#include <array>

#include "contract/kernel_interface/in_place.hpp"
#include "contract/kernel_interface/integer.hpp"
#include "contract/kernel_interface/lanes.hpp"
#include "contract/kernel_interface/panels.hpp"

namespace breccia::inline v0_4 {

/// The kernels that take operands decoded to bfloat16, and the sizes they are the quickest at.
struct ProductKernels {
    void (*gemm)(const GemmBF16&) = nullptr;
    std::int64_t first_level_cache = 32 * 1024;  ///< bytes, the least of all processors that have such kernels
    /// Weight rows that meet 16 activations at a time; the panel driver decodes that many just before they are used.
    std::int64_t tile_rows = 0;
    PanelShape panel;           ///< where activations are bfloat16 numbers
    PanelShape panel_of_terms;  ///< where an activation is a sum of several
    void (*begin)() = nullptr;  ///< a thread calls this before its first gemm, or null
    void (*end)() = nullptr;    ///< a thread calls this after its last gemm, or null
    std::array<void (*)(const TileRows&), Codecs::size> tiles{};  ///< null where there are no tiles
    /// Replaces BF16Kernels::gemv for E4M3 where it is not null. Quicker still where CodeRows::special is not null.
    GemvKernel gemv_e4m3 = nullptr;
    const IntegerPanels* integer_tiles = nullptr;  ///< quicker than IntegerKernels::panels where they are supported
};

/// Kernels of bfloat16 dot products. The entry of a format that a kernel does not decode is null.
struct BF16Kernels : ProductKernels {
    /// These round to nearest. They return whether every number is zero or within [2^-100, 2^100].
    bool (*pack)(const PackRows&) = nullptr;
    bool (*pack_words)(const PackWords&) = nullptr;
    bool (*pack_lanes)(const PackLanes&) = nullptr;
    /// out[j * out_stride + i] = in[i * in_stride + j] for i < 32, j < 16, rounded to nearest bfloat16.
    void (*transpose)(const float* in, std::int64_t in_stride, std::uint16_t* out, std::int64_t out_stride) = nullptr;
    std::array<void (*)(const DecodeBF16&), Codecs::size> decode{};
    std::array<GemvKernel, Codecs::size> gemv{};
    std::array<void (*)(const LaneProduct&), Codecs::size> lanes{};
};

/// Kernels of integer dot products. The entry of a format whose codes are no small integers is null.
struct IntegerKernels {
    std::int64_t first_level_cache = 32 * 1024;  ///< as in ProductKernels
    std::array<bool (*)(const PackDigits&), Codecs::size> pack_digits{};
    std::array<void (*)(const IntegerGemv&), Codecs::size> gemv{};
    std::array<void (*)(const IntegerLanes&), Codecs::size> lanes{};
    /// Of activations that are INT8 codes: as one digit to gemv; and by panels.
    std::array<bool (*)(const DigitsOfCodes&), Codecs::size> digits_of_codes{};
    IntegerPanels panels;
};

struct MatmulKernels {
    void (*pack)(const PackRows&) = nullptr;
    void (*gemm)(const GemmF32&) = nullptr;
    /// out[j * out_stride + i] = in[i * in_stride + j] for i < 16, j < 16.
    void (*transpose)(const float* in, std::int64_t in_stride, float* out, std::int64_t out_stride) = nullptr;
    float (*dot)(const float* a, const float* b, std::int64_t n) = nullptr;
    const BF16Kernels* bf16 = nullptr;          ///< null where the backend has none
    const IntegerKernels* integers = nullptr;   ///< likewise
    const CodeKernelsF32* codes_f32 = nullptr;  ///< likewise
};

}  // namespace breccia::inline v0_4
