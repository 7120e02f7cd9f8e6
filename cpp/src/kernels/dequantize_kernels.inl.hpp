// SPDX-License-Identifier: Apache-2.0
//
// What makes numbers: decoding, and conversions between float32 and the other types. Included as
// quantize_kernels.inl.hpp is.
// clang-format off: sorting would break the order
#include "kernels/convert.inl.hpp"
#include "kernels/dequantize.inl.hpp"
// clang-format on

static consteval DequantizeKernels make_dequantize_kernels() {
    return {.load = {load_run<float>, load_run<double>, load_run<Float16>, load_run<BFloat16>},
            .store = {store_run<float>, store_run<double>, store_run<Float16>, store_run<BFloat16>},
            .contract = contract_row,
            .rows = Codecs::map([]<Codec C>() {
                return std::array{dequantize_row<C, float>, DequantizeKernel{nullptr}, dequantize_row<C, Float16>,
                                  dequantize_row<C, BFloat16>};
            })};
}
