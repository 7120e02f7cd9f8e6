# SPDX-License-Identifier: Apache-2.0
"""How a tile of the Hopper kernel of dense operands ends: its scales, its bias and its way to memory. p is the
`Product` of hopper_dense_product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def load_ending(p, row0, col0, layout: gl.constexpr):
    """What the sums of a tile are multiplied by and what is added, asked for before the first product: (scales of the
    rows of wave 0, of wave 1, of columns, bias). What runs along columns lies spread over all threads until the end;
    each would have to keep a quarter of it in the layout of the sums."""
    BN: gl.constexpr = layout.instr_shape[1]
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, BN, layout=gl.BlockedLayout([max(1, BN // 128)], [32], [4], [0]))
    first = 1.0
    second = 1.0
    along = 1.0
    bias = 0.0
    if p.EPILOGUE == 1:
        first = gl.load(p.row_scale_ptr) * gl.load(p.col_scale_ptr)
        second = first
    elif p.EPILOGUE == 2:
        row_at = p.row_scale_ptr + rows * p.row_scale_stride  # 0 where one scale is for all
        first = gl.load(row_at, mask=rows < p.R, other=0.0)
        second = first
        if p.WAVES == 2:
            second = gl.load(row_at + 64 * p.row_scale_stride, mask=rows + 64 < p.R, other=0.0)
        along = gl.load(p.col_scale_ptr + cols * p.col_scale_stride, mask=cols < p.C, other=0.0)
    if p.BIAS and not p.SWAP:
        bias = gl.load(p.bias_ptr + cols, mask=cols < p.C, other=0.0).to(gl.float32)
    return first, second, along, bias


@gluon.jit
def store_tile(p, acc, row0, col0, row_end, whole, part, out_buf, row_scale, col_scale, bias):
    """Zero points, scales per tensor (EPILOGUE 1) or per row and column (2), bias along the output's columns, then the
    store, of rows before row_end; of experts by TMA where `whole` says that all are, as rows of others follow."""
    layout: gl.constexpr = acc.type.layout
    rows = row0 + gl.arange(0, acc.type.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout))
    # (r - z) (c - y) adds up to r c - z c - y (r - z): `total` is the sum of c, or of r - z.
    first = part == 0  # of the parts of K, which are added
    if p.ROW_ZERO:
        zero = gl.load(p.row_zero_ptr + rows, mask=(rows < p.R) & first, other=0).to(gl.int32)
        total = gl.load(p.col_total_ptr + cols, mask=cols < p.C, other=0)
        acc -= gl.expand_dims(zero, 1) * gl.expand_dims(total, 0)
    if p.COL_ZERO:
        zero = gl.load(p.col_zero_ptr + cols, mask=(cols < p.C) & first, other=0).to(gl.int32)
        total = gl.load(p.row_total_ptr + rows, mask=rows < p.R, other=0)
        acc -= gl.expand_dims(total, 1) * gl.expand_dims(zero, 0)
    acc = acc.to(gl.float32)
    if p.EPILOGUE == 1:
        acc = acc * row_scale
    elif p.EPILOGUE == 2:
        col_scale = gl.convert_layout(col_scale, gl.SliceLayout(0, layout))
        acc = acc * gl.expand_dims(row_scale, 1) * gl.expand_dims(col_scale, 0)
    if p.BIAS:
        if p.SWAP:
            acc += gl.expand_dims(gl.load(p.bias_ptr + rows, mask=rows < p.R, other=0.0).to(gl.float32), 1)
        else:
            acc += gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(0, layout)), 0)
    if p.TMA_STORE:
        if p.EXPERTS == 0 and not p.OWN_K:
            store_by_tma(p, acc, row0, col0, out_buf)
        elif whole:
            store_by_tma(p, acc, row0 + part * p.R if p.OWN_K else row0, col0, out_buf)
        else:
            store_inside(p, acc, rows, cols, row_end, part)
    else:
        store_inside(p, acc, rows, cols, row_end, part)


@gluon.jit
def store_by_tma(p, acc, row0, col0, out_buf):
    tma.store_wait(p.OUT_BUFS - 1)  # for the last store from this buffer
    out_buf.store(acc.to(p.out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(p.out_desc, [row0, col0], out_buf)


@gluon.jit
def store_inside(p, acc, rows, cols, row_end, part):
    inside = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(cols < p.C, 0)
    if p.SWAP:
        at = gl.expand_dims(cols.to(gl.int64) * p.out_stride, 0) + gl.expand_dims(rows, 1)
    else:
        at = gl.expand_dims(rows.to(gl.int64) * p.out_stride, 1) + gl.expand_dims(cols, 0)
    if p.PARTS > 1:
        at += gl.cast(part, gl.int64) * p.part_stride
    gl.store(p.out_ptr + at, acc.to(p.out_ptr.dtype.element_ty), mask=inside)
