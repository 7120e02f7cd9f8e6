// SPDX-License-Identifier: Apache-2.0
#include "breccia/adamw.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "contract/kernel_table.hpp"
#include "runtime/threads.hpp"
#include "tensor/checks.hpp"
#include "tensor/spelling.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t run_numbers = 4096;  // that are in the first cache as floats together

void check_numbers_in_order(const Array& a, std::string_view name) {
    check_numbers(a, name);
    if (!a.is_contiguous()) throw_value(name, " must be C-contiguous");
}

std::int64_t group_of(const AdamWKernels& kernels, const Recipe& recipe, bool expanded) {
    validate(recipe);
    const std::int64_t group = recipe.layout.block_n;
    const auto& kernels_of = expanded ? kernels.expanded : kernels.stochastic;
    const bool scales = recipe.is_expanded() == expanded && (expanded || recipe.scale == ScaleType::e8m0);
    const bool plain = !recipe.two_level && !recipe.has_zero_point() && recipe.search == ScaleSearch::amax;
    if (!has_blocks_of_rows(recipe.layout) || !scales || !plain || group % 16 != 0 || group > adamw_group ||
        group < 16 || kernels_of[static_cast<std::size_t>(recipe.element)] == nullptr)
        throw_value("recipe must have groups of 16 to 256 along rows ",
                    expanded ? "of E4M3 or INT8 with exponents, for moments that have them"
                             : "of E4M3 with E8M0 scales, for moments without exponents",
                    ", got ", recipe.name);
    return group;
}

void check_part(const Array& a, const std::string& name, ElementType type, std::int64_t count) {
    const bool right_type = type == ElementType::uint8() ? a.type.size() == 1 : a.type == type;
    const bool aligned = reinterpret_cast<std::uintptr_t>(a.data) % type.size() == 0;
    if (!right_type || element_count(a.shape) != count || !a.is_contiguous() || a.read_only || a.data == nullptr ||
        !aligned)
        throw_value(name, " must be C-contiguous memory of the CPU that can be written, ", count, " of ", type.name(),
                    "; got ", a.type.name(), " of shape ", a.shape, aligned ? "" : ", not aligned");
}

// There may be more groups than weights need: rows of several are filled up.
void check_moment(const Moment& m, const std::string& name, const Recipe& recipe, std::int64_t least,
                  std::int64_t group) {
    const std::int64_t groups = std::max(element_count(m.scale.shape), least);
    check_part(m.scale, name + ".scale", element_type(recipe.scale), groups);
    check_part(m.codes, name + ".codes", ElementType::uint8(), groups * group);
    if (m.exponents) check_part(*m.exponents, name + ".exponents", DType::float16, groups);
}

void check_apart(const Array& weights, const Array& gradients, const Moment& first, const Moment& second) {
    std::vector<const Array*> arrays{&weights, &gradients};
    for (const Moment* m : {&first, &second}) {
        arrays.insert(arrays.end(), {&m->codes, &m->scale});
        if (m->exponents) arrays.push_back(&*m->exponents);
    }
    for (std::size_t i = 0; i < arrays.size(); ++i)
        for (std::size_t j = 0; j < i; ++j) check_no_overlap(*arrays[i], *arrays[j]);
}

AdamWFactors factors_of(const AdamWOptions& o) {
    const auto steps = static_cast<double>(o.step);
    const double correction = 1 / std::sqrt(1 - std::pow(o.beta2, steps)), ratio = o.beta1 * o.beta1 / o.beta2;
    const double squares = (1 - o.beta1) * (1 - o.beta1) / (1 - o.beta2) * (1 - std::pow(ratio, steps)) / (1 - ratio);
    return {.beta1 = static_cast<float>(o.beta1),
            .beta2 = static_cast<float>(o.beta2),
            .rest1 = static_cast<float>(1 - o.beta1),
            .rest2 = static_cast<float>(1 - o.beta2),
            .keep = static_cast<float>(1 - o.lr * o.weight_decay),
            .rate = static_cast<float>(o.lr / (1 - std::pow(o.beta1, steps))),
            .correction = static_cast<float>(correction),
            .eps = static_cast<float>(o.eps),
            .limit = static_cast<float>(ratio < 1 ? std::sqrt(squares) / correction : HUGE_VAL)};
}

