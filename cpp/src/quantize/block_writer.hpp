// SPDX-License-Identifier: Apache-2.0
//
// Where quantized blocks go: the codes, scales and second numbers of an output.
#pragma once

#include <cstring>
#include <optional>

#include "breccia/ops.hpp"
#include "quantize/row_source.hpp"

namespace breccia::inline v0_4 {

class BlockWriter {
public:
    BlockWriter(const KernelTable& kernels, const Recipe& recipe, const BlockGrid& grid, const CastOutput& out,
                const CastOptions& options)
        : out_(out),
          format_(kernels[recipe.element]),
          grid_(grid),
          packed_(is_packed(recipe.element)),
          row_bytes_(packed_ ? (grid.cols + 1) / 2 : grid.cols),
          offset_(options.offset),
          row_length_(options.row_length == 0 ? grid.cols : options.row_length) {
        if (options.seed) key_.emplace(*options.seed, RandomStream::rounding);
    }

    /// Whether codes are rounded stochastically.
    [[nodiscard]] bool draws() const { return key_.has_value(); }

    /// The number of a block among all.
    [[nodiscard]] std::int64_t block_at(std::int64_t matrix, std::int64_t block_row, std::int64_t block = 0) const {
        return (matrix * grid_.grid_rows() + block_row) * grid_.grid_cols() + block;
    }
    [[nodiscard]] std::byte* scale(std::int64_t block) const {
        return out_.scale.as<std::byte>() + block * static_cast<std::int64_t>(out_.scale.type.size());
    }
    /// Null where there is none.
    [[nodiscard]] std::uint8_t* zero_point(std::int64_t block) const {
        return out_.zero_point ? out_.zero_point->as<std::uint8_t>() + block : nullptr;
    }
    /// The code of an element that lies on a byte boundary.
    [[nodiscard]] std::uint8_t* codes(std::int64_t matrix, std::int64_t row, std::int64_t col = 0) const {
        return out_.data.as<std::uint8_t>() + (matrix * grid_.rows + row) * row_bytes_ + (packed_ ? col / 2 : col);
    }

    // Parts of an output may lie at any address.
    void write_global_scale(float x) const {
        if (out_.global_scale) std::memcpy(out_.global_scale->as<std::byte>(), &x, sizeof x);
    }
    void write_scale(std::int64_t block, const BlockScale& s) const {
        std::byte* p = scale(block);
        for (std::size_t i = 0; i < out_.scale.type.size(); ++i) p[i] = static_cast<std::byte>(s.stored >> 8 * i);
        if (auto* zero = zero_point(block)) *zero = static_cast<std::uint8_t>(static_cast<int>(s.zero_point));
    }
    /// The same with an exponent, as float16.
    void write_expanded(std::int64_t block, const BlockScale& s, std::uint16_t exponent) const {
        std::memcpy(scale(block), &s.stored, sizeof(float));
        constexpr std::int64_t size = sizeof exponent;
        if (out_.zero_point) std::memcpy(out_.zero_point->as<std::byte>() + block * size, &exponent, size);
    }

    /// Elements [col, col + n) of a row, under one scale.
    void encode(const float* x, std::int64_t n, const BlockScale& s, std::int64_t matrix, std::int64_t row,
                std::int64_t col) const {
        std::uint8_t* to = codes(matrix, row);
        if (!key_) return format_.encode(x, n, s, to, col, packed_);
        const auto first = static_cast<std::uint32_t>(offset_ + (matrix * grid_.rows + row) * row_length_ + col);
        format_.encode_stochastic(x, n, s, *key_, first, to, col, packed_);
    }

private:
    const CastOutput& out_;
    const FormatKernels& format_;
    BlockGrid grid_;
    bool packed_;
    std::int64_t row_bytes_;
    std::int64_t offset_, row_length_;  // where random numbers are drawn
    std::optional<RandomKey> key_;      // of stochastic rounding
};

}  // namespace breccia::inline v0_4
