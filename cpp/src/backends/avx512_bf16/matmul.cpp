// SPDX-License-Identifier: Apache-2.0
#include "target.hpp"

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::avx512_bf16 {
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "kernels/gemm.inl.hpp"
#include "backends/avx512_bf16/transpose.inl.hpp"
#include "backends/avx512_bf16/decode.inl.hpp"
#include "backends/avx512_bf16/gemm.inl.hpp"
#include "backends/avx512_bf16/row_scales.inl.hpp"
#include "backends/avx512_bf16/gemv.inl.hpp"
#include "backends/avx512_bf16/lanes.inl.hpp"
#include "backends/avx512_bf16/code_bytes.inl.hpp"
#include "backends/avx512_bf16/integer_gemv.inl.hpp"
#include "backends/avx512_bf16/digits.inl.hpp"
#include "backends/avx512_bf16/integer_lanes.inl.hpp"
#include "kernels/digits_of_codes.inl.hpp"
#include "backends/avx512/integer_panels.inl.hpp"
#include "kernels/integer_packing.inl.hpp"
#include "kernels/integer_panels.inl.hpp"
// clang-format on

static consteval BF16Kernels make_bf16_kernels(const ProductKernels& product) {
    BF16Kernels kernels{product};
    kernels.pack = pack_bf16;
    kernels.pack_words = pack_words;
    kernels.pack_lanes = pack_lanes;
    kernels.transpose = transpose_32x16;
    set_each(kernels.decode, []<BF16Codec C>() { return decode_bf16<C>; });
    set_each(kernels.gemv, []<BF16Codec C>() { return gemv_bf16<C>; });
    set_each(kernels.lanes, []<BF16Codec C>() { return lane_product<C>; });
    return kernels;
}

static consteval IntegerKernels make_integer_kernels() {
    IntegerKernels kernels;
    set_each(kernels.pack_digits, []<ByteCodec C>() { return pack_digits_of<C>; });
    set_each(kernels.gemv, []<ByteCodec C>() { return integer_gemv<C>; });
    set_each(kernels.lanes, []<ByteCodec C>() { return integer_lanes<C>; });
    set_each(kernels.digits_of_codes, []<ByteCodec C>() {
        return [](const DigitsOfCodes& p) {
            constexpr const CodeBytes& of = code_bytes<C>;
            return digits_of_codes<is_packed(byte_reading<C>)>(p, of.unit, of.offset, lifted_bias);
        };
    });
    add_integer_panels(kernels);
    return kernels;
}

// Two products of pairs take the time of one float32 product.
constexpr BF16Kernels bf16 = make_bf16_kernels({.gemm = gemm_bf16,
                                                .tile_rows = 24,
                                                .panel = {.rows = 192, .activations = 512, .k = panel_k},
                                                .panel_of_terms = {.rows = 384, .activations = 256, .k = panel_k}});
constexpr IntegerKernels integers = make_integer_kernels();
}  // namespace

extern constinit const MatmulKernels matmul_kernels;
constinit const MatmulKernels matmul_kernels = make_matmul_kernels({.bf16 = &bf16, .integers = &integers});

}  // namespace breccia::inline v0_4::avx512_bf16
BRECCIA_CPU_END
