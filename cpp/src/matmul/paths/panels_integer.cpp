// SPDX-License-Identifier: Apache-2.0
//
// Activations that are INT8 codes, any number of them, by a weight whose codes are small integers: the codes are
// multiplied as integers, panel by panel of the weight, and the sums of blocks as floats by their scales.
#include <algorithm>
#include <atomic>

#include "matmul/paths/panels.hpp"
#include "matmul/paths/paths.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t panel_group = 16;  // weight rows that a kernel takes at a time

// Sums of at most 2^31 of a unit by scales of the weight in one range, then by an activation's in the other, stay
// within float32's.
constexpr int weight_scale_range = 60, activation_scale_range = 30;

bool takes(const IntegerPanels& panels, const ScaledMatrix& w) {
    return panels.kernels[static_cast<std::size_t>(w.element)].pack != nullptr;
}

// Tiles of integers where the processor has them, and a scale is common to all that a product in them adds up.
const IntegerPanels* tiles_of(const Product& product, const ScaledMatrix& w, const Int8Activations& a) {
    const BF16Kernels* bf16 = product.table.matmul.bf16;
    const IntegerPanels* tiles = bf16 != nullptr ? bf16->integer_tiles : nullptr;
    if (tiles == nullptr || !takes(*tiles, w)) return nullptr;
    static const bool supported = tiles->supported();  // of the one backend that has them; CPUID takes microseconds
    const std::int64_t of_product = tiles->multiple * 4;
    const bool fits = a.common_block() >= product.k || a.common_block() % of_product == 0;
    return supported && fits ? tiles : nullptr;
}

// The kernels that multiply, or null where there are none.
const IntegerPanels* panels_of(const Product& product, const ScaledMatrix& w, const Int8Activations& a) {
    if (const IntegerPanels* tiles = tiles_of(product, w, a)) return tiles;
    const IntegerKernels* integers = product.table.matmul.integers;
    return integers != nullptr && takes(integers->panels, w) ? &integers->panels : nullptr;
}

// How a product is cut: panels of the weight, steps of a few elements, units of so many steps that share their scales,
// tiles of activations.
struct Cut {
    const IntegerPanels* panels = nullptr;
    const IntegerPanelKernel* kernel = nullptr;
    std::int64_t steps = 0, run = 0, units = 0, unit_elements = 0;
    std::int64_t height = 0, tiles = 0;
    int offset = 0;
    bool starts_are_words = false;
};

// The least work: a tile costs as much as one more activation would.
std::int64_t height_of(const PanelHeights& heights, std::int64_t rows) {
    std::int64_t best = 0, least = 0;
    for (const std::int64_t height : heights) {
        if (height == 0) continue;
        const std::int64_t work = (rows + height - 1) / height * (height + 1);
        if (best == 0 || work < least) best = height, least = work;
    }
    return std::max<std::int64_t>(best, 1);  // a backend of these kernels names at least one height
}

Cut cut_of(const Product& product, const ScaledMatrix& w, const Int8Activations& a) {
    const IntegerPanels& panels = *panels_of(product, w, a);
    const IntegerPanelKernel& kernel = panels.kernels[static_cast<std::size_t>(w.element)];
    const PanelIntegers& integers = w.zero_point.data != nullptr ? kernel.with_zero_points : kernel.plain;
    Cut cut{.panels = &panels,
            .kernel = &kernel,
            .steps = round_up(product.k, row_step(w.packed)) / kernel.elements,
            .run = integers.most_run,
            .offset = integers.offset,
            .starts_are_words = integers.starts_are_words};
    if (a.common_block() < product.k) {
        const std::int64_t of_block = a.common_block() / kernel.elements;
        cut.run = std::min(of_block, integers.most_run / panels.multiple * panels.multiple);
        while (of_block % cut.run != 0) cut.run -= panels.multiple;
    }
    cut.unit_elements = cut.run * kernel.elements;
    cut.units = (cut.steps + cut.run - 1) / cut.run;
    cut.height = height_of(panels.heights, product.total_rows());
    cut.tiles = (product.total_rows() + cut.height - 1) / cut.height;
    return cut;
}

// Of eight bytes the even ones, in the lower half, and the odd ones.
std::uint64_t even_then_odd(std::uint64_t x) {
    const auto gather = [](std::uint64_t bytes) {
        bytes &= 0x00FF'00FF'00FF'00FFU;
        bytes = (bytes | bytes >> 8) & 0x0000'FFFF'0000'FFFFU;
        return (bytes | bytes >> 16) & 0xFFFF'FFFFU;
    };
    return gather(x) | gather(x >> 8) << 32;
}

