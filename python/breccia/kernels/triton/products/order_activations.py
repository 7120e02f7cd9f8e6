# SPDX-License-Identifier: Apache-2.0
"""Activations in the order of K in which packed weights decode (`decode.py`), ahead of `hopper_weights`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.conversions.dequant import load_values
from breccia.kernels.triton.products.gemm import find_tile


@triton.jit
def order_kernel(
    x_ptr, scale_ptr, zero_ptr, level_ptr, out_ptr, table_ptr, offset_ptr, w_level_ptr, product_ptr, M, K, x_stride,
    s_row, s_col, row_tiles, FORM: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row a program: the activations in the order in which the weights decode (4 bits: element 32t + 8q + 4i + 2a +
    h of a slice goes to 32q + 16a + 8h + 2t + i; 8 bits: 64u + 16t + 4q + 2h + i to 64u + 16q + 8h + 2t + i). With
    experts also the table of row tiles: expert, first row, end row. FORM: of activations that are quantized, None where
    they are floats; with LEVELS their global scale, of two times that of the weights, goes to `product_ptr`.

    The product may start once every program here has waited for what came before: it reads weights meanwhile."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK
    at = k + tl.arange(0, BK)
    if FORM is None:
        x = tl.load(x_ptr + row * x_stride + at, mask=at < K, other=0)
    else:
        x = load_values(
            x_ptr, scale_ptr, zero_ptr, level_ptr, tl.program_id(0), k, M, K, x_stride, s_row, s_col, FORM, 1, BK
        )
        x = tl.reshape(x.to(out_ptr.dtype.element_ty), [BK])
        if LEVELS > 0:
            level = tl.load(level_ptr)
            if LEVELS == 2:
                level *= tl.load(w_level_ptr)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(product_ptr, level)
    if BITS == 4:
        x = tl.permute(tl.reshape(x, [BK // 128, 4, 4, 2, 2, 2]), (0, 2, 4, 5, 1, 3))
    else:
        x = tl.permute(tl.reshape(x, [BK // 64, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    tl.store(out_ptr + row * K + at, tl.reshape(x, [BK]), mask=at < K)
    if E > 0:
        tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
        while tile < row_tiles:
            expert, first, end = find_tile(tile, offset_ptr, E, EP, BN)
            tl.store(table_ptr + tile * 3, expert)
            tl.store(table_ptr + tile * 3 + 1, first)
            tl.store(table_ptr + tile * 3 + 2, end)
            tile += tl.num_programs(0) * tl.num_programs(1)
