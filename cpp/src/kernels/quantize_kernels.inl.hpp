// SPDX-License-Identifier: Apache-2.0
//
// What makes codes: statistics of blocks, their scales, encoding. Included inside
// `namespace breccia::inline v0_4::<cpu> { namespace {`, after the backend's vocabulary.
// clang-format off: sorting would break the order
#include "kernels/encode.inl.hpp"
#include "kernels/lane_types.inl.hpp"
#include "kernels/scale_rules.inl.hpp"
#include "kernels/stochastic.inl.hpp"
#include "kernels/quantize.inl.hpp"
#include "kernels/group_scales.inl.hpp"
#include "kernels/quantize_group.inl.hpp"
#include "kernels/expansion.inl.hpp"
// clang-format on

template <class C>
static consteval FormatKernels format_kernels() {
    FormatKernels kernels{.encode_unscaled = encode_unscaled<C>};
    if constexpr (C::is_target) {
        kernels.choose_scale = choose_scale<C>;
        kernels.candidates = candidate_count<C>;
        kernels.encode = encode_run<C>;
        kernels.encode_stochastic = encode_stochastic<C>;
        kernels.squared_error = squared_error<C>;
        kernels.keeps = keeps<C>;
        kernels.quantize_row = quantize_row<C>;
    }
    return kernels;
}

static consteval QuantizeKernels make_quantize_kernels() {
    return {.stats = block_stats,
            .fold_amax = fold_amax,
            .block_amax = block_amax,
            .expand = expand_group,
            .formats = Codecs::map([]<Codec C>() { return format_kernels<C>(); })};
}