// Activations as kernels read them, tile by tile: [unit or step][activation], where a step is several abreast.
class PackedActivations {
public:
    PackedActivations(const Product& product, const ScaledMatrix& w, const Int8Activations& a, const Cut& cut)
        : cut_(cut),
          words_(cut.kernel->elements == 2),
          codes_(cut.tiles * tile_words() * 4),
          starts_(cut.tiles * tile_units()),
          row_scales_(static_cast<std::size_t>(cut.tiles * cut.height)) {
        const float unit = cut.kernel->unit;
        if (a.blocks() > 1) unit_scales_ = WorkBuffer<float>(cut.tiles * tile_units());
        parallel_for(product.call, cut.tiles * cut.height, 16, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t padded = cut.steps * cut.kernel->elements;
            std::vector<std::int8_t> codes(static_cast<std::size_t>(padded));
            std::vector<float> scales(static_cast<std::size_t>(a.blocks()));
            for (std::int64_t row = begin; row < end; ++row) {
                const bool there = row < product.total_rows();
                if (there) {
                    a.read_codes(row, codes.data());
                    a.read_scales(row, scales.data());
                } else {  // fills up the last tile
                    std::ranges::fill(codes, std::int8_t{0});
                    std::ranges::fill(scales, 1.0F);
                }
                for (const float scale : scales)
                    if (out_of_range(scale, -activation_scale_range, activation_scale_range) != 0) in_range_ = false;
                put_codes(row, codes, w.packed);
                put_starts(row, codes);
                put_scales(row, scales, a.block(), unit);
            }
        });
    }
    [[nodiscard]] bool in_range() const { return in_range_; }
    [[nodiscard]] const std::int8_t* codes(std::int64_t tile) const { return codes_.data() + tile * tile_words() * 4; }
    [[nodiscard]] const std::int32_t* starts(std::int64_t tile) const { return starts_.data() + tile * tile_units(); }
    [[nodiscard]] const float* unit_scales(std::int64_t tile) const {
        return unit_scales_.data() == nullptr ? nullptr : unit_scales_.data() + tile * tile_units();
    }
    /// What a row's sums take in the end: the unit of the weight's codes, and the row's scale where it has one.
    [[nodiscard]] float row_scale(std::int64_t row) const { return row_scales_[static_cast<std::size_t>(row)]; }

