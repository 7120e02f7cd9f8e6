# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Persistent matmul of FP8, INT8 or bf16 for Hopper (sm_90), written in Gluon: one warp copies tiles with TMA, one or
two warpgroups multiply. A slice of K is 128 bytes of a row.

It computes rows · cols^T, both operands K-major. "Rows" is the operand that feeds the 64-row side of the matrix
instruction: the activations of a large product, the weights of a small one (then the result is stored transposed).

Hopper's FP8 tensor cores accumulate in about 14 bits. Except in FAST mode each slice of K is therefore multiplied into
a fresh accumulator and added (block-scaled: with its scales) to a float32 sum. INT8 adds up in int32, bf16 in float32:
without scales along K they are always FAST, and lose nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.products.hopper_dense_ending import load_ending, store_tile
from breccia.kernels.triton.products.hopper_dense_product import Product, count_tiles, wait_for_kernel_before

SCALED_K = gl.constexpr(128)  # elements of K to a scale


@gluon.constexpr_function
def products_layout(dtype, columns):
    """That of the sums of `columns` columns, whose operands are of that type."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // dtype.primitive_bitwidth]
    )


@gluon.constexpr_function
def sums_type(dtype):
    return gl.int32 if dtype == gl.int8 else gl.float32


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
def producer(p):
    BM: gl.constexpr = p.row_desc.block_type.shape[0]
    BN: gl.constexpr = p.col_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = p.row_desc.block_type.shape[1]
    SCALES: gl.constexpr = (BM if p.ROW_SCALE == 2 else 0) + (p.col_scale_bufs.shape[2] if p.COL_SCALE == 2 else 0)
    stage = 0
    phase = 1
    expert, before, first, last = p.first_expert()
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        expert, before, first, last = p.next_expert(tile, expert, before, first, last)
        m, n, part = p.place(tile, before, last - first)
        m, n = wait_for_kernel_before(m, n)
        row, col = p.corner(m, n, first)
        col += expert * p.C if p.EXPERTS > 0 else 0  # in the weights of all
        begin, end = p.slices(part, expert)
        for k in range(begin, end):
            mbarrier.wait(p.free.index(stage), phase)
            bar = p.ready.index(stage)
            block = k // (SCALED_K // BLOCK_K)
            mbarrier.expect(bar, (BM + BN) * 128 + 4 * SCALES)
            tma.async_copy_global_to_shared(p.row_desc, [row, k * BLOCK_K], bar, p.row_bufs.index(stage))
            tma.async_copy_global_to_shared(p.col_desc, [col, k * BLOCK_K], bar, p.col_bufs.index(stage))
            if p.ROW_SCALE == 2:
                tma.async_copy_global_to_shared(p.row_scale_desc, [block, row], bar, p.row_scale_bufs.index(stage))
            if p.COL_SCALE == 2:
                tma.async_copy_global_to_shared(p.col_scale_desc, [block, col], bar, p.col_scale_bufs.index(stage))
            stage += 1
            if stage == p.STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def load_scale(bufs, stage, START: gl.constexpr, LENGTH: gl.constexpr, layout: gl.constexpr):
    """LENGTH float32 scales of a stage's [1, N] buffer."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    N: gl.constexpr = bufs.shape[2]
    return bufs.index(stage)._reinterpret(gl.float32, [N], flat).slice(START, LENGTH).load(layout)


@gluon.jit
def add_slice(p, acc, raw, row_scale, col_scale):
    """acc + raw * scales."""
    raw = raw.to(gl.float32)
    if p.ROW_SCALE >= 2 and p.COL_SCALE == 2:
        return fma(raw * gl.expand_dims(col_scale, 0), gl.expand_dims(row_scale, 1), acc)
    elif p.ROW_SCALE >= 2:
        return fma(raw, gl.expand_dims(row_scale * col_scale, 1), acc)
    elif p.COL_SCALE == 2:
        return fma(raw, gl.expand_dims(col_scale * row_scale, 0), acc)
    elif p.ROW_SCALE == 1 or p.COL_SCALE == 1:
        return fma(raw, gl.full(acc.type.shape, 1.0, gl.float32, acc.type.layout) * (row_scale * col_scale), acc)
    else:
        return fma(raw, gl.full(acc.type.shape, 1.0, gl.float32, acc.type.layout), acc)


