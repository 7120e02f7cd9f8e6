# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""bf16 activations by 4-bit weights on Hopper, in Gluon: weights go from global memory to registers, decode there and
feed the tensor cores as the register operand, so that decoded weights never touch memory.

A thread of the tensor cores' register operand holds, of every 16 along K, elements 2t, 2t+1, 2t+8 and 2t+9 of a row
(t = lane mod 4). A product does not care in which order K runs, so the order is chosen for the weights: thread t
takes 32 consecutive codes (16 bytes) of each slice of 128, and `permute_kernel` brings the activations into
the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .hopper_fp8 import tile_position

# Argument lists stay dense.
# fmt: off

SLICE = gl.constexpr(128)

# A word holds eight codes n0 ... n7; output p gets the pair (n_p, n_p+4) as bf16x2. E2M1 bits in bf16's fields are
# the value times 2^-126; INT4 codes are mantissas under the exponent of 128.
E2M1_ASM = gl.constexpr("""{
.reg .b32 s, t, up;
mov.b32 up, 0x7E807E80;
shl.b32 s, $4, 12; and.b32 s, s, 0x80008000; shl.b32 t, $4, 6; and.b32 t, t, 0x01C001C0; or.b32 s, s, t;
mul.bf16x2 s, s, up; mul.bf16x2 $0, s, $5;
shl.b32 s, $4, 8; and.b32 s, s, 0x80008000; shl.b32 t, $4, 2; and.b32 t, t, 0x01C001C0; or.b32 s, s, t;
mul.bf16x2 s, s, up; mul.bf16x2 $1, s, $5;
shl.b32 s, $4, 4; and.b32 s, s, 0x80008000; shr.b32 t, $4, 2; and.b32 t, t, 0x01C001C0; or.b32 s, s, t;
mul.bf16x2 s, s, up; mul.bf16x2 $2, s, $5;
and.b32 s, $4, 0x80008000; shr.b32 t, $4, 6; and.b32 t, t, 0x01C001C0; or.b32 s, s, t;
mul.bf16x2 s, s, up; mul.bf16x2 $3, s, $5;
}""")
INT4_ASM = gl.constexpr("""{
.reg .b32 s, bias, one;
mov.b32 bias, 0xC308C308; mov.b32 one, 0x3F803F80;
and.b32 s, $4, 0x000F000F; xor.b32 s, s, 0x43084308; fma.rn.bf16x2 $0, s, one, bias;
shr.b32 s, $4, 4; and.b32 s, s, 0x000F000F; xor.b32 s, s, 0x43084308; fma.rn.bf16x2 $1, s, one, bias;
shr.b32 s, $4, 8; and.b32 s, s, 0x000F000F; xor.b32 s, s, 0x43084308; fma.rn.bf16x2 $2, s, one, bias;
shr.b32 s, $4, 12; and.b32 s, s, 0x000F000F; xor.b32 s, s, 0x43084308; fma.rn.bf16x2 $3, s, one, bias;
}""")
E4M3_ASM = gl.constexpr("""{
.reg .b32 h; .reg .b16 a, b; .reg .f32 f;
cvt.rn.f16x2.e4m3x2 h, $2; mov.b32 {a, b}, h;
cvt.f32.f16 f, a; cvt.rn.bf16x2.f32 $0, f, f;
cvt.f32.f16 f, b; cvt.rn.bf16x2.f32 $1, f, f;
}""")


