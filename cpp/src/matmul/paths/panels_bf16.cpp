// SPDX-License-Identifier: Apache-2.0
//
// Panels of codes in bfloat16. A scale goes into the codes where their product is exact in bfloat16 (powers of two,
// E4M3 times E2M1), otherwise it multiplies the float32 sums of its block.
#include <atomic>
#include <bit>

#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

enum class Scaling : std::uint8_t { none, into_codes, onto_sums };

// What a block-scaled operand asks of the panel product.
struct Plan {
    Scaling scaling = Scaling::none;
    std::int64_t block = 0;  // elements of K to a scale on sums: all of them where there is one scale or none
};

// Blocks that a panel decodes: whole ones, of a power of two, or a part of one.
bool in_chunks(std::int64_t block, std::int64_t k) {
    return block >= k || panel_k % block == 0 || block % panel_k == 0;
}

// Whether scales that are powers of two may go into the codes, which depends on their values: these are looked at, or
// before that it is assumed or denied.
enum class KeepNormal : std::uint8_t { assume, deny, look };

bool may_scale_codes(const ScaledMatrix& m, KeepNormal keep) {
    if (m.scale_type == ScaleType::e4m3 || keep == KeepNormal::assume) return true;
    return keep == KeepNormal::look && powers_of_two_keep_normal(m);
}

Plan plan_of(const ScaledMatrix& m, std::int64_t k, KeepNormal keep) {
    const std::int64_t block = m.grid.block_cols;
    if (block >= k) return {.scaling = Scaling::onto_sums, .block = k};
    const bool e2m1 = m.element == format_of<Float4E2M1FN>;
    const bool exact = (m.scale_type == ScaleType::e4m3 && e2m1) || m.scale_type == ScaleType::e8m0;
    if (exact && block % 16 == 0 && in_chunks(block, k) && m.zero_point.data == nullptr && may_scale_codes(m, keep))
        return {.scaling = Scaling::into_codes, .block = k};
    if (block % 32 == 0) return {.scaling = Scaling::onto_sums, .block = block};
    return {};
}

// K cut so that no chunk crosses a scale's block unless it holds it whole.
std::vector<Chunk> chunks_of(std::int64_t k, std::int64_t block, std::int64_t most) {
    std::vector<Chunk> chunks;
    for (std::int64_t at = 0; at < k; at += chunks.back().count) {
        const std::int64_t room = block > most ? block - at % block : most / block * block;
        chunks.push_back({.k = at, .count = std::min({room, most, k - at})});
    }
    return chunks;
}

// Activations of one call, packed: [chunk][term][panel][pair][activation][2]; and their scales for sums:
// [panel][block][activation], or none.
struct Activations {
    WorkBuffer<std::uint16_t> x;
    std::int64_t bytes = 0;
    WorkBuffer<float> scales;
};

struct Setup {
    const KernelTable& table;
    const BF16Kernels& bf16;
    const Product& product;
    const ScaledMatrix& w;
    Plan plan;
    const ScaledMatrix* a = nullptr;  // where activations are codes whose scales stay apart
    Plan a_plan;
    std::int64_t block = 0;  // of scales on sums
    std::int64_t blocks = 1;
    std::vector<Chunk> chunks;
    int terms = 1;  // bfloat16 numbers that make up an activation
};

// Whether every chunk lies in one block, where blocks are longer than chunks and codes take scales or zero points.
bool decodes_in_chunks(const Setup& s) {
    const std::int64_t own = s.w.grid.block_cols;
    if (own < panel_k || (s.plan.scaling != Scaling::into_codes && s.w.zero_point.data == nullptr)) return true;
    return std::all_of(s.chunks.begin(), s.chunks.end(),
                       [&](const Chunk& chunk) { return chunk.k / own == (chunk.k + chunk.count - 1) / own; });
}

// Packs 16 rows where they lie as bfloat16 numbers, and says whether they are in range.
std::optional<bool> pack_in_place(const Setup& s, std::int64_t first, std::int64_t rows, const Chunk& chunk,
                                  std::int64_t width, std::uint16_t* to) {
    PackWords words{.k = chunk.count, .out = to, .width = width};
    for (std::int64_t i = 0; i < rows; ++i) {
        const Rows& a = s.product.a[static_cast<std::size_t>((first + i) / s.product.m)];
        const std::byte* row = a.bfloat16_row((first + i) % s.product.m);
        if (row == nullptr) return {};
        words.rows[static_cast<std::size_t>(i)] = row + 2 * chunk.k;
    }
    return s.bf16.pack_words(words);
}

