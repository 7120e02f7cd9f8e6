// SPDX-License-Identifier: Apache-2.0
//
// What a CPU backend provides: tables of function pointers, filled by folding over the codec list. Every kernel is
// written once in kernels/ over the vector vocabulary of the backend's vec.hpp; a backend may override any entry.
//
// Buffers: a kernel reads and writes exactly the elements it is told of, at any alignment.
#pragma once

#include <array>
#include <limits>

#include "breccia/recipe.hpp"
#include "contract/kernel_interface.hpp"
#include "contract/random.hpp"

namespace breccia::inline v0_4 {

/// The finite part of a block and what else is in it.
struct BlockStats {
    std::uint32_t amax_bits = 0;  ///< bits of the largest finite magnitude
    bool has_nan = false;
    bool has_infinity = false;
    float min = 0, max = 0;  ///< of the finite values and zero; only where the rule needs them

    /// Whether the errors of one scale may be smaller than those of another.
    [[nodiscard]] bool searchable() const { return !has_nan && !has_infinity && amax_bits != 0; }
};

/// How one block is encoded and decoded.
struct BlockScale {
    std::uint32_t stored = 0;  ///< the scale as stored: a byte, half-word or float32 pattern
    float factor = 1;          ///< codes = encode(x * factor) or encode(x / factor)
    bool multiply = false;
    bool all_finite = false;     ///< the block holds neither infinities nor NaNs
    bool fast_division = false;  ///< see FastDivide in encode.inl.hpp
    float high = 0, low = 0;     ///< where fast_division: 1 / factor in twice the precision
    bool poisoned = false;       ///< the block holds a NaN its format cannot: the scale is NaN, the codes are 0
    float decoded = 1;           ///< value = (code - zero_point) * decoded; includes the global scale
    float zero_point = 0;
    float error_unit = 1;  ///< squared errors are measured in this power of two, about 1 / amax, to stay in range
};

/// Sets high + low to 1 / factor. The remainder is exact in double until it is rounded once, as a fused one is.
inline void set_reciprocal(BlockScale& s) {
    s.high = 1.0F / s.factor;
    const double rest = 1.0 - static_cast<double>(s.factor) * static_cast<double>(s.high);
    s.low = static_cast<float>(rest) / s.factor;
}

/// FastDivide gives the codes of the division where everything is finite, the divisor is well inside the exponent
/// range and no quotient overflows. `amax_bits` is of what will be divided.
inline void allow_fast_division(BlockScale& s, std::uint32_t amax_bits) {
    const int exponent = static_cast<int>(amax_bits >> 23) - 127;
    const int divisor_exponent = static_cast<int>(bits_of(s.factor) >> 23 & 255U) - 127;
    s.fast_division = s.all_finite && !s.multiply && divisor_exponent > -80 && divisor_exponent < 80 &&
                      exponent - divisor_exponent < 64;
    if (s.fast_division) set_reciprocal(s);
}

/// All of a recipe that a block's scale depends on, and the tensor-wide numbers of two-level recipes.
struct ScaleParams {
    ScaleRule rule{};
    ScaleType type = ScaleType::float32;
    ScaleSearch search = ScaleSearch::amax;
    float margin_factor = 1;  // 2^margin
    bool two_level = false;
    float global_scale = 1;   // what is stored: global amax / (448 * 6)
    float global_encode = 1;  // TransformerEngine's (448 * 6) / global amax

