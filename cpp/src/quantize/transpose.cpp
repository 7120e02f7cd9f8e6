// SPDX-License-Identifier: Apache-2.0
#include "breccia/transpose.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "quantize/quantizer.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr int nan_scale = 255;        // of E8M0
constexpr std::int64_t run_rows = 8;  // that are turned together

// What becomes of a code when the scale of its block grows by 2^d. The low byte is the code nearest to its value times
// 2^-d; rounded_bit is set where that code has another value, lost_bit too where it is zero and the value was not.
using Move = std::uint32_t;
constexpr Move rounded_bit = 1U << 8, lost_bit = 1U << 20;  // sums of so many moves are kept apart
constexpr std::int64_t most_moves = lost_bit / rounded_bit - 1;

// The moves of a format for each d, up to one under which every code becomes zero.
class Shifts {
public:
    explicit Shifts(const FormatInfo& format) {
        const int steps = static_cast<int>(std::log2(format.max / format.smallest)) + 3;
        for (int d = 0; d < steps; ++d) moves_.push_back(moves_by(d, format));
    }

    [[nodiscard]] const Move* by(int d) const { return moves_[std::min(at(d), moves_.size() - 1)].data(); }

private:
    using Moves = std::array<Move, 256>;

    static Moves moves_by(int d, const FormatInfo& format) {
        Moves moves{};
        for (std::uint32_t code = 0; code < moves.size(); ++code) {
            const float value = format.decode(static_cast<std::uint8_t>(code));
            moves[code] = code;
            if (d == 0 || !is_finite(value)) continue;
            const float exact = std::ldexp(value, -d);
            moves[code] = format.encode(exact);
            const float found = format.decode(static_cast<std::uint8_t>(moves[code]));
            if (found == exact) continue;
            moves[code] += rounded_bit + (found == 0 ? lost_bit : 0);
        }
        return moves;
    }

    std::vector<Moves> moves_;
};

const Shifts& shifts_of(Format format) {
    static constexpr auto makers = Codecs::map([]<Codec C>() {
        return +[]() -> const Shifts& {
            static const Shifts& shifts = *new Shifts(info(format_of<C>));  // for verbs that run while the process ends
            return shifts;
        };
    });
    return makers[static_cast<std::size_t>(format)]();
}

// The block size g of a matrix that can be turned. Throws Error for another matrix.
std::int64_t checked_group(const ScaledTensor& scaled) {
    const Recipe& recipe = scaled.recipe();
    const Layout& layout = scaled.layout();
    const bool coded = recipe.scale == ScaleType::e8m0 && !scaled.zero_point() && !scaled.global_scale();
    const bool floats = info(recipe.element).family == CodecFamily::minifloat && info(recipe.element).bits > 4;
    if (scaled.shape().size() != 2 || !has_blocks_of_rows(layout) || !coded || !floats || layout != recipe.layout)
        throw_type("scaled must be a matrix with E8M0 scales of blocks of single rows and one code to a byte, got ",
                   recipe.name, " of shape ", scaled.shape());
    if (scaled.shape()[0] % layout.block_n != 0)
        throw_value("scaled must have a multiple of ", layout.block_n,
                    " rows, as its blocks are to run along them, got ", scaled.shape()[0]);
    return layout.block_n;
}

