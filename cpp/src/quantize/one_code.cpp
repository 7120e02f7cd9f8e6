// SPDX-License-Identifier: Apache-2.0
#include "quantize/one_code.hpp"

#include <cmath>

#include "quantize/quantizer.hpp"

namespace breccia::inline v0_4 {

OneCode::OneCode(const Recipe& recipe, const Shape& shape, const CastOutput& out, float amax)
    : grid_(recipe.layout.grid(shape)),
      format_(info(recipe.element)),
      packed_(is_packed(recipe.element)),
      integer_(format_.family == CodecFamily::integer),
      whole_(recipe.layout.kind == LayoutKind::per_tensor),
      row_bytes_(packed_ ? (grid_.cols + 1) / 2 : grid_.cols),
      codes_(out.data.as<std::uint8_t>()),
      multiply_(is_coded(recipe.scale)) {
    const std::int64_t count = element_count(out.scale.shape);
    ScaleParams params{.rule = recipe.rule, .type = recipe.scale, .two_level = recipe.two_level};
    if (recipe.two_level) set_global_levels(params, amax);
    CodedScales coded{};
    if (multiply_) kernels().importance.coded_scales(params, coded);
    for (std::int64_t i = 0; i < count; ++i) {
        if (multiply_) {
            const std::uint8_t code = out.scale.as<std::uint8_t>()[i];
            const bool known = code >= coded.lowest && code <= coded.highest;
            scales_.push_back(known ? coded.decoded[code] : NAN);
            factors_.push_back(coded.factor[code]);
        } else {
            // Bfloat16 numbers may come as half-words: the recipe knows the type.
            const auto type = static_cast<DType>(recipe.scale);
            const auto offset = i * static_cast<std::int64_t>(size_of(type));
            scales_.push_back(load_number<float>(out.scale.as<std::byte>() + offset, type));
            factors_.push_back(scales_.back());
        }
        float zero = 0;
        if (out.zero_point)
            zero = format_.lowest < 0 ? static_cast<float>(out.zero_point->as<std::int8_t>()[i])
                                      : static_cast<float>(out.zero_point->as<std::uint8_t>()[i]);
        zero_points_.push_back(zero);
    }
}

// As round_integer of the kernels, and the formats' own encoders.
std::uint8_t OneCode::code_of(float scaled, float zero_point) const {
    if (!integer_) return format_.encode(scaled);
    const float low = format_.lowest - zero_point, high = format_.max - zero_point;
    return format_.encode(std::nearbyint(scaled < low ? low : scaled > high ? high : scaled) + zero_point);
}

float OneCode::put(std::int64_t matrix, std::int64_t row, std::int64_t col, float x, float added) const {
    const std::int64_t block_row = matrix * grid_.grid_rows() + row / grid_.block_rows;
    const auto block = static_cast<std::size_t>(whole_ ? 0 : block_row * grid_.grid_cols() + col / grid_.block_cols);
    const float scale = scales_[block], value = x + added;
    if (!is_finite(x) || !is_finite(scale)) return 0;
    const std::uint8_t code =
        code_of(multiply_ ? value * factors_[block] : value / factors_[block], zero_points_[block]);
    std::uint8_t* codes = codes_ + (matrix * grid_.rows + row) * row_bytes_;
    if (packed_) {
        std::uint8_t& byte = codes[col / 2];
        const int shift = col % 2 != 0 ? 4 : 0;
        byte = static_cast<std::uint8_t>((byte & (0xF0 >> shift)) | (code & 15) << shift);
    } else {
        codes[col] = code;
    }
    return x - (format_.decode(code) - zero_points_[block]) * scale;
}

}  // namespace breccia::inline v0_4