private:
    [[nodiscard]] std::int64_t tile_words() const { return cut_.steps * cut_.height; }
    [[nodiscard]] std::int64_t tile_units() const { return cut_.units * cut_.height; }

    void put_codes(std::int64_t row, const std::vector<std::int8_t>& codes, bool packed) {
        // Runs of steps that are `step` bytes apart, and runs of them `jump`.
        const std::int64_t abreast = cut_.panels->abreast, jump = cut_.height * abreast * 4;
        const std::int64_t run = abreast > 1 ? abreast : cut_.steps, step = abreast > 1 ? 4 : jump;
        std::int8_t* begin = codes_.data() + row / cut_.height * tile_words() * 4 + row % cut_.height * abreast * 4;
        const std::int8_t* in = codes.data();
        for (std::int64_t at = 0; at < cut_.steps; at += run, begin += jump) {
            std::int8_t* out = begin;
            if (words_) {
                for (std::int64_t s = 0; s < run; ++s, in += 2, out += step) {
                    const std::int16_t two[] = {in[0], in[1]};
                    std::memcpy(out, two, sizeof two);
                }
                continue;
            }
            for (std::int64_t s = 0; s < run; s += 2, in += 8, out += 2 * step) {
                std::uint64_t eight;
                std::memcpy(&eight, in, sizeof eight);
                if (packed) eight = even_then_odd(eight);
                const auto first = static_cast<std::uint32_t>(eight), second = static_cast<std::uint32_t>(eight >> 32);
                std::memcpy(out, &first, sizeof first);
                std::memcpy(out + step, &second, sizeof second);
            }
        }
    }
    void put_starts(std::int64_t row, const std::vector<std::int8_t>& codes) {
        std::int32_t* out = starts_.data() + row / cut_.height * tile_units() + row % cut_.height;
        const auto size = static_cast<std::int64_t>(codes.size());
        if (cut_.offset == 0) {
            for (std::int64_t u = 0; u < cut_.units; ++u) out[u * cut_.height] = 0;
            return;
        }
        for (std::int64_t u = 0; u < cut_.units; ++u) {
            std::int32_t first = 0, last = 0;  // four of each eight: the halves of two steps
            const std::int64_t end = std::min(size, (u + 1) * cut_.unit_elements);
            for (std::int64_t k = u * cut_.unit_elements; k < end; k += 8)
                for (std::int64_t i = k; i < k + 4; ++i) {
                    first += codes[static_cast<std::size_t>(i)];
                    last += codes[static_cast<std::size_t>(i + 4)];
                }
            if (cut_.starts_are_words) {
                const std::int16_t words[] = {static_cast<std::int16_t>(-cut_.offset * first),
                                              static_cast<std::int16_t>(-cut_.offset * last)};
                std::memcpy(out + u * cut_.height, words, sizeof words);
            } else {
                out[u * cut_.height] = -cut_.offset * (first + last);
            }
        }
    }
    void put_scales(std::int64_t row, const std::vector<float>& scales, std::int64_t block, float unit) {
        const bool one = unit_scales_.data() == nullptr;
        row_scales_[static_cast<std::size_t>(row)] = one ? unit * scales.front() : unit;
        if (one) return;
        float* out = unit_scales_.data() + row / cut_.height * tile_units() + row % cut_.height;
        for (std::int64_t u = 0; u < cut_.units; ++u) {
            const auto at = std::min(static_cast<std::size_t>(u * cut_.unit_elements / block), scales.size() - 1);
            out[u * cut_.height] = scales[at];
        }
    }

    Cut cut_;
    bool words_;
    WorkBuffer<std::int8_t> codes_;
    WorkBuffer<std::int32_t> starts_;
    WorkBuffer<float> unit_scales_;  // empty where a row has one scale
    std::vector<float> row_scales_;
    std::atomic<bool> in_range_{true};
};

// Sixteen weight rows at a time as integers, and their scales side by side.
struct WeightPanel {
    const Product& product;
    const ScaledMatrix& w;
    const Cut& cut;
    std::int64_t groups;
    std::int64_t group_bytes = cut.steps * 64, blocks = round_up(w.grid.grid_cols(), panel_group);
    WorkBuffer<std::uint8_t> bytes = WorkBuffer<std::uint8_t>(groups * group_bytes);
    WorkBuffer<float> floats = WorkBuffer<float>(groups * blocks * panel_group);
    // Steps past the end meet zeros, which what memory holds may not be multiplied by.
    WorkBuffer<float> lines = WorkBuffer<float>::zeros(panel_group * blocks);

    void read(std::int64_t first, std::int64_t rows) {
        for (std::int64_t at = 0; at < rows; at += panel_group) {
            const std::int64_t n = std::min(panel_group, rows - at), group = at / panel_group;
            cut.kernel->pack({.w = code_rows(0, w, first + at, n, nullptr), .out = bytes.data() + group * group_bytes});
            for (std::int64_t r = 0; r < panel_group; ++r)
                read_scales(product.table, w, (first + at + std::min(r, n - 1)) / w.grid.block_rows, 0,
                            w.grid.grid_cols(), lines.data() + r * blocks);
            float* out = floats.data() + group * blocks * panel_group;
            for (std::int64_t b = 0; b < blocks; b += panel_group)
                product.table.matmul.transpose(lines.data() + b, blocks, out + b * panel_group, panel_group);
        }
    }
    [[nodiscard]] const std::uint8_t* codes(std::int64_t group) const { return bytes.data() + group * group_bytes; }
    [[nodiscard]] const float* scales(std::int64_t group) const { return floats.data() + group * group_scales(); }
    /// From one group to the next.
    [[nodiscard]] std::int64_t group_scales() const { return blocks * panel_group; }
};

// Whether scales of codes are such that they may multiply before an activation's do. E4M3 and float16 always are.
bool scales_are_in_range(const Product& product, const ScaledMatrix& w) {
    if (w.scale_type == ScaleType::e4m3 || w.scale_type == ScaleType::float16) return true;
    if (w.scale_type == ScaleType::e8m0) return powers_of_two_keep_normal(w);
    std::atomic<bool> all{true};
    parallel_for(product.call, w.grid.grid_rows(), 512, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t blocks = w.grid.grid_cols();
        std::vector<float> scales(static_cast<std::size_t>(blocks));
        std::uint32_t out = 0;
        for (std::int64_t row = begin; row < end; ++row) {
            read_scales(product.table, w, row, 0, blocks, scales.data());
            for (const float scale : scales) out |= out_of_range(scale, -weight_scale_range, weight_scale_range);
        }
        if (out != 0) all = false;
    });
    return all;
}