// Elements of a chunk, to rows of `out` panel_k apart: without what of their scales multiplies sums.
void read_chunk(const Setup& s, std::int64_t first, std::int64_t rows, const Chunk& chunk, Scratch& scratch,
                float* out) {
    if (s.a_plan.scaling != Scaling::into_codes)
        return read_activations(s.product, s.a, first, rows, chunk.k, chunk.count, scratch, out, panel_k);
    ScaledMatrix scaled = *s.a;
    scaled.global_scale = 1;
    for (std::int64_t i = 0; i < rows; ++i)
        scaled.read(s.table, first + i, chunk.k, chunk.count, scratch, out + i * panel_k);
}

// What of their scales multiplies sums: 16 floats to a block, `stride` apart. Past the last row sums are zeros.
void read_activation_scales(const Setup& s, std::int64_t first, std::int64_t rows, Scratch& scratch, float* out,
                            std::int64_t stride) {
    for (std::int64_t b = 0; b < s.blocks; ++b) std::fill_n(out + b * stride, 16, s.a->with_global(1));
    if (s.a_plan.scaling == Scaling::into_codes) return;
    for (std::int64_t i = 0; i < rows; ++i)
        read_finer_scales(s.table, *s.a, first + i, s.block, scratch.scales, out + i, stride);
}

bool pack(const Setup& s, std::int64_t first, const PanelGrid& grid, Activations& out) {
    std::int64_t padded_k = s.chunks.back().k + round_up(s.chunks.back().count, 32);
    out.x = WorkBuffer<std::uint16_t>(s.terms * grid.padded * padded_k);
    out.bytes = s.terms * grid.padded * padded_k * 2;
    if (s.a != nullptr) out.scales = WorkBuffer<float>(grid.padded * s.blocks);
    std::atomic<bool> all_in_range{true};
    parallel_for(s.product.call, grid.padded / 16, 1, [&](std::int64_t begin, std::int64_t end) {
        Scratch scratch;
        std::vector<float> group;
        for (std::int64_t g = begin; g < end; ++g) {
            const std::int64_t rows = std::min<std::int64_t>(16, grid.rows - g * 16);
            group.assign(static_cast<std::size_t>(16 * panel_k), 0.0F);
            for (const Chunk& chunk : s.chunks) {
                const std::int64_t pairs = round_up(chunk.count, 32) / 2, width = grid.width(g / 2);
                std::uint16_t* to = out.x.data() + s.terms * chunk.k * grid.padded + 2 * packed_offset(g, pairs);
                std::optional<bool> in_range = pack_in_place(s, first + g * 16, rows, chunk, width, to);
                if (!in_range) {
                    read_chunk(s, first + g * 16, rows, chunk, scratch, group.data());
                    in_range = s.bf16.pack({.x = group.data(),
                                            .x_stride = panel_k,
                                            .k = chunk.count,
                                            .out = to,
                                            .width = width,
                                            .terms = s.terms,
                                            .term_stride = grid.padded * 2 * pairs});
                }
                if (!*in_range) all_in_range = false;
            }
            if (s.a != nullptr)
                read_activation_scales(s, first + g * 16, rows, scratch, out.scales.data() + packed_offset(g, s.blocks),
                                       grid.width(g / 2));
        }
    });
    return all_in_range;
}

// So many bytes of activations do not stay in the second-level cache from one panel to the next.
constexpr std::int64_t beyond_cache = std::int64_t{1} << 20;

// What a thread's kernels need before and after.
class KernelScope {
public:
    explicit KernelScope(const BF16Kernels& bf16) : bf16_(bf16) {
        if (bf16_.begin != nullptr) bf16_.begin();
    }
    ~KernelScope() {
        if (bf16_.end != nullptr) bf16_.end();
    }
    KernelScope(const KernelScope&) = delete;
    KernelScope& operator=(const KernelScope&) = delete;

private:
    const BF16Kernels& bf16_;
};