// One moment from group `index` on.
MomentGroups groups_from(const Moment& m, std::int64_t index, std::int64_t group, std::uint64_t seed) {
    const auto scale_bytes = static_cast<std::int64_t>(m.scale.type.size());
    return {.codes = reinterpret_cast<std::uint8_t*>(m.codes.as<std::byte>()) + index * group,
            .scales = reinterpret_cast<std::uint8_t*>(m.scale.as<std::byte>()) + index * scale_bytes,
            .exponents = m.exponents ? m.exponents->as<std::uint16_t>() + index : nullptr,
            .key = RandomKey(seed, RandomStream::rounding)};
}

// Numbers [begin, begin + count) as floats; zeros after them.
const float* floats(const KernelTable& kernels, const Array& a, std::int64_t begin, std::int64_t count,
                    std::int64_t room, float* buffer) {
    const auto* bytes = a.as<const std::byte>() + begin * static_cast<std::int64_t>(a.type.size());
    kernels.dequantize.load[static_cast<std::size_t>(a.type.dtype())](bytes, count, buffer);
    std::fill(buffer + count, buffer + room, 0.0F);
    return buffer;
}

}  // namespace

void adamw_step(const Array& weights, const Array& gradients, const Moment& first, const Moment& second,
                const Recipe& recipe, const AdamWOptions& options) {
    const Call call;
    const KernelTable& kernels = call.kernels;
    check_numbers_in_order(weights, "weights");
    check_numbers_in_order(gradients, "gradients");
    if (weights.read_only) throw_value("weights must be memory that can be written");
    if (weights.shape != gradients.shape)
        throw_value("gradients must be of the weights' shape ", weights.shape, ", got ", gradients.shape);
    if (options.step < 1) throw_value("step must be at least 1, got ", options.step);
    const bool expanded = first.exponents.has_value();
    if (expanded != second.exponents.has_value()) throw_value("both moments must have exponents, or neither");
    const std::int64_t group = group_of(kernels.adamw, recipe, expanded), count = element_count(weights.shape);
    const std::int64_t groups = (count + group - 1) / group;
    check_moment(first, "first", recipe, groups, group);
    check_moment(second, "second", recipe, groups, group);
    check_apart(weights, gradients, first, second);

    const AdamWFactors factors = factors_of(options);
    const ScaleParams params{.rule = recipe.rule, .type = recipe.scale};
    const auto& all = expanded ? kernels.adamw.expanded : kernels.adamw.stochastic;
    const AdamWKernel kernel = all[static_cast<std::size_t>(recipe.element)];
    const auto seed = 2 * static_cast<std::uint64_t>(options.step);
    const std::int64_t run = run_numbers / group;
    const bool in_place = weights.type == DType::float32, in_place_gradients = gradients.type == DType::float32;
    parallel_for(call, (groups + run - 1) / run, 1, [&](std::int64_t from, std::int64_t to) {
        const WorkBuffer<float> buffer(2 * run_numbers);
        for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t index = i * run, some = std::min(run, groups - index), begin = index * group;
            const std::int64_t numbers = std::min(some * group, count - begin);
            const bool whole = numbers == some * group;
            AdamWGroups work{.groups = some,
                             .group = group,
                             .first = groups_from(first, index, group, seed),
                             .second = groups_from(second, index, group, seed + 1),
                             .position = static_cast<std::uint32_t>(begin)};
            work.gradients = whole && in_place_gradients ? gradients.as<const float>() + begin
                                                         : floats(kernels, gradients, begin, numbers, some * group,
                                                                  buffer.data() + run_numbers);
            if (whole && in_place) {
                work.weights = weights.as<float>() + begin;
                kernel(work, factors, params);
                continue;
            }
            floats(kernels, weights, begin, numbers, some * group, buffer.data());
            work.weights = buffer.data();
            kernel(work, factors, params);
            auto* bytes = weights.as<std::byte>() + begin * static_cast<std::int64_t>(weights.type.size());
            kernels.dequantize.store[static_cast<std::size_t>(weights.type.dtype())](buffer.data(), numbers, bytes);
        }
    });
}

}  // namespace breccia::inline v0_4