    [[nodiscard]] constexpr bool needs_range() const { return takes_range(rule); }
};

/// Quantize `blocks` consecutive blocks of one row, in one pass per block.
struct QuantizeRow {
    const float* x = nullptr;
    std::int64_t blocks = 0;
    std::int64_t block = 0;  ///< elements per block; even where codes are packed
    ScaleParams params;
    const std::int32_t* amax_bits = nullptr;  ///< of each block by QuantizeKernels::block_amax, or null
    std::uint8_t* codes = nullptr;            ///< the first block's first code; on a byte boundary
    void* scales = nullptr;                   ///< consecutive, of params.type
    std::uint8_t* zero_points = nullptr;      ///< consecutive bytes, or null
};

/// Dequantize one row, or a part of it that starts anywhere.
struct DequantizeRow {
    const std::uint8_t* codes = nullptr;  ///< of the row's element 0
    std::int64_t begin = 0, count = 0;    ///< elements [begin, begin + count) of the row
    std::int64_t block = 0;
    const float* scales = nullptr;       ///< scales[0] is that of the block that holds element `begin`
    const float* zero_points = nullptr;  ///< likewise, or null
    bool packed = false;
    void* out = nullptr;  ///< `count` elements of the kernel's type, aligned to it
};

/// The range of a format's values above zero.
struct FormatRange {
    float max = 0, smallest = 0;
};

/// A run of a row of codes as numbers, which become the values that they stand for in groups with exponents.
struct ContractRow {
    float* values = nullptr;
    std::int64_t begin = 0, count = 0, group = 0;         ///< elements [begin, begin + count) of the row
    const float *scales = nullptr, *exponents = nullptr;  ///< from the group that holds element `begin` on
    float max = 0;                                        ///< of the format
};

/// All but the first are null for a format that is no target of quantization.
struct FormatKernels {
    void (*encode_unscaled)(const float* x, std::int64_t n, std::uint8_t* codes) = nullptr;
    BlockScale (*choose_scale)(const BlockStats&, const ScaleParams&, int candidate) = nullptr;
    int (*candidates)(const ScaleParams&) = nullptr;
    void (*encode)(const float* x, std::int64_t n, const BlockScale&, std::uint8_t* codes, std::int64_t offset,
                   bool packed) = nullptr;  ///< writes codes [offset, offset + n); only 4-bit codes can be packed
    /// The same, rounding stochastically by draws first, first + 1, ….
    void (*encode_stochastic)(const float* x, std::int64_t n, const BlockScale&, RandomKey, std::uint32_t first,
                              std::uint8_t* codes, std::int64_t offset, bool packed) = nullptr;
    float (*squared_error)(const float* x, std::int64_t n, const BlockScale&) = nullptr;  ///< of quantizing x so
    /// Whether x, which is finite, is what its codes stand for. Of formats with one zero its sign does not count.
    bool (*keeps)(const float* x, std::int64_t n, const BlockScale&) = nullptr;
    void (*quantize_row)(const QuantizeRow&) = nullptr;
};

/// Lanes in which fold_amax keeps a block's largest magnitudes.
inline constexpr std::int64_t amax_lanes = 16;

struct QuantizeKernels {
    BlockStats (*stats)(const float* x, std::int64_t n, bool range);
    /// Raises amax[16 i ... 16 i + 15] to the bits of magnitudes in the i-th `block` elements of a row.
    void (*fold_amax)(const float* x, std::int64_t n, std::int64_t block, std::int32_t* amax);
    /// Bits of the largest magnitude of each of `blocks` blocks, a multiple of 16 long, NaNs and infinities included.
    /// Returns the largest.
    std::int32_t (*block_amax)(const float* x, std::int64_t blocks, std::int64_t block, std::int32_t* amax_bits);
    /// A group of n values x as multiples of its scale, sign(x) max (|x| / amax)^k, of any address; k as float16.
    /// Returns the bits of amax; 0 where the group has no exponent other than 1, and nothing is written.
    std::uint32_t (*expand)(const float* x, std::int64_t n, const FormatRange& range, float* scaled,
                            std::uint16_t* exponent);
    std::array<FormatKernels, Codecs::size> formats;
};

using DequantizeKernel = void (*)(const DequantizeRow&);

struct DequantizeKernels {
    std::array<void (*)(const void* x, std::int64_t n, float* out), dtype_count> load;
    std::array<void (*)(const float* x, std::int64_t n, void* out), dtype_count> store;
    void (*contract)(const ContractRow&);
    std::array<std::array<DequantizeKernel, dtype_count>, Codecs::size> rows;  ///< by type of output; float64 has none