@gluon.jit
def multiply_slice(p, stage, BASE: gl.constexpr, zero):
    """Asks for the product of a slice whose operands are there, which the tensor cores then compute."""
    rows = p.row_bufs.index(stage)
    cols = p.col_bufs.index(stage).permute((1, 0))
    return warpgroup_mma(rows.slice(BASE, 64), cols, zero, use_acc=False, is_async=True)


@gluon.jit
def slice_scales(p, stage, row_scale, col_scale, BASE: gl.constexpr, layout: gl.constexpr):
    """The scales of a slice: those given, or where each row or column has its own those in the stage's buffers."""
    if p.ROW_SCALE == 2:
        row_scale = load_scale(p.row_scale_bufs, stage, BASE, 64, gl.SliceLayout(1, layout))
    if p.COL_SCALE == 2:
        col_scale = load_scale(p.col_scale_bufs, stage, 0, p.col_bufs.shape[1], gl.SliceLayout(0, layout))
    return row_scale, col_scale


@gluon.jit
def fetch(at, block, stride, KIND: gl.constexpr):
    """The scales of a block of K that come from global memory, those of kinds 1 and 3."""
    if KIND == 1:
        return gl.load(at + block)
    elif KIND == 3:
        return gl.load(at + block * stride)
    else:
        return 1.0


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The stage after this one and its phase."""
    wraps = (stage + 1 == STAGES).to(gl.int32)
    return stage + 1 - wraps * STAGES, phase ^ wraps


@gluon.jit
def add_pairs(
    p, acc, zero, stage, phase, begin, end, row_scale_at, col_scale_at, BASE: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Sums slices begin, begin + 1, ... while two are left: one is multiplied while the other is added. `acc` and
    `zero` are zero. Returns (sum, stage, phase, first slice not added)."""
    last = end - 1 if p.EXPERTS == 0 and not p.OWN_K else gl.maximum(end - 1, 0)  # there may be none
    PER: gl.constexpr = SCALED_K // p.row_bufs.shape[2]
    RS: gl.constexpr = p.ROW_SCALE
    CS: gl.constexpr = p.COL_SCALE
    row0 = fetch(row_scale_at, begin // PER, p.row_scale_stride, RS)
    row1 = fetch(row_scale_at, gl.minimum(begin + 1, last) // PER, p.row_scale_stride, RS)
    col0 = fetch(col_scale_at, begin // PER, 0, CS)
    col1 = fetch(col_scale_at, gl.minimum(begin + 1, last) // PER, 0, CS)
    for k in range(begin, last, 2):
        row_now0, row_now1, col_now0, col_now1 = row0, row1, col0, col1
        # Fetched a pair ahead of their use.
        row0 = fetch(row_scale_at, gl.minimum(k + 2, last) // PER, p.row_scale_stride, RS)
        row1 = fetch(row_scale_at, gl.minimum(k + 3, last) // PER, p.row_scale_stride, RS)
        col0 = fetch(col_scale_at, gl.minimum(k + 2, last) // PER, 0, CS)
        col1 = fetch(col_scale_at, gl.minimum(k + 3, last) // PER, 0, CS)
        stage1, phase1 = after(stage, phase, p.STAGES)
        mbarrier.wait(p.ready.index(stage), phase)
        raw0 = multiply_slice(p, stage, BASE, zero)
        mbarrier.wait(p.ready.index(stage1), phase1)
        raw1 = multiply_slice(p, stage1, BASE, zero)
        row_now0, col_now0 = slice_scales(p, stage, row_now0, col_now0, BASE, layout)
        row_now1, col_now1 = slice_scales(p, stage1, row_now1, col_now1, BASE, layout)
        raw0, raw1 = warpgroup_mma_wait(1, deps=[raw0, raw1])
        mbarrier.arrive(p.free.index(stage))
        acc = add_slice(p, acc, raw0, row_now0, col_now0)
        raw1 = warpgroup_mma_wait(0, deps=[raw1])
        mbarrier.arrive(p.free.index(stage1))
        acc = add_slice(p, acc, raw1, row_now1, col_now1)
        stage, phase = after(stage1, phase1, p.STAGES)
    return acc, stage, phase, begin + (end - begin) // 2 * 2


@gluon.jit
def consumer(p, WHICH: gl.constexpr):
    BN: gl.constexpr = p.col_bufs.shape[1]
    BASE: gl.constexpr = WHICH * p.WAVES * 64
    PER: gl.constexpr = SCALED_K // p.row_bufs.shape[2]  # slices to a scale
    layout: gl.constexpr = products_layout(p.row_desc.dtype, BN)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    expert, before, first, last = p.first_expert()
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        expert, before, first, last = p.next_expert(tile, expert, before, first, last)
        m, n, part = p.place(tile, before, last - first)
        # For scales and bias, and for whoever still reads what `out` was before.
        m, n = wait_for_kernel_before(m, n)
        row, col = p.corner(m, n, first)
        begin, end = p.slices(part, expert)
        scales0, scales1, scales_along, bias = load_ending(p, row + BASE, col, layout)
        zero = gl.zeros([64, BN], sums_type(p.row_desc.dtype), layout)
        acc0 = gl.zeros([64, BN], sums_type(p.row_desc.dtype) if p.FAST else gl.float32, layout)
        acc1 = acc0
        # A scale that is one number for the tile is fetched one slice ahead of its use.
        second_at = p.row_scale_ptr
        if p.ROW_SCALE == 3:
            rows = row + BASE + gl.arange(0, 64, layout=row_layout)
            row_scale_at = p.row_scale_ptr + gl.minimum(rows, p.R - 1)
            second_at = p.row_scale_ptr + gl.minimum(rows + 64, p.R - 1)
        else:
            row_scale_at = p.row_scale_ptr + gl.minimum(row + BASE, p.R - 1) // 128 * p.row_scale_stride
        col_scale_at = p.col_scale_ptr + p.scale_row(col, p.C, expert) * p.col_scale_stride
        if p.PAIRS:
            acc0, stage, phase, begin = add_pairs(
                p, acc0, zero, stage, phase, begin, end, row_scale_at, col_scale_at, BASE, layout
            )
        some = gl.minimum(begin, gl.maximum(end - 1, 0)) // PER
        row_next = fetch(row_scale_at, some, p.row_scale_stride, p.ROW_SCALE)
        col_next = fetch(col_scale_at, some, 0, p.COL_SCALE)
        second_next = row_next
        if p.WAVES == 2 and p.ROW_SCALE == 3:
            second_next = gl.load(second_at + some * p.row_scale_stride)
        for k in range(begin, end):
            row_scale = row_next
            col_scale = col_next
            ahead = gl.minimum(k + 1, end - 1) // PER
            second = second_next
            row_next = fetch(row_scale_at, ahead, p.row_scale_stride, p.ROW_SCALE)
            col_next = fetch(col_scale_at, ahead, 0, p.COL_SCALE)
            if p.WAVES == 2 and p.ROW_SCALE == 3:
                second_next = gl.load(second_at + ahead * p.row_scale_stride)
            mbarrier.wait(p.ready.index(stage), phase)
            if p.FAST:
                rows = p.row_bufs.index(stage)
                cols = p.col_bufs.index(stage).permute((1, 0))
                acc0 = warpgroup_mma(rows.slice(BASE, 64), cols, acc0, is_async=True)
                if p.WAVES == 2:
                    acc1 = warpgroup_mma(rows.slice(BASE + 64, 64), cols, acc1, is_async=True)
                    acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
                else:
                    acc0 = warpgroup_mma_wait(1, deps=[acc0])
                # The slice before is done with.
                mbarrier.arrive(p.free.index(previous(stage, p.STAGES)), pred=k > begin)
            else:
                if p.COL_SCALE == 2:
                    col_scale = load_scale(p.col_scale_bufs, stage, 0, BN, col_layout)
                raw = multiply_slice(p, stage, BASE, zero)
                if p.ROW_SCALE == 2:
                    row_scale = load_scale(p.row_scale_bufs, stage, BASE, 64, row_layout)
                raw = warpgroup_mma_wait(0, deps=[raw])
                acc0 = add_slice(p, acc0, raw, row_scale, col_scale)
                if p.WAVES == 2:
                    mbarrier.wait(p.ready.index(stage), phase)  # passes at once; keeps the two waves apart
                    raw = multiply_slice(p, stage, BASE + 64, zero)
                    if p.ROW_SCALE == 2:
                        row_scale = load_scale(p.row_scale_bufs, stage, BASE + 64, 64, row_layout)
                    if p.ROW_SCALE == 3:
                        row_scale = second
                    raw = warpgroup_mma_wait(0, deps=[raw])
                    mbarrier.arrive(p.free.index(stage))
                    acc1 = add_slice(p, acc1, raw, row_scale, col_scale)
                else:
                    mbarrier.arrive(p.free.index(stage))
            stage += 1
            if stage == p.STAGES:
                stage = 0
                phase ^= 1
        if p.FAST:
            if p.WAVES == 2:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(p.free.index(previous(stage, p.STAGES)))
        row_end = last if p.EXPERTS > 0 else p.R
        row += BASE
        whole = row + p.WAVES * 64 <= row_end  # of both waves, so that they take their buffers in turn
        out_buf = p.out_bufs.index(WHICH * p.OUT_BUFS)
        store_tile(p, acc0, row, col, row_end, whole, part, out_buf, scales0, scales_along, bias)
        if p.WAVES == 2:
            out_buf = p.out_bufs.index(WHICH * p.OUT_BUFS + p.OUT_BUFS - 1)
            store_tile(p, acc1, row + 64, col, row_end, whole, part, out_buf, scales1, scales_along, bias)
    if p.TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def dense_kernel(
    row_desc, col_desc, row_scale_desc, col_scale_desc, out_desc, out_ptr, row_scale_ptr, col_scale_ptr, row_zero_ptr,
    col_zero_ptr, row_total_ptr, col_total_ptr, bias_ptr, offset_ptr, R, C, out_stride, part_stride, row_scale_stride,
    col_scale_stride, row_tiles, col_tiles, k_tiles, ROW_SCALE: gl.constexpr, COL_SCALE: gl.constexpr,
    ROW_ZERO: gl.constexpr, COL_ZERO: gl.constexpr, FAST: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    SWAP: gl.constexpr, TMA_STORE: gl.constexpr, CONSUMERS: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr,
    OUT_BUFS: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, EXPERTS: gl.constexpr,
    EP: gl.constexpr, OWN_K: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    BM: gl.constexpr = row_desc.block_type.shape[0]
    BN: gl.constexpr = col_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = row_desc.block_type.shape[1]
    gl.static_assert(BM == CONSUMERS * WAVES * 64)
    row_bufs = gl.allocate_shared_memory(row_desc.dtype, [STAGES, BM, BLOCK_K], row_desc.layout)
    col_bufs = gl.allocate_shared_memory(col_desc.dtype, [STAGES, BN, BLOCK_K], col_desc.layout)
    row_scale_bufs = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, row_scale_desc.block_type.shape[1] if ROW_SCALE == 2 else 32], row_scale_desc.layout
    )
    col_scale_bufs = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, col_scale_desc.block_type.shape[1] if COL_SCALE == 2 else 32], col_scale_desc.layout
    )
    out_bufs = gl.allocate_shared_memory(
        out_desc.dtype, [CONSUMERS * OUT_BUFS, 64 if TMA_STORE else 8, BN], out_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    all_tiles = gl.to_tensor(0)
    if EXPERTS > 0:
        gdc_wait()  # for the offsets
        gl.static_assert(not SWAP and PARTS == 1)
        all_tiles = count_tiles(offset_ptr, gl.to_tensor(R), col_tiles, BM, EXPERTS, EP)
    if OWN_K:
        gdc_wait()  # for the offsets, too
    p = Product(  # integers that are one come as constants
        row_desc, col_desc, row_scale_desc, col_scale_desc, out_desc, out_ptr, row_scale_ptr, col_scale_ptr,
        row_zero_ptr, col_zero_ptr, row_total_ptr, col_total_ptr, bias_ptr, offset_ptr, row_bufs, col_bufs,
        row_scale_bufs, col_scale_bufs, out_bufs, ready, free, gl.to_tensor(R), gl.to_tensor(C),
        gl.to_tensor(out_stride), gl.to_tensor(part_stride), gl.to_tensor(row_scale_stride),
        gl.to_tensor(col_scale_stride), gl.to_tensor(row_tiles), gl.to_tensor(col_tiles), gl.to_tensor(k_tiles),
        all_tiles, ROW_SCALE, COL_SCALE, ROW_ZERO, COL_ZERO, FAST, EPILOGUE, BIAS, SWAP, TMA_STORE, WAVES, STAGES,
        OUT_BUFS, GROUP, PARTS, PAIRS, EXPERTS, OWN_K,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([(consumer, (p, 0)), (consumer, (p, 1)), (producer, (p,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(consumer, (p, 0)), (producer, (p,))], [1], [24])
