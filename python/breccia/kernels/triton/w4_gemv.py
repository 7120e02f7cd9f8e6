# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Up to eight bf16 rows by NVFP4, MXFP4 or INT4 (groups of 128) weights, in Gluon: bound by reading the weights.

Codes decode in registers and feed the tensor cores of the older, synchronous kind, whose operands both come from
registers: the weights are the 16-row side, the activations the columns. Which elements of K share an instruction
does not matter as long as both sides agree: of a slice of 128, thread t of a row takes elements 32t to 32t + 31, which
are 16 consecutive bytes of the weights and 64 of the activations, so that nothing is permuted in memory. The warps of a
program divide K among them, each with a stretch of its own, and add up at the end.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import E2M1_ASM, E2M1_ONCE_ASM, INT4_FMA_ASM, e4m3_pair, halves, power
from .runtime import launch

WARPS = 4  # of a program


@gluon.jit
def bring_to_l2(ptr, row0, N, stride, size, WARPS: gl.constexpr):
    """Sends `size` bytes, whole sixteens, of each of the program's rows to the L2 cache. It may do so before the kernel
    before has ended, whatever that writes: the cache is where its stores arrive too."""
    i = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = gl.minimum(row0 + i % 16, N - 1)
    part = (size // 16 + 2 * WARPS - 1) // (2 * WARPS) * 16
    start = i // 16 * part
    at = row.to(gl.int64) * stride + start // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptr + at, gl.minimum(part, size - start)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def warp_bases(warps):
    return [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(warps):
    """(warp, 16 rows, 16 words): four consecutive words of rows g and g + 8 a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 8, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases(warps),
        block_bases=[],
        shape=[warps, 16, 16],
    )


@gluon.constexpr_function
def scales_layout(warps):
    """(warp, 16 rows, 4): what goes with each thread's words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 8, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases(warps),
        block_bases=[],
        shape=[warps, 16, 4],
    )


@gluon.constexpr_function
def x_layout(warps):
    """(warp, 8 rows, 64 words of two activations): 16 consecutive words a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        lane_bases=[[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases(warps),
        block_bases=[],
        shape=[warps, 8, 64],
    )


@gluon.jit
def axes(A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    a = gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    b = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return (
        gl.expand_dims(gl.expand_dims(a, 1), 2),
        gl.expand_dims(gl.expand_dims(b, 0), 2),
        gl.expand_dims(gl.expand_dims(c, 0), 1),
    )


@gluon.jit
def load_words(w_ptr, row0, k, each, slices, N, w_stride, WARPS: gl.constexpr):
    warp, row, word = axes(WARPS, 16, 16, words_layout(WARPS))
    s = warp * each + k
    at = (row0 + row).to(gl.int64) * w_stride + s * 16 + word
    return gl.load(w_ptr + at, mask=(row0 + row < N) & (k < each) & (s < slices), other=0)


@gluon.jit
def load_scales(s_ptr, row0, k, each, slices, N, s_row, KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """Per row and thread a pair of E4M3 or one E8M0; per row one number (int4)."""
    if KIND == "int4":
        L: gl.constexpr = gl.SliceLayout(2, mma)
        warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, L)), 1)
        row = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, L)), 0)
        s = warp * each + k
        inside = (row0 + row < N) & (k < each) & (s < slices)
        return gl.load(s_ptr + (row0 + row).to(gl.int64) * s_row + s, mask=inside, other=0)
    else:
        warp, row, col = axes(WARPS, 16, 4, scales_layout(WARPS))
        s = warp * each + k
        inside = (row0 + row < N) & (k < each) & (s < slices)
        return gl.load(s_ptr + (row0 + row).to(gl.int64) * s_row + s * 4 + col, mask=inside, other=0)


@gluon.jit
def load_x(x_ptr, k, each, slices, M, x_stride, WARPS: gl.constexpr, mma: gl.constexpr):
    """The activations of a slice as the column operand, in the order in which `decode` leaves the weights."""
    warp, m, word = axes(WARPS, 8, 64, x_layout(WARPS))
    s = warp * each + k
    x = gl.load(x_ptr + m * x_stride + s * 64 + word, mask=(m < M) & (k < each) & (s < slices), other=0)
    x = gl.reshape(halves(x), [WARPS, 8, 4, 4, 2, 2, 2])  # t, q, i, a, h: element 32t + 8q + 4i + 2a + h
    x = gl.reshape(gl.permute(x, (0, 1, 3, 5, 6, 2, 4)), [WARPS, 8, 128])
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def decode(words, raw_scale, KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """(warp, 16, 16) words to the 16-row operand (warp, 16, 128)."""
    L: gl.constexpr = words_layout(WARPS)
    if KIND == "int4":
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            INT4_FMA_ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
    elif KIND == "nvfp4":
        low, high = e4m3_pair(raw_scale)
        four = gl.join(gl.join(low, low), gl.join(high, high))
        scale = gl.convert_layout(gl.reshape(gl.permute(four, (0, 1, 2, 4, 3)), [WARPS, 16, 16]), L)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            E2M1_ONCE_ASM, "=r,=r,=r,=r,r,r,r", [words, scale, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = power(raw_scale)
        twice = gl.join(both, both)
        scale = gl.convert_layout(gl.reshape(gl.join(twice, twice), [WARPS, 16, 16]), L)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            E2M1_ASM, "=r,=r,=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    a = gl.join(gl.join(halves(p0), halves(p1)), gl.join(halves(p2), halves(p3)))  # warp, 16, word, i, h, a
    a = gl.permute(gl.reshape(a, [WARPS, 16, 4, 4, 2, 2, 2]), (0, 1, 3, 6, 5, 2, 4))  # warp, 16, q, a, h, t, i
    return gl.convert_layout(gl.reshape(a, [WARPS, 16, 128]), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def multiply(acc, words, scale, x, KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    a = decode(words, scale, KIND, WARPS, mma)
    if KIND == "int4":
        raw = mma_v2(a, x, gl.zeros([WARPS, 16, 8], gl.float32, mma))
        return acc + raw * gl.expand_dims(scale.to(gl.float32), 2)
    else:
        return mma_v2(a, x, acc)


@gluon.jit
def w4_gemv_kernel(
    x_ptr, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, N, M, x_stride, w_stride, s_row, out_stride, slices, each,
    KIND: gl.constexpr, GLOBAL: gl.constexpr, BIAS: gl.constexpr, SCALES_AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out (M, N) = x (M, K) · w (N, K)^T, 16 rows of w a program. x_ptr: pairs of activations; w_ptr: words of eight
    codes; each: slices of a warp, of which it asks for four at a time."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    row0 = gl.program_id(0) * 16
    gdc_launch_dependents()
    # Room for four programs a multiprocessor, which is one wave: where there is room for more, those that start early
    # crowd on the multiprocessors that are free first.
    room = gl.allocate_shared_memory(gl.int32, [12, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.index(0).store(gl.zeros([1024], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    bring_to_l2(w_ptr, row0, N, w_stride, slices * 64, WARPS)
    if SCALES_AHEAD:
        bring_to_l2(s_ptr, row0, N, s_row, slices * (8 if KIND == "nvfp4" else 4), WARPS)
    gdc_wait()
    acc = gl.zeros([WARPS, 16, 8], gl.float32, mma)
    for k in range(0, each, 4):
        w0 = load_words(w_ptr, row0, k, each, slices, N, w_stride, WARPS)
        w1 = load_words(w_ptr, row0, k + 1, each, slices, N, w_stride, WARPS)
        s0 = load_scales(s_ptr, row0, k, each, slices, N, s_row, KIND, WARPS, mma)
        s1 = load_scales(s_ptr, row0, k + 1, each, slices, N, s_row, KIND, WARPS, mma)
        w2 = load_words(w_ptr, row0, k + 2, each, slices, N, w_stride, WARPS)
        w3 = load_words(w_ptr, row0, k + 3, each, slices, N, w_stride, WARPS)
        s2 = load_scales(s_ptr, row0, k + 2, each, slices, N, s_row, KIND, WARPS, mma)
        s3 = load_scales(s_ptr, row0, k + 3, each, slices, N, s_row, KIND, WARPS, mma)
        acc = multiply(acc, w0, s0, load_x(x_ptr, k, each, slices, M, x_stride, WARPS, mma), KIND, WARPS, mma)
        acc = multiply(acc, w1, s1, load_x(x_ptr, k + 1, each, slices, M, x_stride, WARPS, mma), KIND, WARPS, mma)
        acc = multiply(acc, w2, s2, load_x(x_ptr, k + 2, each, slices, M, x_stride, WARPS, mma), KIND, WARPS, mma)
        acc = multiply(acc, w3, s3, load_x(x_ptr, k + 3, each, slices, M, x_stride, WARPS, mma), KIND, WARPS, mma)
    y = gl.sum(acc, axis=0)
    LY: gl.constexpr = y.type.layout
    row = row0 + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, LY)), 1)
    m = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, LY)), 0)
    if KIND == "nvfp4":
        y = y * 16384.0
    if GLOBAL:
        y = y * gl.load(g_ptr)
    if BIAS:
        y = y + gl.load(bias_ptr + row, mask=row < N, other=0).to(gl.float32)
    gl.store(out_ptr + m * out_stride + row, y.to(out_ptr.dtype.element_ty), mask=(row < N) & (m < M))


def w4_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype = torch.bfloat16,
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    warps: int = WARPS,
) -> torch.Tensor:
    """x (M <= 8, K) bf16 by packed weights (N, K/2 bytes) transposed: what `weights_matmul.takes`."""
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    scale = scale if kind == "int4" else scale.view(torch.uint8)
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    if kind == "nvfp4":
        scale = scale.contiguous().view(torch.int16)
    row_bytes = k // (16 if kind == "nvfp4" else 32)
    sixteens = (row_bytes | scale.stride(0) * scale.element_size() | scale.data_ptr()) % 16 == 0
    launch(
        w4_gemv_kernel,
        (triton.cdiv(n, 16),),
        x,
        x.view(torch.int32),
        w.view(torch.int32),
        scale,
        scale if global_scale is None else global_scale,
        scale if bias is None else bias,
        out,
        n,
        m,
        x.stride(0) // 2,
        w.stride(0) // 4,
        scale.stride(0),
        out.stride(0),
        k // 128,
        triton.cdiv(k // 128, warps),
        KIND=kind,
        GLOBAL=global_scale is not None,
        BIAS=bias is not None,
        SCALES_AHEAD=kind != "int4" and sixteens,  # of which INT4 has hardly any
        WARPS=warps,
        num_warps=warps,
        launch_pdl=True,
    )
    return out
