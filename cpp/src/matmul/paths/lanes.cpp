// SPDX-License-Identifier: Apache-2.0
//
// Activations, or terms of such, 16 at a time by a weight whose rows lie across lanes: as prepared, or turned
// on the way from rows in place.
#include <algorithm>

#include "matmul/bf16_terms.hpp"
#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"
#include "matmul/prepared.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t group_rows = 16;

// Activations that a kernel comes for; the rest of them are zeros.
std::int64_t kernel_vectors(std::int64_t used) {
    for (const std::int64_t count : {1, 2, 3, 4, 8})
        if (used <= count) return count;
    return group_rows;
}

// Elements of K that a kernel sums up before it scales.
std::int64_t block_of(const LaneBlocks& blocks, bool packed) {
    return blocks.block_quads > 0 ? blocks.block_quads * (packed ? 32 : 16) : std::int64_t{16} << blocks.block_shift;
}

// The activations, where they are codes and the kernel's blocks, which may become shorter, each lie in one of theirs;
// else null.
const ScaledMatrix* codes_that_suit(const Product& product, bool packed, LaneBlocks& blocks) {
    const ScaledMatrix* a = coded_activations(product);
    if (a == nullptr) return nullptr;
    const std::int64_t own = a->grid.block_cols, block = block_of(blocks, packed), quad = packed ? 32 : 16;
    if (own >= product.k || own % block == 0) return a;
    if (blocks.scale_step != 0 || block % own != 0 || own % quad != 0) return nullptr;
    blocks.block_quads = own / quad;
    return a;
}

void read_activation_scales(const KernelTable& table, const ScaledMatrix& a, std::int64_t block, Scratch& scratch,
                            TermActivations& out) {
    const std::int64_t multiplied = (round_up(a.grid.cols, 32) + block - 1) / block;  // the last ones by zeros
    out.scales.resize(static_cast<std::size_t>(multiplied * out.vectors));
    for (std::int64_t i = 0; i < out.rows; ++i)
        read_finer_scales(table, a, out.first + i, block, scratch.scales, out.scales.data() + i, out.vectors);
}

// Rows of the weight in one call of the kernel, and what it needs besides.
class LaneGroups {
public:
    LaneGroups(const Product& product, const ScaledMatrix& w, const LaneBlocks& blocks)
        : product_(product),
          w_(w),
          blocks_(blocks),
          scales_(blocks.group_bytes(ScaleType::float32)),
          zero_points_(w.zero_point.data != nullptr ? zero_bytes() : 0) {}

    void multiply(const OneOrMore<TermActivations>& passes, std::int64_t begin, std::int64_t end) {
        for (std::int64_t group = begin; group < end; group += at_once) {
            const std::int64_t row = group * group_rows;
            const std::int64_t n = std::min(std::min(at_once, end - group) * group_rows, w_.grid.rows - row);
            for (const TermActivations& a : passes) {
                if (product_.prepared.codes != nullptr)
                    run_prepared(a, group, n);
                else
                    run_rows(a, row, n);
                for (std::int64_t i = 0; i < a.rows; ++i) write(a, i, row, n);
            }
        }
    }

private:
    static constexpr std::int64_t at_once = 8;

    [[nodiscard]] std::int64_t quads() const { return quads_of(product_.k, w_.packed); }
    [[nodiscard]] std::int64_t zero_bytes() const { return blocks_.stored * group_rows; }

    void run_prepared(const TermActivations& a, std::int64_t group, std::int64_t n) {
        const PreparedRows& prepared = product_.prepared;
        run(a, {.codes = prepared.codes + group * quads() * 256,
                .interleaved = true,
                .rows = n,
                .scales = prepared.scales + group * blocks_.group_bytes(prepared.scale_type),
                .scale_type = prepared.scale_type,
                .zero_points = w_.zero_point.data != nullptr ? prepared.zero_points + group * zero_bytes() : nullptr,
                .out = sums_});
    }

    void run_rows(const TermActivations& a, std::int64_t row, std::int64_t n) {
        for (std::int64_t r = 0; r < n; r += group_rows)
            run(a, {.codes = w_.data + (row + r) * w_.row_stride,
                    .row_stride = w_.row_stride,
                    .row_bytes = w_.row_bytes(),
                    .rows = std::min(group_rows, n - r),
                    .scales = scales_.data(),
                    .scale_type = scales_of(row + r),
                    .zero_points = zero_points_of(row + r),
                    .out = sums_ + r * a.vectors});
    }

