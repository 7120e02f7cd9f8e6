// SPDX-License-Identifier: Apache-2.0
//
// The shared kernels as a table. A backend with overrides copies it and replaces entries.

static consteval KernelTable make_table(std::string_view name, const BF16Kernels* bf16 = nullptr) {
    return {
        .name = name,
        .stats = block_stats,
        .fold_amax = fold_amax,
        .block_amax = block_amax,
        .load = {load_run<float>, load_run<double>, load_run<Float16>, load_run<BFloat16>},
        .store = {store_run<float>, store_run<double>, store_run<Float16>, store_run<BFloat16>},
        .formats = Codecs::map([]<Codec C>() {
            return FormatKernels{.choose_scale = choose_scale<C>,
                                 .candidates = candidate_count<C>,
                                 .encode = encode_run<C>,
                                 .encode_stochastic = stochastic_encoder<C>(),
                                 .squared_error = squared_error<C>,
                                 .keeps = keeps<C>,
                                 .quantize_row = quantize_row<C>,
                                 .dequantize_row = {dequantize_row<C, float>, nullptr, dequantize_row<C, Float16>,
                                                    dequantize_row<C, BFloat16>}};
        }),
        .matmul = {.pack = pack_f32, .gemm = gemm_f32, .transpose = transpose_16x16, .dot = dot, .bf16 = bf16},
    };
}