// Whether values less zero points are -15 … 15.
bool differences_are_small(const ScaledMatrix& w) {
    const bool is_signed = info(w.element).lowest < 0;
    return zero_points_within(w, is_signed ? -8 : 0, is_signed ? 7 : 15);
}

std::optional<Kinds> suits_panels_integer(const Product& product, const ScaledMatrix& w) {
    const bool in_place = w.col_stride == 1 && w.packed == is_packed(w.element) && zero_points_are_bytes(w) &&
                          (w.zero_point.data == nullptr || w.grid.grid_cols() == 1 || w.zero_point.col_stride == 1);
    if (!in_place) return {};
    const std::optional<Int8Activations> a = Int8Activations::of(product, w);
    if (!a || panels_of(product, w, *a) == nullptr) return {};
    return tiles_of(product, w, *a) != nullptr ? kinds::codes_in_tiles : kinds::codes;
}

Refusal by_panels_integer(const Product& product, const ScaledMatrix& w, int /*most_terms*/) {
    if (!differences_are_small(w)) return Refusal::zero_points;
    if (!scales_are_in_range(product, w)) return Refusal::scales;
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): suits() had one
    const Int8Activations a = *Int8Activations::of(product, w);
    const Cut cut = cut_of(product, w, a);
    const PackedActivations x(product, w, a, cut);
    if (!x.in_range()) return Refusal::range;

    const std::int64_t most = std::max<std::int64_t>(1, cut.panels->bytes / (cut.steps * 64));
    const std::int64_t all = (product.n + panel_group - 1) / panel_group;
    const std::int64_t groups = std::clamp<std::int64_t>(all / num_threads(), 1, most);
    const std::int64_t per_scale = w.grid.block_cols < product.k ? w.grid.block_cols / cut.unit_elements : cut.units;
    parallel_for(product.call, (all + groups - 1) / groups, 1, [&](std::int64_t begin, std::int64_t end) {
        WeightPanel panel{product, w, cut, groups};
        const std::int64_t stride = groups * panel_group;
        const WorkBuffer<float> sums(cut.height * stride);
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t first = unit * stride, rows = std::min(stride, product.n - first);
            panel.read(first, rows);
            for (std::int64_t tile = 0; tile < cut.tiles; ++tile) {
                const std::int64_t groups_here = (rows + panel_group - 1) / panel_group;
                for (std::int64_t group = 0; group < groups_here; group += cut.panels->groups)
                    cut.kernel->multiply({.codes = panel.codes(group),
                                          .groups = std::min(cut.panels->groups, groups_here - group),
                                          .group_scales = panel.group_scales(),
                                          .steps = cut.steps,
                                          .run = cut.run,
                                          .units_per_scale = per_scale,
                                          .x = x.codes(tile),
                                          .scales = panel.scales(group),
                                          .starts = x.starts(tile),
                                          .x_scales = x.unit_scales(tile),
                                          .height = static_cast<int>(cut.height),
                                          .out = sums.data() + group * panel_group,
                                          .out_stride = stride});
                for (std::int64_t i = 0; i < cut.height; ++i) {
                    const std::int64_t row = tile * cut.height + i;
                    if (row >= product.total_rows()) break;
                    float* line = sums.data() + i * stride;
                    std::int64_t unused = 0;
                    void* in_place = product.in_place(DType::float32, row, 1, first, rows, unused);
                    auto* to = in_place != nullptr ? static_cast<float*>(in_place) : line;
                    for (std::int64_t j = 0; j < rows; ++j) to[j] = w.with_global(line[j] * x.row_scale(row));
                    if (in_place == nullptr) product.write(row, first, rows, line);
                }
            }
        }
    });
    return Refusal::none;
}

}  // namespace

constinit const Path paths::panels_integer = path_of_codes<suits_panels_integer, by_panels_integer>(
    "panels_integer", {Refusal::zero_points, Refusal::scales, Refusal::range});

}  // namespace breccia::inline v0_4