    void run(const TermActivations& a, LaneProduct p) const {
        p.quads = quads();
        p.block_quads = blocks_.block_quads;
        p.block_shift = blocks_.block_shift;
        p.scale_step = blocks_.scale_step;
        p.group_scale_stride = blocks_.group_bytes(p.scale_type);
        p.group_zero_stride = zero_bytes();
        p.x_scales = a.scales.empty() ? nullptr : a.scales.data();
        p.x = a.x.data();
        p.vectors = a.vectors;
        product_.table.matmul.bf16->lanes[static_cast<std::size_t>(w_.element)](p);
    }

    ScaleType scales_of(std::int64_t row) {
        const KernelTable& table = product_.table;
        if (is_coded(w_.scale_type) &&
            interleave_scales(table, w_, blocks_, row, w_.scale_type, scratch_, scales_.data()))
            return w_.scale_type;
        interleave_scales(table, w_, blocks_, row, ScaleType::float32, scratch_, scales_.data());
        return ScaleType::float32;
    }

    const std::byte* zero_points_of(std::int64_t row) {
        if (w_.zero_point.data == nullptr) return nullptr;
        interleave_zero_points(product_.table, w_, blocks_, row, scratch_, zero_points_.data());
        return zero_points_.data();
    }

    void write(const TermActivations& a, std::int64_t i, std::int64_t row, std::int64_t n) const {
        float line[at_once * group_rows];
        for (std::int64_t j = 0; j < n; j += group_rows) {
            const float* from = sums_ + j * a.vectors + i * group_rows;
            for (std::int64_t lane = 0; lane < group_rows; ++lane) {
                float sum = from[lane];
                for (std::int64_t t = 1; t < a.terms; ++t) sum += from[t * a.rows * group_rows + lane];
                line[j + lane] = w_.with_global(sum);
            }
        }
        product_.write(a.first + i, row, n, line);
    }

    const Product& product_;
    const ScaledMatrix& w_;
    const LaneBlocks& blocks_;
    WorkBuffer<std::byte> scales_, zero_points_;
    alignas(64) float sums_[at_once * group_rows * group_rows];  // [group][vector][row]
    Scratch scratch_;
};

std::optional<TermPlan<LaneBlocks>> lane_plan(const Product& product, const ScaledMatrix& w) {
    if (kernel_of(product.table.matmul.bf16, &BF16Kernels::lanes, w.element) == nullptr) return {};
    std::optional<LaneBlocks> blocks = lane_blocks(w);
    if (!blocks) return {};
    const ScaledMatrix* coded = codes_that_suit(product, w.packed, *blocks);
    return TermPlan(product, *blocks, coded);
}

std::optional<Entry> suits_lanes(const Product& product, const ScaledMatrix& w) {
    const auto how = lane_plan(product, w);
    if (!how) return {};
    // Panels take activations that are codes without their scales, as one term, and short blocks' scales into codes.
    const bool codes_elsewhere = how->coded == nullptr && product.a.front().scaled_along_k() != nullptr;
    return Entry{.terms = how->terms,
                 .coded = how->coded != nullptr,
                 .suits_panels = codes_elsewhere || (how->terms == 1 && how->blocks.block_quads == 0)};
}

Refusal by_lanes(const Product& product, const ScaledMatrix& w, const Limits& /*limits*/) {
    if (product.prepared.zero_points == nullptr && !zero_points_are_small(w)) return Refusal::zero_points;
    const TermPlan how = *lane_plan(product, w);  // NOLINT(bugprone-unchecked-optional-access): suits() had one
    const std::int64_t rows = product.total_rows();
    OneOrMore<TermActivations> passes;
    Scratch scratch;
    for (std::int64_t first = 0; first < rows; first += how.at_once()) {
        TermActivations pass = how.pass(first, rows);
        pass.vectors = kernel_vectors(pass.vectors);
        if (!pack_terms(product, how.coded, round_up(product.k, 32), w.packed ? PairOrder::packed : PairOrder::bytes,
                        pass, scratch, [](float* /*x*/, std::int64_t /*count*/) {}))
            return Refusal::range;
        if (how.coded != nullptr)
            read_activation_scales(product.table, *how.coded, block_of(how.blocks, w.packed), scratch, pass);
        passes.push_back(std::move(pass));
    }
    const std::int64_t group_bytes = quads_of(product.k, w.packed) * 256;
    parallel_for(product.call, (product.n + group_rows - 1) / group_rows,
                 std::max<std::int64_t>(1, bytes_per_task / group_bytes), [&](std::int64_t begin, std::int64_t end) {
                     LaneGroups(product, w, how.blocks).multiply(passes, begin, end);
                 });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::lanes =
    path_of_codes<suits_lanes, by_lanes>("lanes", {Refusal::zero_points, Refusal::range});

}  // namespace breccia::inline v0_4
