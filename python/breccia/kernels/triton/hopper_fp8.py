# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Persistent FP8 matmul for Hopper (sm_90), written in Gluon: one warp copies tiles with TMA, one or two warpgroups
multiply.

It computes rows · cols^T, both operands K-major. "Rows" is the operand that feeds the 64-row side of the matrix
instruction: the activations of a large product, the weights of a small one (then the result is stored transposed).

Hopper's FP8 tensor cores accumulate in about 14 bits. Except in FAST mode each 128-wide slice of K is therefore
multiplied into a fresh accumulator and added (block-scaled: with its scales) to a float32 sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Argument lists stay dense.
# fmt: off

BLOCK_K = gl.constexpr(128)
NONE, SCALAR, VECTOR = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def tile_position(tile, row_tiles, col_tiles, GROUP: gl.constexpr):
    """Tiles in bands of GROUP row tiles, so that concurrent tiles share operands in the L2 cache."""
    band = tile // (GROUP * col_tiles)
    first = band * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    inside = tile - band * (GROUP * col_tiles)
    return first + inside % height, inside // height


@gluon.jit
def previous(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def fma(a, b, c):
    """c + a * b. Volatile, so that the compiler keeps one raw accumulator alive at a time instead of spilling."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def producer(
    row_desc, col_desc, row_scale_desc, col_scale_desc, row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, ready,
    free, row_tiles, col_tiles, k_tiles, ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    BM: gl.constexpr = row_desc.block_type.shape[0]
    BN: gl.constexpr = col_desc.block_type.shape[0]
    BYTES: gl.constexpr = (
        (BM + BN) * BLOCK_K + (4 * BM if ROW_SCALE == 2 else 0) + (4 * col_scale_bufs.shape[2] if COL_SCALE == 2 else 0)
    )
    gdc_wait()
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        m, n = tile_position(tile, row_tiles, col_tiles, GROUP)
        for k in range(k_tiles):
            mbarrier.wait(free.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(row_desc, [m * BM, k * BLOCK_K], bar, row_bufs.index(stage))
            tma.async_copy_global_to_shared(col_desc, [n * BN, k * BLOCK_K], bar, col_bufs.index(stage))
            if ROW_SCALE == 2:
                tma.async_copy_global_to_shared(row_scale_desc, [k, m * BM], bar, row_scale_bufs.index(stage))
            if COL_SCALE == 2:
                tma.async_copy_global_to_shared(col_scale_desc, [k, n * BN], bar, col_scale_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def load_scale(bufs, stage, START: gl.constexpr, LENGTH: gl.constexpr, layout: gl.constexpr):
    """LENGTH float32 scales of a stage's [1, N] buffer."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    N: gl.constexpr = bufs.shape[2]
    return bufs.index(stage)._reinterpret(gl.float32, [N], flat).slice(START, LENGTH).load(layout)


@gluon.jit
def add_slice(acc, raw, row_scale, col_scale, ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr, layout: gl.constexpr):
    """acc + raw * scales."""
    if ROW_SCALE == 2 and COL_SCALE == 2:
        return fma(raw * gl.expand_dims(col_scale, 0), gl.expand_dims(row_scale, 1), acc)
    elif ROW_SCALE == 2:
        return fma(raw, gl.expand_dims(row_scale * col_scale, 1), acc)
    elif COL_SCALE == 2:
        return fma(raw, gl.expand_dims(col_scale * row_scale, 0), acc)
    else:
        return fma(raw, gl.full(acc.type.shape, 1.0, gl.float32, layout), acc)


@gluon.jit
def load_vectors(
    row0, col0, row_scale_ptr, col_scale_ptr, R, C, EPILOGUE: gl.constexpr, WAVES: gl.constexpr, layout: gl.constexpr
):
    """The epilogue's scales, asked for before the last products are waited for: (rows of wave 0, of wave 1,
    columns)."""
    if EPILOGUE == 2:
        BN: gl.constexpr = layout.instr_shape[1]
        rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        cols = col0 + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        first = gl.load(row_scale_ptr + rows, mask=rows < R, other=0.0)
        second = gl.load(row_scale_ptr + rows + 64, mask=rows + 64 < R, other=0.0) if WAVES == 2 else first
        return first, second, gl.load(col_scale_ptr + cols, mask=cols < C, other=0.0)
    else:
        scale = gl.load(row_scale_ptr) * gl.load(col_scale_ptr) if EPILOGUE == 1 else 1.0
        return scale, scale, scale


@gluon.jit
def store_tile(
    acc, row0, col0, out_desc, out_buf, out_ptr, row_scale, col_scale, bias_ptr, R, C, out_stride,
    EPILOGUE: gl.constexpr, BIAS: gl.constexpr, SWAP: gl.constexpr, TMA_STORE: gl.constexpr, layout: gl.constexpr,
):
    """Scales per tensor (EPILOGUE 1) or per row and column (2), bias along the output's columns, then the store."""
    rows = row0 + gl.arange(0, acc.type.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout))
    if EPILOGUE == 1:
        acc = acc * row_scale
    elif EPILOGUE == 2:
        acc = acc * gl.expand_dims(row_scale, 1) * gl.expand_dims(col_scale, 0)
    if BIAS:
        if SWAP:
            acc += gl.expand_dims(gl.load(bias_ptr + rows, mask=rows < R, other=0.0).to(gl.float32), 1)
        else:
            acc += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(gl.float32), 0)
    if TMA_STORE:
        tma.store_wait(0)
        out_buf.store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row0, col0], out_buf)
    else:
        inside = gl.expand_dims(rows < R, 1) & gl.expand_dims(cols < C, 0)
        if SWAP:
            at = gl.expand_dims(cols.to(gl.int64) * out_stride, 0) + gl.expand_dims(rows, 1)
        else:
            at = gl.expand_dims(rows.to(gl.int64) * out_stride, 1) + gl.expand_dims(cols, 0)
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def consumer(
    WHICH: gl.constexpr, row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc,
    out_ptr, row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride, row_tiles,
    col_tiles, k_tiles, ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr, FAST: gl.constexpr, EPILOGUE: gl.constexpr,
    BIAS: gl.constexpr, SWAP: gl.constexpr, TMA_STORE: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    BM: gl.constexpr = row_bufs.shape[1]
    BN: gl.constexpr = col_bufs.shape[1]
    BASE: gl.constexpr = WHICH * WAVES * 64
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    gdc_wait()  # for scales and bias, and for whoever still reads what `out` was before
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        m, n = tile_position(tile, row_tiles, col_tiles, GROUP)
        zero = gl.zeros([64, BN], gl.float32, layout)
        acc0 = zero
        acc1 = zero
        # A scale that is one number for the tile is fetched one slice ahead of its use.
        row_scale_at = row_scale_ptr + (m * BM // 128) * row_scale_stride
        col_scale_at = col_scale_ptr + (n * BN // 128) * col_scale_stride
        row_next = gl.load(row_scale_at) if ROW_SCALE == 1 else 1.0
        col_next = gl.load(col_scale_at) if COL_SCALE == 1 else 1.0
        for k in range(k_tiles):
            row_scale = row_next
            col_scale = col_next
            ahead = gl.minimum(k + 1, k_tiles - 1)
            if ROW_SCALE == 1:
                row_next = gl.load(row_scale_at + ahead)
            if COL_SCALE == 1:
                col_next = gl.load(col_scale_at + ahead)
            mbarrier.wait(ready.index(stage), phase)
            rows = row_bufs.index(stage)
            cols = col_bufs.index(stage).permute((1, 0))
            if FAST:
                acc0 = warpgroup_mma(rows.slice(BASE, 64), cols, acc0, is_async=True)
                if WAVES == 2:
                    acc1 = warpgroup_mma(rows.slice(BASE + 64, 64), cols, acc1, is_async=True)
                    acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
                else:
                    acc0 = warpgroup_mma_wait(1, deps=[acc0])
                mbarrier.arrive(free.index(previous(stage, STAGES)), pred=k > 0)  # the slice before is done with
            else:
                if COL_SCALE == 2:
                    col_scale = load_scale(col_scale_bufs, stage, 0, BN, col_layout)
                raw = warpgroup_mma(rows.slice(BASE, 64), cols, zero, use_acc=False, is_async=True)
                if ROW_SCALE == 2:
                    row_scale = load_scale(row_scale_bufs, stage, BASE, 64, row_layout)
                raw = warpgroup_mma_wait(0, deps=[raw])
                acc0 = add_slice(acc0, raw, row_scale, col_scale, ROW_SCALE, COL_SCALE, layout)
                if WAVES == 2:
                    mbarrier.wait(ready.index(stage), phase)  # passes at once; keeps the two waves apart
                    raw = warpgroup_mma(rows.slice(BASE + 64, 64), cols, zero, use_acc=False, is_async=True)
                    if ROW_SCALE == 2:
                        row_scale = load_scale(row_scale_bufs, stage, BASE + 64, 64, row_layout)
                    raw = warpgroup_mma_wait(0, deps=[raw])
                    mbarrier.arrive(free.index(stage))
                    acc1 = add_slice(acc1, raw, row_scale, col_scale, ROW_SCALE, COL_SCALE, layout)
                else:
                    mbarrier.arrive(free.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        scales = load_vectors(m * BM + BASE, n * BN, row_scale_ptr, col_scale_ptr, R, C, EPILOGUE, WAVES, layout)
        if FAST:
            if WAVES == 2:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(free.index(previous(stage, STAGES)))
        out_buf = out_bufs.index(WHICH)
        store_tile(
            acc0, m * BM + BASE, n * BN, out_desc, out_buf, out_ptr, scales[0], scales[2], bias_ptr, R, C,
            out_stride, EPILOGUE, BIAS, SWAP, TMA_STORE, layout,
        )
        if WAVES == 2:
            store_tile(
                acc1, m * BM + BASE + 64, n * BN, out_desc, out_buf, out_ptr, scales[1], scales[2], bias_ptr, R, C,
                out_stride, EPILOGUE, BIAS, SWAP, TMA_STORE, layout,
            )
    if TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def fp8_kernel(
    row_desc, col_desc, row_scale_desc, col_scale_desc, out_desc, out_ptr, row_scale_ptr, col_scale_ptr, bias_ptr, R,
    C, out_stride, row_scale_stride, col_scale_stride, row_tiles, col_tiles, k_tiles, ROW_SCALE: gl.constexpr,
    COL_SCALE: gl.constexpr, FAST: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, SWAP: gl.constexpr,
    TMA_STORE: gl.constexpr, CONSUMERS: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):
    gdc_launch_dependents()
    BM: gl.constexpr = row_desc.block_type.shape[0]
    BN: gl.constexpr = col_desc.block_type.shape[0]
    gl.static_assert(BM == CONSUMERS * WAVES * 64)
    row_bufs = gl.allocate_shared_memory(row_desc.dtype, [STAGES, BM, BLOCK_K], row_desc.layout)
    col_bufs = gl.allocate_shared_memory(col_desc.dtype, [STAGES, BN, BLOCK_K], col_desc.layout)
    row_scale_bufs = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, row_scale_desc.block_type.shape[1] if ROW_SCALE == 2 else 32], row_scale_desc.layout
    )
    col_scale_bufs = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, col_scale_desc.block_type.shape[1] if COL_SCALE == 2 else 32], col_scale_desc.layout
    )
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64 if TMA_STORE else 8, BN], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    # The argument tuples stand in the call: a named tuple would turn its constexprs into run-time values.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    first_consumer,
                    (
                        row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr,
                        row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride,
                        row_tiles, col_tiles, k_tiles, ROW_SCALE, COL_SCALE, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE,
                        WAVES, STAGES, GROUP,
                    ),
                ),
                (
                    second_consumer,
                    (
                        row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr,
                        row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride,
                        row_tiles, col_tiles, k_tiles, ROW_SCALE, COL_SCALE, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE,
                        WAVES, STAGES, GROUP,
                    ),
                ),
                (
                    producer,
                    (
                        row_desc, col_desc, row_scale_desc, col_scale_desc, row_bufs, col_bufs, row_scale_bufs,
                        col_scale_bufs, ready, free, row_tiles, col_tiles, k_tiles, ROW_SCALE, COL_SCALE, STAGES,
                        GROUP,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    first_consumer,
                    (
                        row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr,
                        row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride,
                        row_tiles, col_tiles, k_tiles, ROW_SCALE, COL_SCALE, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE,
                        WAVES, STAGES, GROUP,
                    ),
                ),
                (
                    producer,
                    (
                        row_desc, col_desc, row_scale_desc, col_scale_desc, row_bufs, col_bufs, row_scale_bufs,
                        col_scale_bufs, ready, free, row_tiles, col_tiles, k_tiles, ROW_SCALE, COL_SCALE, STAGES,
                        GROUP,
                    ),
                ),
            ],
            [1],
            [24],
        )


@gluon.jit
def first_consumer(
    row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr, row_scale_ptr,
    col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride, row_tiles, col_tiles, k_tiles,
    ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr, FAST: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    SWAP: gl.constexpr, TMA_STORE: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):
    consumer(
        0, row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr,
        row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride, row_tiles,
        col_tiles, k_tiles, ROW_SCALE, COL_SCALE, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE, WAVES, STAGES, GROUP,
    )


@gluon.jit
def second_consumer(
    row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr, row_scale_ptr,
    col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride, row_tiles, col_tiles, k_tiles,
    ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr, FAST: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    SWAP: gl.constexpr, TMA_STORE: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):
    consumer(
        1, row_bufs, col_bufs, row_scale_bufs, col_scale_bufs, out_bufs, ready, free, out_desc, out_ptr,
        row_scale_ptr, col_scale_ptr, bias_ptr, R, C, out_stride, row_scale_stride, col_scale_stride, row_tiles,
        col_tiles, k_tiles, ROW_SCALE, COL_SCALE, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE, WAVES, STAGES, GROUP,
    )