// The bytes that the blocks of a weight's rows have, one to each, or nothing: in place where a row of them lies so.
class BlockBytes {
public:
    BlockBytes() = default;
    BlockBytes(const BlockGrid& grid, const GridView& view)
        : grid_(grid),
          view_(view),
          in_place_(view.data == nullptr || (grid.block_rows == 1 && (view.col_stride == 1 || grid.grid_cols() == 1))) {
    }

    void take(std::int64_t row, std::int64_t rows) {
        if (view_.data == nullptr) return;
        first_ = row_at(row);
        if (in_place_) return;
        const std::int64_t cols = grid_.grid_cols();
        gathered_.resize(static_cast<std::size_t>(rows * cols));
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::uint8_t* from = row_at(row + i);
            for (std::int64_t j = 0; j < cols; ++j)
                gathered_[static_cast<std::size_t>(i * cols + j)] = from[j * view_.col_stride];
        }
        first_ = gathered_.data();
    }
    [[nodiscard]] std::int64_t stride() const { return in_place_ ? view_.row_stride : grid_.grid_cols(); }
    /// Of the rows taken, or null.
    [[nodiscard]] const std::uint8_t* at(std::int64_t row, std::int64_t block) const {
        return view_.data == nullptr ? nullptr : first_ + row * stride() + block;
    }

private:
    [[nodiscard]] const std::uint8_t* row_at(std::int64_t row) const {
        return reinterpret_cast<const std::uint8_t*>(view_.at(row / grid_.block_rows, 0));
    }

    BlockGrid grid_;
    GridView view_;
    const std::uint8_t* first_ = nullptr;
    bool in_place_ = true;
    std::vector<std::uint8_t> gathered_;
};

// The part of a weight panel's work that a thread keeps its buffers for.
struct BF16Panels {
    const Setup& s;
    KernelScope scope;
    const PanelGrid& grid;
    const Activations& activations;
    WorkBuffer<std::uint16_t> panel;
    WorkBuffer<float> scales;  // [block][row]
    std::int64_t scale_stride;
    BlockBytes code_scales, zero_points;  // of those that codes take
    std::vector<float> row_scales = {}, scratch = {};

    // Scales of the sums, 16 rows at a time turned to lie side by side.
    void read_sum_scales(std::int64_t j, std::int64_t rows) {
        const std::int64_t stride = round_up(s.blocks, 16);
        row_scales.resize(static_cast<std::size_t>(16 * stride));
        float turned[16 * 16];
        for (std::int64_t first = 0; first < rows; first += 16) {
            const std::int64_t count = std::min<std::int64_t>(16, rows - first);
            for (std::int64_t r = 0; r < count; ++r) {
                float* to = row_scales.data() + r * stride;
                if (s.plan.scaling == Scaling::into_codes)
                    std::fill_n(to, s.blocks, s.w.with_global(1));
                else
                    read_finer_scales(s.table, s.w, j + first + r, s.block, scratch, to, 1);
            }
            for (std::int64_t b = 0; b < s.blocks; b += 16) {
                s.table.matmul.transpose(row_scales.data() + b, stride, turned, 16);
                for (std::int64_t i = 0; i < std::min<std::int64_t>(16, s.blocks - b); ++i)
                    std::copy_n(turned + i * 16, 16, scales.data() + (b + i) * scale_stride + first);
            }
        }
    }

    [[nodiscard]] const std::uint8_t* codes_at(std::int64_t row, std::int64_t k) const {
        return s.w.data + row * s.w.row_stride + (s.w.packed ? k / 2 : k);
    }

