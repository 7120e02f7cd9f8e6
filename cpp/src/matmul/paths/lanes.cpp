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

// Rows of the weight in one call of the kernel, and what it needs besides.
struct LaneGroups {
    static constexpr std::int64_t at_once = 8;
    const Product& product;
    const ScaledMatrix& w;
    const LaneBlocks& blocks;
    WorkBuffer<std::byte> scales = WorkBuffer<std::byte>(blocks.group_bytes(ScaleType::float32));
    WorkBuffer<std::byte> zero_points = WorkBuffer<std::byte>(w.zero_point.data != nullptr ? zero_bytes() : 0);
    WorkBuffer<float> sums = WorkBuffer<float>(at_once * group_rows * group_rows);  // [group][vector][row]
    Scratch scratch = {};

    void multiply(const OneOrMore<TermActivations>& calls, std::int64_t begin, std::int64_t end) {
        for (std::int64_t group = begin; group < end; group += at_once) {
            const std::int64_t row = group * group_rows;
            const std::int64_t n = std::min(std::min(at_once, end - group) * group_rows, w.grid.rows - row);
            for (const TermActivations& a : calls) {
                if (product.prepared.codes != nullptr)
                    run_prepared(a, group, n);
                else
                    run_rows(a, row, n);
                for (std::int64_t i = 0; i < a.rows; ++i) write(a, i, row, n);
            }
        }
    }

    [[nodiscard]] std::int64_t quads() const { return quads_of(product.k, w.packed); }
    [[nodiscard]] std::int64_t zero_bytes() const { return blocks.stored * group_rows; }

    void run_prepared(const TermActivations& a, std::int64_t group, std::int64_t n) {
        const PreparedRows& prepared = product.prepared;
        run(a, {.codes = prepared.codes + group * quads() * 256,
                .interleaved = true,
                .rows = n,
                .scales = prepared.scales + group * blocks.group_bytes(prepared.scale_type),
                .scale_type = prepared.scale_type,
                .zero_points = w.zero_point.data != nullptr ? prepared.zero_points + group * zero_bytes() : nullptr,
                .out = sums.data()});
    }

    void run_rows(const TermActivations& a, std::int64_t row, std::int64_t n) {
        for (std::int64_t r = 0; r < n; r += group_rows)
            run(a, {.codes = w.data + (row + r) * w.row_stride,
                    .row_stride = w.row_stride,
                    .row_bytes = w.row_bytes(),
                    .rows = std::min(group_rows, n - r),
                    .scales = scales.data(),
                    .scale_type = scales_of(row + r),
                    .zero_points = zero_points_of(row + r),
                    .out = sums.data() + r * a.vectors});
    }

    void run(const TermActivations& a, LaneProduct p) const {
        p.quads = quads();
        p.block_quads = blocks.block_quads;
        p.block_shift = blocks.block_shift;
        p.scale_step = blocks.scale_step;
        p.group_scale_stride = blocks.group_bytes(p.scale_type);
        p.group_zero_stride = zero_bytes();
        p.x_scales = a.scales.empty() ? nullptr : a.scales.data();
        p.x = a.x.data();
        p.vectors = a.vectors;
        product.table.matmul.bf16->lanes[static_cast<std::size_t>(w.element)](p);
    }

    ScaleType scales_of(std::int64_t row) {
        const KernelTable& table = product.table;
        if (is_coded(w.scale_type) && interleave_scales(table, w, blocks, row, w.scale_type, scratch, scales.data()))
            return w.scale_type;
        interleave_scales(table, w, blocks, row, ScaleType::float32, scratch, scales.data());
        return ScaleType::float32;
    }

    const std::byte* zero_points_of(std::int64_t row) {
        if (w.zero_point.data == nullptr) return nullptr;
        interleave_zero_points(product.table, w, blocks, row, scratch, zero_points.data());
        return zero_points.data();
    }

    void write(const TermActivations& a, std::int64_t i, std::int64_t row, std::int64_t n) const {
        float line[at_once * group_rows];
        for (std::int64_t j = 0; j < n; j += group_rows) {
            const float* from = sums.data() + j * a.vectors + i * group_rows;
            for (std::int64_t lane = 0; lane < group_rows; ++lane) {
                float sum = from[lane];
                for (std::int64_t t = 1; t < a.terms; ++t) sum += from[t * a.rows * group_rows + lane];
                line[j + lane] = w.with_global(sum);
            }
        }
        product.write(a.first + i, row, n, line);
    }
};

std::optional<TermPlan<LaneBlocks>> lane_plan(const Product& product, const ScaledMatrix& w) {
    if (kernel_of(product.table.matmul.bf16, &BF16Kernels::lanes, w.element) == nullptr) return {};
    const std::optional<LaneBlocks> blocks = lane_blocks(w);
    return blocks ? std::optional(TermPlan(product, *blocks, w.packed ? 32 : 16)) : std::nullopt;
}

std::optional<Kinds> suits_lanes(const Product& product, const ScaledMatrix& w) {
    const auto how = lane_plan(product, w);
    return how ? std::optional(how->kind(product)) : std::nullopt;
}

Refusal by_lanes(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    if (product.prepared.zero_points == nullptr && !zero_points_are_small(w)) return Refusal::zero_points;
    const TermPlan how = *lane_plan(product, w);  // NOLINT(bugprone-unchecked-optional-access): suits() had one
    const std::int64_t padded_k = round_up(product.k, 32);
    Scratch scratch;
    const auto calls = how.calls(product.total_rows(), [&](TermActivations& call) {
        call.vectors = kernel_vectors(call.vectors);
        if (!pack_terms(product, how.coded, padded_k, w.packed ? PairOrder::packed : PairOrder::bytes, call, scratch,
                        [](float* /*x*/, std::int64_t /*count*/) {}))
            return false;
        if (how.coded != nullptr) how.read_scales(product, padded_k, call.vectors, scratch, call);
        return true;
    });
    if (calls.size() == 0) return Refusal::range;
    const std::int64_t group_bytes = quads_of(product.k, w.packed) * 256;
    parallel_for(product.call, (product.n + group_rows - 1) / group_rows,
                 std::max<std::int64_t>(1, bytes_per_task / group_bytes), [&](std::int64_t begin, std::int64_t end) {
                     LaneGroups{product, w, how.blocks}.multiply(calls, begin, end);
                 });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::lanes =
    path_of_codes<suits_lanes, by_lanes>("lanes", {Refusal::zero_points, Refusal::range});

}  // namespace breccia::inline v0_4
