// SPDX-License-Identifier: Apache-2.0
//
// The named recipes as types: breccia::cast(x, breccia::recipes::nvfp4{.two_level = false}). Each is the row of its
// name in the catalogue, with the row's fields and defaults, and converts to the Recipe that make_recipe() gives for
// them. The conversion throws Error for what make_recipe() refuses.
#pragma once

#include "breccia/catalogue.hpp"

/// The rows of the catalogue as types.
namespace breccia::inline v0_4::recipes {

/// The choices of a field, in the order of its row.
/// @{
enum class Fp8Format : std::uint8_t { e4m3, e5m2, e4m3fnuz, e5m2fnuz, ieee_e4m3, e3m4, e4m3b11fnuz };
enum class Fp6Format : std::uint8_t { e2m3, e3m2 };
enum class Fp4Format : std::uint8_t { e2m1 };
enum class Granularity : std::uint8_t { tensor, row };
enum class Fp8Rule : std::uint8_t { torchao, transformer_engine };
enum class MxRounding : std::uint8_t { rceil, floor, ceil, even };
enum class BlockScale : std::uint8_t { fp32, bf16, e8m0 };
enum class Nvfp4Rule : std::uint8_t { transformer_engine, torchao };
enum class GlobalScaleForm : std::uint8_t { multiplier, divisor };
enum class Int4Scale : std::uint8_t { fp16, bf16, fp32 };
enum class Int8Scale : std::uint8_t { fp32, fp16, bf16 };
/// @}

// The types have the rows' short names.
// NOLINTBEGIN(readability-identifier-naming)
/// One FP8 scale per tensor, from amaxes of steps before.
struct BRECCIA_API delayed {
    Fp8Format fp8_format = Fp8Format::e4m3;  ///< of the codes
    std::int64_t amax_history_len = 16;      ///< amaxes that are looked at
    std::int64_t margin = 0;                 ///< the scale is made 2^margin times as large
    Fp8Rule scale_rule = Fp8Rule::torchao;   ///< whose arithmetic finds the scale
    operator Recipe() const;                 ///< what make_recipe() gives
};
/// FP8, one scale per tensor or row, from its own amax.
struct BRECCIA_API current {
    Fp8Format fp8_format = Fp8Format::e4m3;         ///< of the codes
    Granularity granularity = Granularity::tensor;  ///< what has one scale
    Fp8Rule scale_rule = Fp8Rule::torchao;          ///< whose arithmetic finds the scale
    ScaleSearch scale_search = ScaleSearch::amax;   ///< by the amax, or by the squared error
    operator Recipe() const;                        ///< what make_recipe() gives
};
/// FP8 with a float scale for each block of a row, or tile: DeepSeek-V3.
struct BRECCIA_API block {
    Fp8Format fp8_format = Fp8Format::e4m3;        ///< of the codes
    std::int64_t block_k = 128;                    ///< elements of a row to a scale
    std::int64_t block_m = 1;                      ///< rows to a scale
    BlockScale scale_format = BlockScale::fp32;    ///< of the scales
    ScaleSearch scale_search = ScaleSearch::amax;  ///< by the amax, or by the squared error
    operator Recipe() const;                       ///< what make_recipe() gives
};
/// FP8 whose groups are raised to a power, so that they fill the format's range: COAT, arXiv:2410.19313, section 4.
struct BRECCIA_API expanded {
    Fp8Format fp8_format = Fp8Format::e4m3;  ///< of the codes
    std::int64_t group_size = 128;           ///< elements of a row to a scale
    operator Recipe() const;                 ///< what make_recipe() gives
};
/// OCP MX: FP8 with an E8M0 scale for 32 elements.
struct BRECCIA_API mxfp8 {
    Fp8Format fp8_format = Fp8Format::e4m3;         ///< or e5m2: the specification has no others
    MxRounding scale_rounding = MxRounding::rceil;  ///< of amaxes to powers of two
    ScaleSearch scale_search = ScaleSearch::amax;   ///< by the amax, or by the squared error
    operator Recipe() const;                        ///< what make_recipe() gives
};
/// OCP MX: FP6 with an E8M0 scale for 32 elements.
struct BRECCIA_API mxfp6 {
    Fp6Format fp6_format = Fp6Format::e2m3;         ///< of the codes
    MxRounding scale_rounding = MxRounding::rceil;  ///< of amaxes to powers of two
    ScaleSearch scale_search = ScaleSearch::amax;   ///< by the amax, or by the squared error
    operator Recipe() const;                        ///< what make_recipe() gives
};
/// OCP MX: FP4 with an E8M0 scale for 32 elements.
struct BRECCIA_API mxfp4 {
    Fp4Format fp4_format = Fp4Format::e2m1;         ///< of the codes
    MxRounding scale_rounding = MxRounding::rceil;  ///< of amaxes to powers of two
    ScaleSearch scale_search = ScaleSearch::amax;   ///< by the amax, or by the squared error
    operator Recipe() const;                        ///< what make_recipe() gives
};
/// FP4 with an E4M3 scale for 16 elements and a float32 one over them.
struct BRECCIA_API nvfp4 {
    bool two_level = true;                                            ///< a global scale over those of blocks
    ScaleSearch scale_search = ScaleSearch::amax;                     ///< by the amax, or by the squared error
    Nvfp4Rule scale_rule = Nvfp4Rule::transformer_engine;             ///< whose arithmetic finds the scale
    GlobalScaleForm global_scale_form = GlobalScaleForm::multiplier;  ///< divisor needs two_level
    operator Recipe() const;                                          ///< what make_recipe() gives
};
/// 4-bit integers with a scale for each group of a row.
struct BRECCIA_API int4 {
    std::int64_t group_size = 128;                 ///< elements of a row to a scale
    bool is_signed = true;                         ///< the row's field `signed`, which is a word of the language
    Int4Scale scale_dtype = Int4Scale::fp16;       ///< of the scales
    bool symmetric = true;                         ///< false needs unsigned codes
    ScaleSearch scale_search = ScaleSearch::amax;  ///< by the amax, or by the squared error
    operator Recipe() const;                       ///< what make_recipe() gives
};
/// 8-bit integers with a scale for each row, or group of it.
struct BRECCIA_API int8 {
    std::optional<std::int64_t> group_size = {};   ///< none: one scale per row
    Int8Scale scale_dtype = Int8Scale::fp32;       ///< of the scales
    bool symmetric = true;                         ///< without zero points
    ScaleSearch scale_search = ScaleSearch::amax;  ///< by the amax, or by the squared error
    operator Recipe() const;                       ///< what make_recipe() gives
};
/// 8-bit integers of groups that are raised to a power, as `expanded`.
struct BRECCIA_API int8_expanded {
    std::int64_t group_size = 128;  ///< elements of a row to a scale
    operator Recipe() const;        ///< what make_recipe() gives
};
// NOLINTEND(readability-identifier-naming)

}  // namespace breccia::inline v0_4::recipes