    void run(std::int64_t j, std::int64_t rows, std::int64_t padded_rows, float* c) {
        read_sum_scales(j, rows);
        code_scales.take(j, rows);
        zero_points.take(j, rows);
        // For few activations a tile's rows at a time: they stay in the first-level cache, and each part is decoded
        // before the product of the one before begins, which need not wait for it.
        const bool few = grid.padded == 16;
        const std::int64_t step = few ? s.bf16.tile_rows : padded_rows;
        const auto chunks = static_cast<std::int64_t>(s.chunks.size()), parts = (rows + step - 1) / step * chunks;
        const auto part_at = [&](std::int64_t i) {
            const std::int64_t r = i / chunks * step;
            return Part{.r = r,
                        .rows = std::min(step, rows - r),
                        .padded_rows = std::min(step, padded_rows - r),
                        .chunk = s.chunks[static_cast<std::size_t>(i % chunks)],
                        .next = s.chunks[static_cast<std::size_t>((i + 1) % chunks)],
                        .next_row = j + r + ((i + 1) % chunks == 0 ? step : 0),
                        .codes = panel.data() + (few ? i % 2 * step * panel_stride_bf16 : 0)};
        };
        for (std::int64_t i = 0; i < parts; ++i) {
            if (!few || i == 0) decode(j, part_at(i));
            if (few && i + 1 < parts) decode(j, part_at(i + 1));
            multiply(part_at(i), padded_rows, c);
        }
    }

    // Rows [r, r + rows) of a panel, one chunk of K.
    struct Part {
        std::int64_t r, rows, padded_rows;
        Chunk chunk;
        Chunk next;  // whose codes are wanted after that, from row next_row of the weights on
        std::int64_t next_row;
        std::uint16_t* codes;  // decoded
    };

    void decode(std::int64_t j, const Part& part) {
        const std::int64_t own = s.w.grid.block_cols, k = part.chunk.k, block = k / own;
        const bool one_block = own >= panel_k || s.w.grid.grid_cols() == 1;
        s.bf16.decode[static_cast<std::size_t>(s.w.element)](
            {.codes = codes_at(j + part.r, k),
             .row_stride = s.w.row_stride,
             .rows = part.rows,
             .k = part.chunk.count,
             .out = part.codes,
             // Blocks that a chunk holds several of are powers of two.
             .block_shift = one_block ? 63 : std::countr_zero(static_cast<std::uint64_t>(own)),
             .skip = one_block ? 0 : k % own,
             .scales = code_scales.at(part.r, block),
             .scale_type = s.w.scale_type,
             .scale_stride = code_scales.stride(),
             .zero_points = zero_points.at(part.r, block),
             .zero_stride = zero_points.stride()});
    }

    void multiply(const Part& part, std::int64_t padded_rows, float* c) {
        const Chunk &chunk = part.chunk, &next = part.next;
        const std::int64_t r = part.r, pairs = round_up(chunk.count, 32) / 2;
        const std::int64_t block_pairs = s.block < chunk.count ? s.block / 2 : pairs;
        const std::int64_t first_block = chunk.k / s.block;
        // Panels of full width, then the one that may be narrower.
        const std::int64_t full = grid.padded / panel_width;
        for (std::int64_t p = 0; p < grid.count(); p += std::max<std::int64_t>(full, 1)) {
            const std::int64_t width = grid.width(p);
            const float* x_scales = activations.scales.data() + p * panel_width * s.blocks + first_block * width;
            s.bf16.gemm({.w = part.codes,
                         .x = activations.x.data() + s.terms * chunk.k * grid.padded + 2 * p * panel_width * pairs,
                         .c = c + p * panel_width * padded_rows + r * width,
                         .rows = part.padded_rows,
                         .width = width,
                         .pairs = pairs,
                         .block_pairs = block_pairs,
                         .panels = p < full ? full : 1,
                         .x_panel_stride = 2 * panel_width * pairs,
                         .c_panel_stride = panel_width * padded_rows,
                         .terms = s.terms,
                         .term_stride = grid.padded * 2 * pairs,
                         .w_scales = scales.data() + first_block * scale_stride + r,
                         .w_scale_stride = scale_stride,
                         .x_scales = s.a != nullptr ? x_scales : nullptr,
                         .x_scale_panel_stride = panel_width * s.blocks,
                         .next = p == 0 ? codes_at(part.next_row, next.k) : nullptr,
                         .next_stride = s.w.row_stride,
                         .next_rows = std::min(part.rows, s.product.n - part.next_row),
                         .next_bytes = s.w.packed ? next.count / 2 : next.count,
                         .next_x = activations.x.data() + s.terms * next.k * grid.padded,
                         .next_x_bytes =
                             p == 0 && activations.bytes > beyond_cache ? s.terms * next.count * grid.padded * 2 : 0});
        }
    }
};

