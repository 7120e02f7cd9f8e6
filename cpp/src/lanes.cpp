// SPDX-License-Identifier: Apache-2.0
//
// Up to 16 activations, or terms of such, by a weight whose rows lie across the lanes: as prepared, or turned on the
// way from rows in place.
#include <algorithm>

#include "gemm.hpp"
#include "panels.hpp"

namespace breccia {
namespace {

constexpr std::int64_t lanes = 16;

// Activations that a kernel comes for; the rest of them are zeros.
std::int64_t kernel_vectors(std::int64_t used) {
    for (const std::int64_t count : {1, 2, 3, 4, 6, 8, 12})
        if (used <= count) return count;
    return lanes;
}

// The activations of a product, as bfloat16 terms that add up to them: vector t * rows + i is term t of row i.
struct LaneActivations {
    std::int64_t rows, terms, vectors;
    std::vector<std::uint16_t> x;
};

bool pack(const Product& product, bool packed, const BF16Kernels& bf16, LaneActivations& out) {
    const std::int64_t rows = out.rows;
    out.x.resize(static_cast<std::size_t>(round_up(product.k, 32) * out.vectors));
    std::vector<float> chunk(static_cast<std::size_t>(rows * panel_k));
    Scratch scratch;
    for (std::int64_t k = 0; k < product.k; k += panel_k) {
        const std::int64_t count = std::min(panel_k, product.k - k);
        product.read(product.table, 0, rows, k, count, scratch, chunk.data(), panel_k);
        for (std::int64_t term = 0; term < out.terms; ++term) {
            if (term > 0)
                for (float& value : chunk) value -= to_float(to_bfloat16(value));
            const bool in_range = bf16.pack_lanes({.x = chunk.data(),
                                                   .x_stride = panel_k,
                                                   .rows = rows,
                                                   .k = count,
                                                   .out = out.x.data() + k * out.vectors + term * rows * 2,
                                                   .vectors = out.vectors,
                                                   .packed = packed});
            if (term == 0 && !in_range) return false;  // the other terms may be smaller: they are exact
        }
    }
    return true;
}

// Rows of the weight in one call of the kernel, and what it needs besides.
class LaneGroups {
public:
    LaneGroups(const Product& product, const ScaledMatrix& w, const LaneBlocks& blocks, const LaneActivations& a)
        : product_(product), w_(w), blocks_(blocks), a_(a), scales_(blocks.group_bytes(ScaleType::float32)) {
        sums_.resize(static_cast<std::size_t>(at_once * lanes * a.vectors));
    }

    void multiply(std::int64_t begin, std::int64_t end) {
        for (std::int64_t group = begin; group < end; group += at_once) {
            const std::int64_t row = group * lanes,
                               n = std::min(std::min(at_once, end - group) * lanes, w_.grid.rows - row);
            if (w_.lane_codes != nullptr)
                run({.codes = w_.lane_codes + group * quads() * 256,
                     .interleaved = true,
                     .rows = n,
                     .scales = w_.lane_scales + group * blocks_.group_bytes(w_.lane_scale_type),
                     .scale_type = w_.lane_scale_type,
                     .out = sums_.data()});
            else
                for (std::int64_t r = 0; r < n; r += lanes)
                    run({.codes = w_.data + (row + r) * w_.row_stride,
                         .row_stride = w_.row_stride,
                         .row_bytes = w_.packed ? (product_.k + 1) / 2 : product_.k,
                         .rows = std::min(lanes, n - r),
                         .scales = scales_.data(),
                         .scale_type = scales_of(row + r),
                         .out = sums_.data() + r * a_.vectors});
            for (std::int64_t i = 0; i < a_.rows; ++i) write(i, row, n);
        }
    }

private:
    static constexpr std::int64_t at_once = 8;

    [[nodiscard]] std::int64_t quads() const { return quads_of(product_.k, w_.packed); }

    void run(LaneProduct p) const {
        p.quads = quads();
        p.block_quads = blocks_.block_quads;
        p.block_shift = blocks_.block_shift;
        p.scale_step = blocks_.scale_step;
        p.group_scale_stride = blocks_.group_bytes(p.scale_type);
        p.x = a_.x.data();
        p.vectors = a_.vectors;
        bf16_kernels(product_.table)->lanes[static_cast<std::size_t>(w_.element)](p);
    }

    ScaleType scales_of(std::int64_t row) {
        const KernelTable& table = product_.table;
        if (is_coded(w_.scale_type) &&
            interleave_scales(table, w_, blocks_, row, w_.scale_type, scratch_, scales_.data()))
            return w_.scale_type;
        interleave_scales(table, w_, blocks_, row, ScaleType::float32, scratch_, scales_.data());
        return ScaleType::float32;
    }

    void write(std::int64_t i, std::int64_t row, std::int64_t n) const {
        float line[at_once * lanes];
        for (std::int64_t j = 0; j < n; j += lanes) {
            const float* from = sums_.data() + (j * a_.vectors) + i * lanes;
            for (std::int64_t lane = 0; lane < lanes; ++lane) {
                float sum = from[lane];
                for (std::int64_t t = 1; t < a_.terms; ++t) sum += from[t * a_.rows * lanes + lane];
                line[j + lane] = sum * w_.global_scale;
            }
        }
        product_.write(product_.table, i, row, n, line);
    }

    const Product& product_;
    const ScaledMatrix& w_;
    const LaneBlocks& blocks_;
    const LaneActivations& a_;
    std::vector<std::byte> scales_;
    std::vector<float> sums_;
    Scratch scratch_;
};

}  // namespace

bool product_in_lanes(const Product& product, const ScaledMatrix& w) {
    const BF16Kernels* bf16 = bf16_kernels(product.table);
    if (bf16 == nullptr || bf16->lanes[static_cast<std::size_t>(w.element)] == nullptr) return false;
    const std::optional<LaneBlocks> blocks = lane_blocks(w);
    const std::int64_t rows = product.total_rows();
    const std::int64_t terms = product.precision == Precision::fast ? 1 : product.a.front().bfloat16_terms();
    if (!blocks || rows * terms > bf16->lane_vectors) return false;
    LaneActivations a{.rows = rows, .terms = terms, .vectors = kernel_vectors(rows * terms), .x = {}};
    if (!pack(product, w.packed, *bf16, a)) return false;
    constexpr std::int64_t bytes_per_task = std::int64_t{1} << 17;
    const std::int64_t grain =
        std::max<std::int64_t>(1, bytes_per_task / std::max<std::int64_t>(lanes * w.row_stride, 1));
    parallel_for((product.n + lanes - 1) / lanes, grain, [&](std::int64_t begin, std::int64_t end) {
        LaneGroups(product, w, *blocks, a).multiply(begin, end);
    });
    return true;
}

}  // namespace breccia
