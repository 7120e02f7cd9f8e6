// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "breccia/ops.hpp"
#include "quantize/quantizer.hpp"
#include "quantize/stored_blocks.hpp"
#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {
namespace {

bool changes_nothing(const ScaledTensor& scaled, const Recipe& recipe) {
    return recipe == scaled.recipe() && recipe.name == scaled.recipe().name && recipe.layout == scaled.layout();
}

// Whether the parts are what the plan asks for: then they are copied.
bool copied(const ScaledTensor& scaled, const CastOutput& out) {
    // A tensor may have a part that its recipe does not ask for.
    if (scaled.zero_point().has_value() != out.zero_point.has_value() ||
        scaled.global_scale().has_value() != out.global_scale.has_value())
        return false;
    const auto alike = [](const Array* a, const Array* b) { return a->type == b->type && a->shape == b->shape; };
    const Parts parts(scaled), to(out);
    if (!std::ranges::equal(parts, to, alike)) return false;
    const Array* const* target = to.begin();
    for (const Array* part : parts) copy_elements(*part, (*target++)->as<std::byte>());
    return true;
}

}  // namespace

void requantize_into(const ScaledTensor& scaled, const Recipe& recipe, const CastOutput& out) {
    const Call call;
    check_memory(scaled, "scaled");
    check_output(out, plan_cast(scaled.shape(), recipe), recipe);
    check_no_overlap(out, scaled);
    if (changes_nothing(scaled, recipe) && copied(scaled, out)) return;
    quantize(StoredBlocks(call, scaled, recipe), scaled.shape(), recipe, out);
}

ScaledTensor requantize(const ScaledTensor& scaled, const Recipe& recipe) {
    if (changes_nothing(scaled, recipe)) return scaled;
    CastOutput out = allocate(plan_cast(scaled.shape(), recipe));
    requantize_into(scaled, recipe, out);
    return assemble(std::move(out), recipe, scaled.shape(), scaled.original_dtype());
}

}  // namespace breccia::inline v0_4
