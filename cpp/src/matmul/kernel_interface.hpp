// SPDX-License-Identifier: Apache-2.0
//
// The matmul kernels of a backend. A weight is N rows of K contiguous codes; activations are M rows. Products come out
// as c[n][m]: weights are broadcast, activations lie across the lanes, so that weights are never transposed.
//
// Panels: `rows` weight rows by at most panel_k elements are decoded once into a buffer that stays in the second-level
// cache, and all activations run over it. Activations are packed once per call, `width` (16 or 32) of them abreast.
#pragma once

#include <algorithm>
#include <array>

#include "breccia/recipe.hpp"

namespace breccia {

inline constexpr std::int64_t panel_k = 256;
/// Elements between the rows of a decoded panel. Not a power of two: its rows would share a few cache sets.
inline constexpr std::int64_t panel_stride_f32 = 272, panel_stride_bf16 = 288;
/// Decoded panels have a multiple of this many rows, of which those past the end hold anything.
inline constexpr std::int64_t row_multiple = 96;
/// Activations side by side in a full panel.
inline constexpr std::int64_t panel_width = 32;

/// c[n][m] += sum over k of w[n][k] x[k][m], in float32.
struct GemmF32 {
    const float* w = nullptr;  ///< rows panel_stride_f32 apart
    const float* x = nullptr;  ///< [k][width]
    float* c = nullptr;        ///< [rows][width]
    std::int64_t rows = 0, width = 0, k = 0;
};

/// c[n][m] += sum over blocks of (sum over the block of w[n][k] x[k][m]) * w_scales[block][n] * x_scales[block][m], for
/// `panels` of activations that follow one another; x is the sum of `terms` bfloat16 numbers.
struct GemmBF16 {
    const std::uint16_t* w = nullptr;  ///< rows panel_stride_bf16 apart
    const std::uint16_t* x = nullptr;  ///< [pairs][width][2]: two consecutive k of one activation are neighbours
    float* c = nullptr;                ///< [rows][width]
    std::int64_t rows = 0, width = 0;
    std::int64_t pairs = 0, block_pairs = 0;  ///< multiples of 16
    std::int64_t panels = 1, x_panel_stride = 0, c_panel_stride = 0;
    std::int64_t terms = 1, term_stride = 0;  ///< the largest term first
    const float* w_scales = nullptr;          ///< rows side by side
    std::int64_t w_scale_stride = 0;          ///< between blocks
    const float* x_scales = nullptr;          ///< [block][width], or null
    std::int64_t x_scale_panel_stride = 0;
    /// Codes that the next panel will be decoded from, to be brought to the second-level cache meanwhile, or null: rows
    /// so short and so far apart are beyond what hardware prefetches.
    const std::uint8_t* next = nullptr;
    std::int64_t next_stride = 0, next_rows = 0, next_bytes = 0;
    /// The activations it will meet.
    const std::uint16_t* next_x = nullptr;
    std::int64_t next_x_bytes = 0;
};

/// Sixteen rows of activations, each zero-padded to a multiple of 32 elements, to `x` above.
struct PackRows {
    const float* x = nullptr;
    std::int64_t x_stride = 0, k = 0;
    void* out = nullptr;
    std::int64_t width = 0;
    std::int64_t terms = 1, term_stride = 0;  ///< bfloat16 only: each term is what the ones before leave, rounded
};

/// The same of bfloat16 numbers in place.
struct PackWords {
    std::array<const std::byte*, 16> rows{};  ///< null: zeros
    std::int64_t k = 0;
    std::uint16_t* out = nullptr;
    std::int64_t width = 0;
};

/// Rows of codes to bfloat16, each zero-padded to a multiple of 64 elements.
struct DecodeBF16 {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    std::uint16_t* out = nullptr;  ///< rows panel_stride_bf16 apart
    /// Element k takes scale or zero point (skip + k) >> block_shift of its row.
    int block_shift = 0;
    std::int64_t skip = 0;
    /// Codes of scales that are multiplied in, where the products are exact in bfloat16, or null: E8M0 of 2^-60 … 2^60,
    /// or E4M3, of E2M1 only.
    const std::uint8_t* scales = nullptr;
    ScaleType scale_type = ScaleType::e8m0;
    std::int64_t scale_stride = 0;
    const std::uint8_t* zero_points = nullptr;  ///< of 4-bit codes only: bytes of -8 … 15, or null
    std::int64_t zero_stride = 0;
};

/// Rows that CodeRows::special has in one byte. Ranges of rows begin at multiples of it.
inline constexpr std::int64_t special_rows = 4;

/// Rows of codes that a kernel reads in place.
struct CodeRows {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, rows = 0, k = 0;
    std::int64_t block = 0;                      ///< elements per scale; whole steps, or 16, 32 … in a step
    std::int64_t first_row = 0, block_rows = 1;  ///< row i takes scales of row (first_row + i) / block_rows
    const std::byte* scales = nullptr;
    ScaleType scale_type = ScaleType::float32;
    std::int64_t scale_row_stride = 0;          ///< bytes
    const std::uint8_t* zero_points = nullptr;  ///< 4-bit codes only; or null
    std::int64_t zero_row_stride = 0;
    float* scale_scratch = nullptr;      ///< four rows of scales, and for IntegerGemv eight more
    std::int64_t first_level_cache = 0;  ///< bytes, for rows to be read ahead into
    /// [row / special_rows][span], bit row % special_rows: whether some code of the span is zero, subnormal or NaN; or
    /// null. Of prepared E4M3.
    const std::uint8_t* special = nullptr;
};

/// Codes one step of such a kernel decodes: 64 bytes of them.
constexpr std::int64_t row_step(bool packed) { return packed ? 128 : 64; }
/// Codes between two looks at scales: a block, or a step of several. Of rows with one scale, as many as the usual block
/// has, so that a code that takes longer delays few others.
constexpr std::int64_t usual_span = 128;
constexpr std::int64_t row_span(std::int64_t block, std::int64_t k, bool packed) {
    return block >= k ? usual_span : std::max(block, row_step(packed));
}
/// Longer spans are likely to have such a code.
constexpr std::int64_t longest_span_of_ordinary = 256;

/// out[n][v] = sum over k of w[n][k] x[v][k] for a few activations.
struct Gemv {
    CodeRows w;
    /// [vectors][padded k]. Within a step of packed codes k = 4 i + j lies at 32 j + i; of bytes, the runs of 8 of even
    /// number come before those of odd number.
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;
    float* out = nullptr;  ///< [rows][vectors]
};
using GemvKernel = void (*)(const Gemv&);
inline constexpr std::int64_t max_gemv_vectors = 8;

/// A step of an activation as integers: x[k] = its lane's unit * (its first three digits, base 256) + a smaller unit *
/// (further digits, in steps that need them). Digits are -128 ... 127, the most significant first.
struct DigitStep {
    static constexpr int first = 3, most = 6;
    /// By 64 bytes of codes; by packed ones those of even k before those of odd k.
    alignas(64) std::int8_t digits[most][128];
    /// [first, further][lane]: minus the sum of the integers that a lane's codes meet; unless zero points come for it,
    /// times what the codes' own integers are too large by.
    std::int32_t offsets[2][16];
    /// [lane]: the unit, times that of the codes' integers and `bias`; one for a prepared weight, whose lanes are rows.
    float units[16];
    /// For prepared weights: of each digit, minus its sums over the runs of doublewords of a step, times what the
    /// codes' integers are too large by.
    std::int32_t runs[most][16];
    float smaller;         ///< the smaller unit over the unit
    std::uint16_t thirds;  ///< of which doublewords (bits) the third digits are not all zeros
    std::uint8_t further;  ///< digits beyond the first
    std::uint8_t count;    ///< digits that there are: two where the third ones are zeros
    /// An odd number of cache lines in all: what is read of every step falls on all sets of the first-level cache.
    std::uint8_t unused[64];
};
static_assert(sizeof(DigitStep) / 64 % 2 == 1);

/// An activation as integers.
struct Digits {
    DigitStep* steps = nullptr;
    float bias = 1;  ///< so that scales may be multiplied in without their own
};

/// Digits of `steps` steps of x. False where that many do not hold every element exactly.
struct PackDigits {
    const float* x = nullptr;
    std::int64_t steps = 0;
    bool zero_points = false;
    ScaleType scale_type = ScaleType::float32;  ///< of the codes
    std::int64_t run = 0;                       ///< doublewords to a run: 2, 4, 8 or 16; 0 but for prepared weights
    Digits* out = nullptr;
};

/// out[n] = sum over k of w[n][k] x[k]: codes as integers by digits of the activation, all sums exact within a step.
struct IntegerGemv {
    CodeRows w;
    const Digits* x = nullptr;
    float* out = nullptr;
};

/// out[group][lane] = sum over k of w[16 group + lane][k] x[k], of a prepared weight without zero points: see
/// LaneProduct for what is named as there.
struct IntegerLanes {
    const std::uint8_t* codes = nullptr;
    std::int64_t groups = 0, quads = 0;
    std::int64_t run = 16, runs_per_block = 1, scale_step = 1;  ///< of doublewords: 2, 4, 8 or 16
    const std::byte* scales = nullptr;
    ScaleType scale_type = ScaleType::float32;
    std::int64_t group_scale_stride = 0;
    const Digits* x = nullptr;
    float* out = nullptr;
};

/// out[group][v][lane] = sum over k of w[16 group + lane][k] x[v][k] for up to 16 activations. A quad is four
/// doublewords of codes of each of 16 rows: 16 elements of a row, or 32 packed ones.
struct LaneProduct {
    const std::uint8_t* codes = nullptr;
    bool interleaved = false;  ///< [group][doubleword][16 rows], zero-padded to whole quads; else rows in place
    std::int64_t row_stride = 0, row_bytes = 0;  ///< of rows in place
    std::int64_t rows = 0, quads = 0;
    std::int64_t block_quads =
        0;                ///< to a scale, at most 256 elements, so that few products are summed up unscaled; or
    int block_shift = 0;  ///< where that is 0: to a scale are 16 << block_shift elements, up to 64
    /// [group][block][16 rows] of float32, or of codes in doublewords as `codes`: E4M3 that are neither negative nor
    /// NaN, E8M0 but 0 and 255.
    const std::byte* scales = nullptr;
    ScaleType scale_type = ScaleType::float32;
    std::int64_t scale_step = 1;          ///< blocks from a scale to the next: 0 where there is one for all of K
    std::int64_t group_scale_stride = 0;  ///< bytes
    /// Of unsigned 4-bit codes: bytes of -8 ... 15 that lie as scales of one byte would, or null.
    const std::byte* zero_points = nullptr;
    std::int64_t group_zero_stride = 0;
    const float* x_scales = nullptr;  ///< [block][vectors], or null
    /// [doubleword][part][vectors][2]: see PackLanes.
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;  ///< 1, 2, 3, 4, 8 or 16
    float* out = nullptr;
};

/// Which elements go together as a pair: of a doubleword of 2 parts elements i and i + parts, where those are packed
/// codes or bytes; or neighbours, in order, or those of 8 elements by turns with those of the next 8.
enum class PairOrder : std::uint8_t { bytes, packed, neighbours, runs };

/// Activations for a LaneProduct, or for TileRows.
struct PackLanes {
    const float* x = nullptr;  ///< `rows` rows of k elements, zero-padded to a multiple of 32
    std::int64_t x_stride = 0, rows = 0, k = 0;
    std::uint16_t* out = nullptr;
    std::int64_t vectors = 0;  ///< pairs from one step to the next
    PairOrder order = PairOrder::bytes;
};

/// out[n][v] = sum over k of w[n][k] x[v][k] for up to 16 activations, rows of codes in place, in steps of 64 bytes.
struct TileRows {
    const std::uint8_t* codes = nullptr;
    std::int64_t row_stride = 0, row_bytes = 0, rows = 0;
    /// [row, a multiple of 16][scale]. A block of sums is `block_steps` steps and takes the next scale after
    /// `blocks_per_scale` of them; or, with tile_scales (byte codes), it is one step whose two runs of 32 elements each
    /// take the next.
    const float* scales = nullptr;
    std::int64_t scale_stride = 0, scales_of_row = 0;
    std::int64_t block_steps = 1, blocks_per_scale = 1;
    bool tile_scales = false;
    /// Where not 0, of packed codes: a scale to so many elements (log2; 16, 32 or 64) goes into the codes. They are
    /// E8M0 of 2^-60 … 2^60; or, of E2M1, E4M3 neither negative nor NaN, and then `out` comes out 2^-112 as large.
    int code_block_shift = 0;
    /// In the place of `scales`, codes of those that go into codes, and of tiles' where they are E8M0; or null.
    const std::uint8_t* scale_codes = nullptr;
    std::int64_t scale_code_stride = 0;
    ScaleType scale_type = ScaleType::float32;
    /// Of unsigned 4-bit codes whose blocks are whole steps: bytes of -8 ... 15, [16 rows][scale][row], or null.
    const std::uint8_t* zero_points = nullptr;
    const float* x_scales = nullptr;  ///< [block of sums][16], or null
    /// As PackLanes has them, zero-padded to whole steps: of byte codes in runs; with tile_scales, in order.
    const std::uint16_t* x = nullptr;
    std::int64_t vectors = 0;
    float* out = nullptr;  ///< [rows, a multiple of 16][16]
};

/// The most that a panel product takes at a time, so that 32 activations of a chunk, with the terms that it reads
/// together, stay in the first-level cache, and its weights and sums in the second-level one.
struct PanelShape {
    std::int64_t rows = 0;  ///< of weights
    std::int64_t activations = 0;
    std::int64_t k = 0;  ///< panel_k or half of it
};

/// The products of a backend whose operands are decoded to bfloat16 before, and where they are best used.
struct ProductKernels {
    void (*gemm)(const GemmBF16&) = nullptr;
    std::int64_t first_level_cache = 32 * 1024;  ///< bytes, of the smallest among processors with such kernels
    std::int64_t tile_rows = 0;  ///< weight rows of a tile of 16 activations: so many are best decoded just before
    PanelShape panel;            ///< of activations that are bfloat16 numbers,
    PanelShape panel_of_terms;   ///< or sums of several
    int max_terms = 1;           ///< of activations that are no bfloat16 numbers, before float32 kernels are quicker
    /// Most activations, or terms of them, for which rows in lanes are the quickest: turned on the way, or prepared.
    std::int64_t lane_vectors = 4, prepared_lane_vectors = 4;
    int integer_terms = 2;      ///< bfloat16 numbers to an activation from which on products of integers are quicker
    void (*begin)() = nullptr;  ///< a thread calls this before its first gemm,
    void (*end)() = nullptr;    ///< and this after its last; or null
    std::array<void (*)(const TileRows&), Codecs::size> rows_in_tiles{};  ///< null where there are no tiles
    /// In the place of that of BF16Kernels, and quicker where CodeRows::special tells what it would look for; or null.
    GemvKernel gemv_e4m3 = nullptr;
};

/// Kernels over bfloat16 and integer dot products. Formats they do not decode have null entries.
struct BF16Kernels : ProductKernels {
    bool (*pack)(const PackRows&) = nullptr;  ///< rounds to nearest; whether every number was zero or of ordinary size
    bool (*pack_words)(const PackWords&) = nullptr;
    bool (*pack_lanes)(const PackLanes&) = nullptr;  ///< as pack
    /// out[j][i] = in[i][j], 32 by 16, to nearest; strides in elements.
    void (*transpose)(const float* in, std::int64_t in_stride, std::uint16_t* out, std::int64_t out_stride) = nullptr;
    std::array<void (*)(const DecodeBF16&), Codecs::size> decode{};
    std::array<GemvKernel, Codecs::size> gemv{};
    std::array<void (*)(const LaneProduct&), Codecs::size> lanes{};
    std::array<bool (*)(const PackDigits&), Codecs::size> pack_digits{};
    std::array<void (*)(const IntegerGemv&), Codecs::size> gemv_integers{};
    std::array<void (*)(const IntegerLanes&), Codecs::size> integer_lanes{};
};

struct MatmulKernels {
    void (*pack)(const PackRows&);
    void (*gemm)(const GemmF32&);
    /// out[j][i] = in[i][j], 16 by 16; strides in floats.
    void (*transpose)(const float* in, std::int64_t in_stride, float* out, std::int64_t out_stride);
    float (*dot)(const float* a, const float* b, std::int64_t n);
    const BF16Kernels* bf16;  ///< null where the backend has none
};

}  // namespace breccia
