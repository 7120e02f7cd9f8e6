// SPDX-License-Identifier: Apache-2.0
//
// Branch and bound over the scales that the type stores. Between two scales a < b the error e(s) under the nearest
// codes is continuous and piecewise a parabola: inside a piece its slope 2 (s B - A), with A = sum h x q and B = sum h
// q^2, only rises; where a code changes, and with it B by d, it falls by s d. So from a on the slope is at least that
// at a less b (B(a) - B(b)), back from b at most that at b and as much more, and the two lines bound the error of every
// scale between. Where no code changes, the parabola's vertex A / B says which scales of the type are the best.
#include <algorithm>
#include <utility>
#include <vector>

#include "quantize/importance.hpp"

namespace breccia::inline v0_4 {
namespace {

// Scales closer to the best than this are alike: sums of float32 tell no more.
constexpr float alike = 1.0F - 0x1p-18F;

// What numbers of a type there are, by their bits.
struct StoredType {
    ScaleType type = ScaleType::float32;
    std::uint32_t highest = 0x7F7F'FFFF, sign = f32_sign_bit, step = 1U << 19;  // step: a sixteenth of a binade

    [[nodiscard]] float value(std::uint32_t bits) const {
        if (type == ScaleType::float16) return to_float(Float16{static_cast<std::uint16_t>(bits)});
        if (type == ScaleType::bfloat16) return to_float(BFloat16{static_cast<std::uint16_t>(bits)});
        return float_from_bits(bits);
    }
};
StoredType stored_type(ScaleType type) {
    if (type == ScaleType::float16) return {type, 0x7BFF, 0x8000U, 1U << 6};
    if (type == ScaleType::bfloat16) return {type, 0x7F7F, 0x8000U, 1U << 3};
    return {};
}

// One way to cut codes off, and the sign of its scales.
struct Range {
    float lowest, largest;
    bool negative;
    float zero_point;
};

struct Edge {
    std::uint32_t bits;  // of the scale's magnitude
    float scale;         // in units of the block
    IntegerSums sums;
};

class IntegerSearch {
public:
    IntegerSearch(const ImportanceKernels& kernels, const WeightedBlock& block, const ScaleParams& params,
                  const BlockScale& own)
        : kernels_(kernels),
          block_(block),
          type_(stored_type(params.type)),
          unit_(own.error_unit),
          own_bits_(own.stored & ~type_.sign),
          best_(own) {}

    void begin(const Range& own) {
        best_error_ = sums_of(best_, own, false).error;
        best_distance_ = 0;
    }

    void search(const Range& range) {
        range_ = range;
        const Edge own = edge(own_bits_, true);
        // Down until what is cut off, which only grows, is too much.
        for (Edge above = own; above.bits > 1 && above.sums.cut < best_error_;) {
            const Edge below = edge(above.bits - std::min(above.bits - 1, type_.step), true);
            intervals_.emplace_back(below, above);
            above = below;
        }
        // Up, in longer and longer steps, until what has become zero is. Where nothing is cut off a scale and its
        // opposite are alike.
        std::uint32_t step = type_.step;
        for (Edge below = own;
             !range.negative && below.bits < type_.highest && below.sums.dead < best_error_ && below.sums.square > 0;) {
            const Edge above = edge(below.bits + std::min(type_.highest - below.bits, step), true);
            intervals_.emplace_back(below, above);
            below = above;
            step += step / 2;
        }
        for (const auto& [below, above] : intervals_) within(below, above);
        intervals_.clear();
    }

    [[nodiscard]] float cut(float scale, const Range& range) const {
        BlockScale s = scale_of(scale, range.zero_point);
        return sums_of(s, range, true).cut;
    }
    [[nodiscard]] float best_error() const { return best_error_; }
    [[nodiscard]] const BlockScale& best() const { return best_; }

private:
    [[nodiscard]] BlockScale scale_of(float scale, float zero_point) const {
        BlockScale s{
            .factor = scale, .all_finite = true, .decoded = scale, .zero_point = zero_point, .error_unit = unit_};
        allow_fast_division(s, block_.stats.amax_bits);
        return s;
    }
    [[nodiscard]] IntegerSums sums_of(const BlockScale& s, const Range& range, bool ends) const {
        const auto sums = ends ? kernels_.integer_sums_and_ends : kernels_.integer_sums;
        return sums(block_.x.data(), block_.weights, static_cast<std::int64_t>(block_.x.size()), range.lowest,
                    range.largest, s);
    }