std::optional<Setup> set_up(const Product& product, const ScaledMatrix& w, KeepNormal of_w, KeepNormal of_a) {
    const BF16Kernels* bf16 = product.table.matmul.bf16;
    if (bf16 == nullptr || bf16->decode[static_cast<std::size_t>(w.element)] == nullptr || product.k == 0 ||
        w.col_stride != 1 || w.packed != is_packed(w.element) || !zero_points_are_bytes(w))
        return {};
    Setup s{.table = product.table,
            .bf16 = *bf16,
            .product = product,
            .w = w,
            .plan = plan_of(w, product.k, of_w),
            .a_plan = {},
            .chunks = {}};
    if (s.plan.scaling == Scaling::none) return {};
    s.a = product.precision != Precision::fast ? coded_activations(product) : nullptr;
    if (s.a != nullptr) s.a_plan = plan_of(*s.a, product.k, of_a);
    if (s.a_plan.scaling == Scaling::none) s.a = nullptr;
    if (s.a == nullptr) s.terms = product.terms();
    const auto [fine, coarse] = std::minmax(s.plan.block, (s.a != nullptr ? s.a_plan : s.plan).block);
    if (coarse < product.k && coarse % fine != 0) return {};
    s.block = fine;
    if (w.zero_point.data != nullptr && !in_chunks(w.grid.block_cols, product.k)) return {};
    s.blocks = (product.k + s.block - 1) / s.block;
    const PanelShape& most = s.terms > 1 ? bf16->panel_of_terms : bf16->panel;
    // 17 to 32 activations meet so few rows at a time that shorter chunks cost more than they keep in the cache.
    const bool one_panel = product.total_rows() > 16 && product.total_rows() <= panel_width;
    s.chunks = chunks_of(product.k, s.block, one_panel ? panel_k : most.k);
    if (!decodes_in_chunks(s)) return {};
    return s;
}

// Whatever scales turn out to be: codes where they may be multiplied so.
std::optional<Kinds> suits_panels_bf16(const Product& product, const ScaledMatrix& w) {
    std::optional<Kinds> best;
    for (const KeepNormal of_w : {KeepNormal::assume, KeepNormal::deny})
        for (const KeepNormal of_a : {KeepNormal::assume, KeepNormal::deny}) {
            const std::optional<Setup> s = set_up(product, w, of_w, of_a);
            if (s && s->a != nullptr) return kinds::codes;
            if (s) best = as_numbers(product);
            if (best && best != kinds::decoded) return best;
        }
    return best;
}

Refusal by_panels_bf16(const Product& product, const ScaledMatrix& w, int most_terms) {
    if (!zero_points_are_small(w)) return Refusal::zero_points;
    const std::optional<Setup> set = set_up(product, w, KeepNormal::look, KeepNormal::look);
    if (!set || set->terms > most_terms) return Refusal::scales;
    const Setup& s = *set;
    const PanelShape& most = s.terms > 1 ? s.bf16.panel_of_terms : s.bf16.panel;
    for (std::int64_t first = 0; first < product.total_rows(); first += most.activations) {
        const PanelGrid grid(std::min(most.activations, product.total_rows() - first));
        const std::int64_t n_at_once = panel_rows(product.n, grid, most.rows);
        Activations activations;
        if (!pack(s, first, grid, activations)) return Refusal::range;
        for_weight_panels(product.table, product, first, grid, n_at_once, [&] {
            return BF16Panels{
                .s = s,
                .scope = KernelScope(s.bf16),
                .grid = grid,
                .activations = activations,
                .panel = WorkBuffer<std::uint16_t>(n_at_once * panel_stride_bf16),
                .scales = WorkBuffer<float>(n_at_once * s.blocks),
                .scale_stride = n_at_once,
                .code_scales = s.plan.scaling == Scaling::into_codes ? BlockBytes(w.grid, w.scale) : BlockBytes(),
                .zero_points = {w.grid, w.zero_point}};
        });
    }
    return Refusal::none;
}

}  // namespace

constinit const Path paths::panels_bf16 = path_of_codes<suits_panels_bf16, by_panels_bf16>(
    "panels_bf16", {Refusal::zero_points, Refusal::scales, Refusal::range});

}  // namespace breccia::inline v0_4