    void row(Format format, const DequantizeRow& row, DType out = DType::float32) const {
        rows[static_cast<std::size_t>(format)][static_cast<std::size_t>(out)](row);
    }
};

// ---- Comparing two tensors: every backend's sums are equal bit by bit ----

/// Sums of elements i, i + 8, i + 16, … of what was added, and the worst of those.
struct ErrorLanes {
    static constexpr int lanes = 8;
    alignas(64) double signal[lanes] = {};
    alignas(64) double other[lanes] = {};
    alignas(64) double dot[lanes] = {};
    alignas(64) double noise[lanes] = {};
    /// The largest (x - y)^2 of floats, where no square overflows or vanishes; the largest |x - y| of doubles. NaNs do
    /// not count here; the noise tells of them.
    alignas(64) double worst[lanes] = {};
};

/// Bins that magnitudes are counted in: bin 0 holds zeros, bin 20 those from 2^-149, then one a half octave; the last
/// holds what is not finite.
inline constexpr int magnitude_bins = 575, first_magnitude_bin = 20;

struct CompareKernels {
    void (*add)(const float* x, const float* y, std::int64_t n, ErrorLanes& sums);
    void (*add_doubles)(const double* x, const double* y, std::int64_t n, ErrorLanes& sums);
    /// The bin of each |y[i] - x[i]| / unit, or of each |x[i]| / unit where y is null. Returns the bits of the largest
    /// quotient of a finite difference; one that overflows counts as the largest number.
    std::uint32_t (*bins)(const float* x, const float* y, float unit, std::int64_t n, std::uint16_t* bins);
};

// ---- The search by weighted squared error: the same holds of its sums ----

/// What the codes of a format stand for, as numbers: one kernel serves all formats.
struct CodeGrid {
    bool integer = false;
    float lowest = 0, largest = 0;
    float smallest_normal = 0;  ///< of minifloats
    float magic = 0;            ///< of minifloats: 2^(23 - mantissa bits), see Minifloat::encode
};

/// What the scales of a tensor are whose codes are a byte.
struct CodedScales {
    std::array<float, 256> factor;       ///< codes are made of x times it
    std::array<float, 256> decoded;      ///< the global scale included
    std::array<std::uint8_t, 256> last;  ///< the last code whose scale is below twice that of this one
    int lowest = 0, highest = 0;         ///< the codes a search may choose
    bool from_zero = false;              ///< whether one begins at the lowest where amax's code, 0, scales all to zero
};

/// Consecutive blocks of one row, each with weights of its own.
struct WeightedBlocks {
    const float* x = nullptr;
    const float* weights = nullptr;  ///< above zero
    std::int64_t blocks = 0, block = 0;
};

/// Sums over a block, in units of the scale's error_unit, under integer codes q = x / scale, rounded and cut off.
struct IntegerSums {
    float error = 0;   ///< h (x - q s)^2
    float cross = 0;   ///< h x q
    float square = 0;  ///< h q^2
    float cut = 0;     ///< of the error: that of elements whose quotient lies beyond the codes
    float dead = 0;    ///< of the error: that of elements of code zero
};

struct ImportanceKernels {
    void (*coded_scales)(const ScaleParams&, CodedScales&);
    /// Puts the best code in the place of each: `codes` holds those of the amax rule. Blocks of zeros and blocks that
    /// are not finite keep theirs.
    void (*search_codes)(const WeightedBlocks&, const CodeGrid&, const CodedScales&, const ScaleParams&,
                         std::uint8_t* codes);
    /// Sum of h (x - value)^2 over finite values under one scale.
    float (*error)(const float* x, const float* weights, std::int64_t n, const CodeGrid&, const BlockScale&);
    /// Of codes lowest … largest, less the zero point; the second with `cut` and `dead`.
    IntegerSums (*integer_sums)(const float* x, const float* weights, std::int64_t n, float lowest, float largest,
                                const BlockScale&);
    IntegerSums (*integer_sums_and_ends)(const float* x, const float* weights, std::int64_t n, float lowest,
                                         float largest, const BlockScale&);
};

// ---- A step of AdamW ----

/// What all numbers of a step have in common.
struct AdamWFactors {
    float beta1 = 0, beta2 = 0;  ///< of the moments
    float rest1 = 1, rest2 = 1;  ///< 1 - beta
    float keep = 1;              ///< of a weight: 1 - lr * weight_decay
    float rate = 0;              ///< lr / (1 - beta1^step)
    float correction = 1;        ///< 1 / sqrt(1 - beta2^step)
    float eps = 0;
    float limit = std::numeric_limits<float>::infinity();  ///< of a quotient: see adamw_step
};

/// One moment of consecutive groups.
struct MomentGroups {
    std::uint8_t* codes = nullptr;
    std::uint8_t* scales = nullptr;      ///< of the type in ScaleParams, at any address
    std::uint16_t* exponents = nullptr;  ///< float16; null where moments are not expanded
    RandomKey key;                       ///< of draws, where moments are rounded stochastically
};

/// Consecutive groups: everything is read and written in place but for gradients.
struct AdamWGroups {
    float* weights = nullptr;
    const float* gradients = nullptr;
    std::int64_t groups = 0, group = 0;  ///< how many, and numbers in each: a multiple of 16, at most 256
    MomentGroups first, second;
    std::uint32_t position = 0;  ///< of the first draw
};

/// The longest group.
inline constexpr std::int64_t adamw_group = 256;

using AdamWKernel = void (*)(const AdamWGroups&, const AdamWFactors&, const ScaleParams&);

/// By format of the codes; null where no moment is kept in it.
struct AdamWKernels {
    std::array<AdamWKernel, Codecs::size> expanded;    ///< with an exponent for each group
    std::array<AdamWKernel, Codecs::size> stochastic;  ///< the first moment and the root of the second
};

/// A backend.
struct KernelTable {
    std::string_view name;
    const QuantizeKernels& quantize;
    const DequantizeKernels& dequantize;
    const MatmulKernels& matmul;
    const CompareKernels& compare;
    const ImportanceKernels& importance;
    const AdamWKernels& adamw;

    [[nodiscard]] const FormatKernels& operator[](Format f) const {
        return quantize.formats[static_cast<std::size_t>(f)];
    }
};

}  // namespace breccia::inline v0_4