// out[c * stride + r] = rows[r * g + c] for 8 rows of g codes.
void turn(const std::uint8_t* rows, std::int64_t g, std::uint8_t* out, std::int64_t stride) {
    static_assert(std::endian::native == std::endian::little);
    std::int64_t c = 0;
    for (; c + 8 <= g; c += 8) {
        std::array<std::uint64_t, 8> w;
        for (std::int64_t r = 0; r < 8; ++r) std::memcpy(&w[static_cast<std::size_t>(r)], rows + r * g + c, 8);
        // Squares of 4, of 2 and of 1 change places across the diagonal.
        const auto swap = [&](std::size_t distance, std::uint64_t low) {
            for (std::size_t i = 0; i < 8; ++i) {
                if ((i & distance) != 0) continue;
                const std::uint64_t moved = (w[i] >> (8 * distance) ^ w[i + distance]) & low;
                w[i] ^= moved << (8 * distance);
                w[i + distance] ^= moved;
            }
        };
        swap(4, 0x0000'0000'FFFF'FFFFU);
        swap(2, 0x0000'FFFF'0000'FFFFU);
        swap(1, 0x00FF'00FF'00FF'00FFU);
        for (std::int64_t r = 0; r < 8; ++r) std::memcpy(out + (c + r) * stride, &w[static_cast<std::size_t>(r)], 8);
    }
    for (; c < g; ++c)
        for (std::int64_t r = 0; r < 8; ++r) out[c * stride + r] = rows[r * g + c];
}

struct Turning {
    const ScaledTensor& scaled;
    std::int64_t group;
    const CastOutput& out;
    const Shifts& shifts = shifts_of(scaled.recipe().element);
    const Array &data = scaled.data(), &scale = scaled.scale();
    std::int64_t rows = scaled.shape()[0], blocks = scaled.shape()[1] / group;
    std::uint8_t nan_code = info(scaled.recipe().element).encode(std::numeric_limits<float>::quiet_NaN());
    std::uint8_t *codes_out = out.data.as<std::uint8_t>(), *scales_out = out.scale.as<std::uint8_t>();
    std::vector<std::uint8_t> moved = std::vector<std::uint8_t>(at(run_rows * group));  // rows
    std::vector<std::uint8_t> square = std::vector<std::uint8_t>(at(group * group));
    std::vector<int> exponents = std::vector<int>(at(group));
    TransposeReport report = {};

    [[nodiscard]] bool any_nan_scale() const {
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t b = 0; b < blocks; ++b)
                if (exponent(r, b) == nan_scale) return true;
        return false;
    }

    // Rows [first, first + g) of a block column.
    void tile(std::int64_t first, std::int64_t block) {
        int shared = -1;
        for (std::int64_t r = 0; r < group; ++r) {
            const int found = exponent(first + r, block);
            exponents[at(r)] = found;
            if (found != nan_scale) shared = std::max(shared, found);
        }
        const std::int64_t bands = rows / group;
        for (std::int64_t c = 0; c < group; ++c)
            scales_out[(block * group + c) * bands + first / group] =
                static_cast<std::uint8_t>(shared < 0 ? nan_scale : shared);
        for (std::int64_t r = 0; r < group; r += run_rows) {
            const std::int64_t count = std::min(run_rows, group - r);
            for (std::int64_t i = 0; i < count; ++i)
                move_row(first + r + i, block, shared, exponents[at(r + i)], &moved[at(i * group)]);
            if (count == run_rows) {
                turn(moved.data(), group, &square[at(r)], group);
                continue;
            }
            for (std::int64_t c = 0; c < group; ++c)
                for (std::int64_t i = 0; i < count; ++i) square[at(c * group + r + i)] = moved[at(i * group + c)];
        }
        // By way of a tile that lies together: rows of the output may be a power of two apart, and then share few lines
        // of a cache.
        std::uint8_t* to = codes_out + block * group * rows + first;
        for (std::int64_t c = 0; c < group; ++c) std::copy_n(&square[at(c * group)], group, to + c * rows);
    }

    [[nodiscard]] int exponent(std::int64_t row, std::int64_t block) const {
        return scale.as<std::uint8_t>()[row * scale.strides[0] + block * scale.strides[1]];
    }

    void move_row(std::int64_t row, std::int64_t block, int shared, int exponent, std::uint8_t* to) {
        if (exponent == nan_scale) {
            std::fill_n(to, group, nan_code);
            return;
        }
        const std::uint8_t* from = data.as<std::uint8_t>() + row * data.strides[0] + block * group * data.strides[1];
        const std::int64_t step = data.strides[1];
        if (exponent == shared && step == 1) {
            std::copy_n(from, group, to);
            return;
        }
        const Move* moves = shifts.by(shared - exponent);
        for (std::int64_t begin = 0; begin < group; begin += most_moves) {
            Move sum = 0;
            for (std::int64_t i = begin; i < std::min(group, begin + most_moves); ++i) {
                const Move move = moves[from[i * step]];
                to[i] = static_cast<std::uint8_t>(move);
                sum += move & ~0xFFU;
            }
            report.rounded += sum >> 8 & (lost_bit / rounded_bit - 1);
            report.lost += sum / lost_bit;
        }
    }
};

}  // namespace

Shape transpose_shape(const ScaledTensor& scaled) {
    checked_group(scaled);
    return {scaled.shape()[1], scaled.shape()[0]};
}

TransposeReport transpose_into(const ScaledTensor& scaled, const CastOutput& out) {
    const Call call;
    check_memory(scaled, "scaled");
    const std::int64_t group = checked_group(scaled), rows = scaled.shape()[0], columns = scaled.shape()[1];
    check_output(out, plan_cast(transpose_shape(scaled), scaled.recipe()), scaled.recipe());
    check_no_overlap(out, scaled);
    if (rows == 0 || columns == 0) return {};
    const FormatInfo& element = info(scaled.recipe().element);
    if (!element.has_nan && Turning{scaled, group, out}.any_nan_scale())
        throw_value("scaled must have scales that are numbers, as ", element.name, " has no code for NaN");
    const std::int64_t bands = rows / group, tiles = bands * (columns / group);
    std::atomic<std::int64_t> rounded = 0, lost = 0;
    parallel_for(call, tiles, std::max<std::int64_t>(1, parallel_grain / (group * group)),
                 [&](std::int64_t begin, std::int64_t end) {
                     Turning turning{scaled, group, out};
                     for (std::int64_t i = begin; i < end; ++i) turning.tile(i % bands * group, i / bands);
                     rounded += turning.report.rounded;
                     lost += turning.report.lost;
                 });
    return {rounded, lost};
}

ScaledTensor transpose(const ScaledTensor& scaled, TransposeReport* report) {
    const Shape shape = transpose_shape(scaled);
    CastOutput out = allocate(plan_cast(shape, scaled.recipe()));
    const TransposeReport found = transpose_into(scaled, out);
    if (report != nullptr) *report = found;
    return assemble(std::move(out), scaled.recipe(), shape, scaled.original_dtype());
}

}  // namespace breccia::inline v0_4