    // The sums under a scale, and the scale for the best one where none before it has a smaller error. `ends`: with the
    // error of what is cut off and of what becomes zero.
    Edge edge(std::uint32_t bits, bool ends = false) {
        const float magnitude = type_.value(bits);
        BlockScale s = scale_of(range_.negative ? -magnitude : magnitude, range_.zero_point);
        s.stored = bits | (range_.negative ? type_.sign : 0U);
        Edge e{bits, magnitude * unit_, sums_of(s, range_, ends)};
        if (range_.negative) e.sums.cross = -e.sums.cross;
        const std::uint32_t distance = bits > own_bits_ ? bits - own_bits_ : own_bits_ - bits;
        if (e.sums.error < best_error_ || (e.sums.error == best_error_ && distance < best_distance_))
            best_error_ = e.sums.error, best_ = s, best_distance_ = distance;
        return e;
    }

    // Half the slope of the error.
    static float slope(const Edge& e) { return e.scale * e.sums.square - e.sums.cross; }

    static float bound(const Edge& a, const Edge& b) {
        const float width = b.scale - a.scale, fall = b.scale * (a.sums.square - b.sums.square);
        const float down = fall - 2 * slope(a), up = fall + 2 * slope(b);
        if (down <= 0) return a.sums.error;
        if (up <= 0) return b.sums.error;
        // Where the lines a.error - down t and b.error - up (width - t) cross, if they do between.
        const float t = (a.sums.error - b.sums.error + up * width) / (down + up);
        return a.sums.error - down * std::clamp(t, 0.0F, width);
    }

    void within(const Edge& a, const Edge& b) {
        if (b.bits - a.bits <= 1 || bound(a, b) >= best_error_ * alike) return;
        if (a.sums.square == b.sums.square) return at_vertex(a, b);
        const Edge middle = edge(a.bits + (b.bits - a.bits) / 2);
        if (bound(a, middle) <= bound(middle, b)) {
            within(a, middle);
            within(middle, b);
        } else {
            within(middle, b);
            within(a, middle);
        }
    }

    // No code changes between the two: the stored scales on both sides of the vertex.
    void at_vertex(const Edge& a, const Edge& b) {
        if (!(a.sums.square > 0)) return;
        const float vertex = a.sums.cross / a.sums.square;
        std::uint32_t below = a.bits, above = b.bits;
        while (above - below > 1) {
            const std::uint32_t middle = below + (above - below) / 2;
            (type_.value(middle) * unit_ <= vertex ? below : above) = middle;
        }
        if (below != a.bits) edge(below);
        if (above != b.bits) edge(above);
    }

    const ImportanceKernels& kernels_;
    const WeightedBlock& block_;
    StoredType type_;
    float unit_;
    std::uint32_t own_bits_;
    Range range_{};
    std::vector<std::pair<Edge, Edge>> intervals_;
    BlockScale best_;
    float best_error_ = 0;
    std::uint32_t best_distance_ = 0;
};

}  // namespace

BlockScale best_integer_scale(const ImportanceKernels& kernels, const WeightedBlock& block, const CodeGrid& grid,
                              const ScaleParams& params, const BlockScale& own) {
    const auto range = [&](float zero_point, bool negative) {
        return Range{grid.lowest - zero_point, grid.largest - zero_point, negative, zero_point};
    };
    IntegerSearch search(kernels, block, params, own);
    search.begin(range(own.zero_point, false));
    search.search(range(own.zero_point, false));
    if (!params.needs_range()) {
        // Negative scales give the larger side of the data the code that only one side has.
        if (grid.lowest < 0) search.search(range(0, true));
        return search.best();
    }
    // A higher zero point cuts off less below and more above. It can only be better under a scale so small that this
    // zero point cuts something off below, so a scale below min / lowest. The largest of these already cuts off, above,
    // an error that only grows as scales become smaller: once that error is the best one's, no higher zero point is
    // tried. For lower zero points below and above change places.
    for (float zero = own.zero_point;;) {
        const Range r = range(zero, false);
        if (block.stats.min == 0 || ++zero > grid.largest) break;
        if (r.lowest < 0 && search.cut(block.stats.min / r.lowest, r) >= search.best_error()) break;
        search.search(range(zero, false));
    }
    for (float zero = own.zero_point;;) {
        const Range r = range(zero, false);
        if (block.stats.max == 0 || --zero < grid.lowest) break;
        if (r.largest > 0 && search.cut(block.stats.max / r.largest, r) >= search.best_error()) break;
        search.search(range(zero, false));
    }
    return search.best();
}

}  // namespace breccia::inline v0_4