@triton.jit
def permute_kernel(x_ptr, out_ptr, K, x_stride, out_stride, BK: tl.constexpr):
    """One row a program: position 32q + 16a + 8h + 2t + i of a slice takes element 32t + 8q + 4i + 2a + h."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BK + tl.arange(0, BK)
    s = at % 128
    k = ((s >> 1) & 3) * 32 + (s >> 5) * 8 + (s & 1) * 4 + ((s >> 4) & 1) * 2 + ((s >> 3) & 1)
    k += at - s
    tl.store(out_ptr + row * out_stride + at, tl.load(x_ptr + row * x_stride + k, mask=at < K, other=0), mask=at < K)


@gluon.constexpr_function
def row_words_layout():
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.jit
def load_scales(s_ptr, rows, r_acc, k, slices, N, s_row, KIND: gl.constexpr):
    """Scales of one slice: a pair of E4M3 (nvfp4) or one E8M0 byte (mxfp4) per row and thread, or one number a row
    (int4)."""
    k = gl.minimum(k, slices - 1)
    if KIND == "int4":
        return gl.load(s_ptr + r_acc.to(gl.int64) * s_row + k, mask=r_acc < N, other=0)
    else:
        LS: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[8, 0]],
            lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, 4],
        )
        r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
        col = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LS)), 0)
        return gl.load(
            s_ptr + gl.expand_dims(r.to(gl.int64) * s_row, 1) + k * 4 + col, mask=gl.expand_dims(r < N, 1), other=0
        )


@gluon.jit
def spread_scales(raw, KIND: gl.constexpr, LW: gl.constexpr):
    """The scale of every word, as bf16x2 with equal halves."""
    if KIND == "nvfp4":
        low, high = gl.inline_asm_elementwise(
            E4M3_ASM, "=r,=r,h", [raw], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        four = gl.join(gl.join(low, low), gl.join(high, high))  # [64, 4, 2 (same), 2 (which)]
        return gl.convert_layout(gl.reshape(gl.permute(four, (0, 1, 3, 2)), [64, 16]), LW)
    else:
        e = raw.to(gl.int32) & 0xFF
        bits = gl.where(e == 0, 0x0040, gl.where(e == 255, 0x7FC0, e << 7))
        both = bits | (bits << 16)
        twice = gl.join(both, both)
        return gl.convert_layout(gl.reshape(gl.join(twice, twice), [64, 16]), LW)


@gluon.jit
def halves(pair):
    low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def decode_words(words, raw_scale, KIND: gl.constexpr, LW: gl.constexpr, dot_layout: gl.constexpr):
    """[64, 16] words to the [64, 128] register operand."""
    if KIND == "int4":
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            INT4_ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        scale = spread_scales(raw_scale, KIND, LW)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            E2M1_ASM,
            "=r,=r,=r,=r,r,r",
            [words, scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    a = gl.join(gl.join(halves(p0), halves(p1)), gl.join(halves(p2), halves(p3)))  # [64, 16, i, h, a]
    a = gl.permute(gl.reshape(a, [64, 4, 4, 2, 2, 2]), (0, 2, 5, 4, 1, 3))  # [64, q, a, h, t, i]
    return gl.convert_layout(gl.reshape(a, [64, 128]), dot_layout)


@gluon.jit
def w4_producer(
    x_desc, x_bufs, ready, free, row_tiles, col_tiles, slices, STEP: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    BN: gl.constexpr = x_desc.block_type.shape[0]
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        _, n = tile_position(tile, row_tiles, col_tiles, GROUP)
        for k in range(padded(slices, STEP)):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(ready.index(stage), BN * SLICE * 2)
            tma.async_copy_global_to_shared(x_desc, [n * BN, k * SLICE], ready.index(stage), x_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def padded(slices, STEP: gl.constexpr):
    """Slices the loops run over: whole rounds of four per consumer. Past the end both operands are zeros."""
    return (slices + 4 * STEP - 1) // (4 * STEP) * (4 * STEP)


@gluon.jit
def load_words(w_ptr, rows, k, slices, N, w_stride, LW: gl.constexpr):
    r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, LW))
    at = (
        gl.expand_dims(r.to(gl.int64) * w_stride, 1)
        + k * 16
        + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, LW)), 0)
    )
    return gl.load(w_ptr + at, mask=gl.expand_dims(r < N, 1) & (k < slices), other=0)


@gluon.jit
def w4_step(
    acc, a, w_next, s_next, s_now, k, base, w_ptr, s_ptr, rows, r_acc, slices, N, w_stride, s_row, x_bufs, ready,
    free, KIND: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, LW: gl.constexpr, mma: gl.constexpr,
):
    """Multiplies slice k, decodes the consumer's next one and asks for the one four on. Returns acc, the operand, the
    words and scales that took the place of w_next and s_next, and the scale in the place of s_now."""
    BN: gl.constexpr = x_bufs.shape[1]
    dot_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    stage = (base + k) % STAGES
    mbarrier.wait(ready.index(stage), ((base + k) // STAGES) & 1)
    x = x_bufs.index(stage).permute((1, 0))
    if KIND == "int4":
        zero = gl.zeros([64, BN], gl.float32, mma)
        raw = warpgroup_mma(a, x, zero, use_acc=False, is_async=True)
        a_next = decode_words(w_next, s_next, KIND, LW, dot_layout)
        w_next = load_words(w_ptr, rows, k + 5 * STEP, slices, N, w_stride, LW)
        raw = warpgroup_mma_wait(0, deps=[raw])
        mbarrier.arrive(free.index(stage))
        acc += raw * gl.expand_dims(s_now.to(gl.float32), 1)
        s_now = load_scales(s_ptr, rows, r_acc, k + 4 * STEP, slices, N, s_row, KIND)
    else:
        acc = warpgroup_mma(a, x, acc, is_async=True)
        a_next = decode_words(w_next, s_next, KIND, LW, dot_layout)
        w_next = load_words(w_ptr, rows, k + 5 * STEP, slices, N, w_stride, LW)
        s_next = load_scales(s_ptr, rows, r_acc, k + 5 * STEP, slices, N, s_row, KIND)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage))
    return acc, a_next, w_next, s_next, s_now


@gluon.jit
def w4_consumer(
    WHICH: gl.constexpr, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M, w_stride,
    s_row, out_stride, row_tiles, col_tiles, slices, KIND: gl.constexpr, GLOBAL: gl.constexpr, BIAS: gl.constexpr,
    SPLIT: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):
    BN: gl.constexpr = x_bufs.shape[1]
    LW: gl.constexpr = row_words_layout()
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    dot_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    STEP: gl.constexpr = CONSUMERS if SPLIT else 1
    FIRST: gl.constexpr = WHICH if SPLIT else 0
    ROWS: gl.constexpr = 64 if SPLIT else 64 * CONSUMERS
    base = 0
    rounds = padded(slices, CONSUMERS if SPLIT else 1)
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        m, n = tile_position(tile, row_tiles, col_tiles, GROUP)
        rows = m * ROWS + (0 if SPLIT else WHICH * 64)
        acc = gl.zeros([64, BN], gl.float32, mma)
        r_acc = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        w0 = load_words(w_ptr, rows, FIRST, slices, N, w_stride, LW)
        w1 = load_words(w_ptr, rows, FIRST + STEP, slices, N, w_stride, LW)
        w2 = load_words(w_ptr, rows, FIRST + 2 * STEP, slices, N, w_stride, LW)
        w3 = load_words(w_ptr, rows, FIRST + 3 * STEP, slices, N, w_stride, LW)
        s0 = load_scales(s_ptr, rows, r_acc, FIRST, slices, N, s_row, KIND)
        s1 = load_scales(s_ptr, rows, r_acc, FIRST + STEP, slices, N, s_row, KIND)
        s2 = load_scales(s_ptr, rows, r_acc, FIRST + 2 * STEP, slices, N, s_row, KIND)
        s3 = load_scales(s_ptr, rows, r_acc, FIRST + 3 * STEP, slices, N, s_row, KIND)
        a = decode_words(w0, s0, KIND, LW, dot_layout)
        w0 = load_words(w_ptr, rows, FIRST + 4 * STEP, slices, N, w_stride, LW)
        if KIND != "int4":
            s0 = load_scales(s_ptr, rows, r_acc, FIRST + 4 * STEP, slices, N, s_row, KIND)
        # While slice k multiplies, the next one decodes and three more are on their way. Every register set has its own
        # place in the unrolled body: moving one that is still being loaded would wait for it.
        for k in range(FIRST, rounds, 4 * STEP):
            acc, a, w1, s1, s0 = w4_step(
                acc, a, w1, s1, s0, k, base, w_ptr, s_ptr, rows, r_acc, slices, N, w_stride, s_row, x_bufs, ready,
                free, KIND, STEP, STAGES, LW, mma,
            )
            acc, a, w2, s2, s1 = w4_step(
                acc, a, w2, s2, s1, k + STEP, base, w_ptr, s_ptr, rows, r_acc, slices, N, w_stride, s_row, x_bufs,
                ready, free, KIND, STEP, STAGES, LW, mma,
            )
            acc, a, w3, s3, s2 = w4_step(
                acc, a, w3, s3, s2, k + 2 * STEP, base, w_ptr, s_ptr, rows, r_acc, slices, N, w_stride, s_row,
                x_bufs, ready, free, KIND, STEP, STAGES, LW, mma,
            )
            acc, a, w0, s0, s3 = w4_step(
                acc, a, w0, s0, s3, k + 3 * STEP, base, w_ptr, s_ptr, rows, r_acc, slices, N, w_stride, s_row,
                x_bufs, ready, free, KIND, STEP, STAGES, LW, mma,
            )
        base += rounds
        if SPLIT and CONSUMERS > 1:
            if WHICH > 0:
                red_bufs.index(WHICH - 1).store(acc)
                mbarrier.arrive(done.index(WHICH - 1))
            else:
                for other in gl.static_range(CONSUMERS - 1):
                    mbarrier.wait(done.index(other), 0)  # one tile a program: one phase
                    acc += red_bufs.index(other).load(mma)
        if not SPLIT or WHICH == 0:
            r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
            c = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
            if GLOBAL:
                acc = acc * gl.load(g_ptr)
            if BIAS:
                acc += gl.expand_dims(gl.load(bias_ptr + r, mask=r < N, other=0).to(gl.float32), 1)
            at = gl.expand_dims(c.to(gl.int64) * out_stride, 0) + gl.expand_dims(r, 1)
            inside = gl.expand_dims(r < N, 1) & gl.expand_dims(c < M, 0)
            gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def w4_kernel(
    x_desc, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, N, M, w_stride, s_row, out_stride, row_tiles, col_tiles, slices,
    KIND: gl.constexpr, GLOBAL: gl.constexpr, BIAS: gl.constexpr, SPLIT: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, REGS: gl.constexpr,
):
    """out (M, N) = x (M, K) · w (N, K)^T. SPLIT: the consumers share 64 rows of w and divide K, one tile a program;
    else each has 64 rows of its own."""
    BN: gl.constexpr = x_desc.block_type.shape[0]
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, SLICE], x_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    red_bufs = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS - 1 if SPLIT and CONSUMERS > 1 else 1, 64, BN if SPLIT else 8], flat
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1 if SPLIT else CONSUMERS)
    for i in gl.static_range(4):
        mbarrier.init(done.index(i), count=1)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (
                    w4_consumer,
                    (
                        0, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M,
                        w_stride, s_row, out_stride, row_tiles, col_tiles, slices, KIND, GLOBAL, BIAS, SPLIT,
                        CONSUMERS, STAGES, GROUP,
                    ),
                ),
                (
                    w4_consumer,
                    (
                        1, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M,
                        w_stride, s_row, out_stride, row_tiles, col_tiles, slices, KIND, GLOBAL, BIAS, SPLIT,
                        CONSUMERS, STAGES, GROUP,
                    ),
                ),
                (
                    w4_consumer,
                    (
                        2, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M,
                        w_stride, s_row, out_stride, row_tiles, col_tiles, slices, KIND, GLOBAL, BIAS, SPLIT,
                        CONSUMERS, STAGES, GROUP,
                    ),
                ),
                (
                    w4_producer,
                    (
                        x_desc, x_bufs, ready, free, row_tiles, col_tiles, slices, CONSUMERS if SPLIT else 1, STAGES,
                        GROUP,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGS, REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    w4_consumer,
                    (
                        0, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M,
                        w_stride, s_row, out_stride, row_tiles, col_tiles, slices, KIND, GLOBAL, BIAS, SPLIT,
                        CONSUMERS, STAGES, GROUP,
                    ),
                ),
                (
                    w4_consumer,
                    (
                        1, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, x_bufs, red_bufs, ready, free, done, N, M,
                        w_stride, s_row, out_stride, row_tiles, col_tiles, slices, KIND, GLOBAL, BIAS, SPLIT,
                        CONSUMERS, STAGES, GROUP,
                    ),
                ),
                (
                    w4_producer,
                    (
                        x_desc, x_bufs, ready, free, row_tiles, col_tiles, slices, CONSUMERS if SPLIT else 1, STAGES,
                        GROUP,
                    ),
                ),
            ],
            [4, 1],
            [REGS, 24],
        )
