# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Up to eight bf16 rows by NVFP4, MXFP4 or INT4 (groups of 128) weights, in Gluon: bound by reading and decoding them.

Codes decode in registers and feed the tensor cores of the older, synchronous kind, whose operands both come from
registers: the weights are the 16-row side, the activations the columns. Which elements of K share an instruction
does not matter as long as both sides agree: of a slice of 128, thread t of a row takes elements 32t to 32t + 31, which
are 16 consecutive bytes of the weights and 64 of the activations, so that nothing is permuted in memory. A program has
two tiles of 16 rows, for which activations are read and put in order once. Its warps take the slices of K in turn and
add up at the end.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.device.decode import E2M1_ASM, E2M1_ONCE_ASM, INT4_FMA_ASM, e4m3_pair, halves, power
from breccia.kernels.triton.products.dense_matmul import sm_count
from breccia.kernels.triton.runtime import launch, one_byte_scales

WARPS = (8, 16)  # of a program; more where each program has a multiprocessor to itself
ROWS = gl.constexpr(32)  # of a program, two tiles
REGISTERS = 128  # for 16 warps a multiprocessor; more than 80, for not 24
# E8M0 scales that one product reaches: their 2^112-fold and its products with codes are bfloat16 numbers.
POWERS = gl.constexpr((16, 142))


@gluon.constexpr_function
def alike_layout(rows, warps):
    """(rows), divided among the warps, the same in all lanes."""
    bits, own = rows.bit_length() - 1, (rows // warps).bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i] for i in range(own)],
        lane_bases=[[0]] * 5,
        warp_bases=[[1 << i] for i in range(own, bits)],
        block_bases=[],
        shape=[rows],
    )


@gluon.jit
def bring_to_l2(ptr, row0, N, stride, size, WARPS: gl.constexpr):
    """Sends `size` bytes, whole sixteens, of each of the program's rows to the L2 cache. It may do so before the kernel
    before has ended, whatever that writes: the cache is where its stores arrive too. The instruction is the warp's: it
    would be repeated in a loop for lanes that differ."""
    row = gl.minimum(row0 + gl.arange(0, ROWS, layout=alike_layout(ROWS, WARPS)), N - 1)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [ptr + row.to(gl.int64) * stride, size], dtype=gl.int32, is_pure=False, pack=1,
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


@gluon.constexpr_function
def parts_layout(warps):
    """(warp, 16 rows, 8 columns, 2 tiles): what the warps have of a sum, in one thread."""
    spread = [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], *([0, 1 << i, 0, 0] for i in range(4))]
    spread += [[0, 0, 0, 0]] * (warps.bit_length() - 4)  # warps beyond eight compute the same
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        lane_bases=spread[:5],
        warp_bases=spread[5:],
        block_bases=[],
        shape=[warps, 16, 8, 2],
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
def row_pointers(ptr, row, N, stride, at):
    """Rows beyond the last are the last."""
    return ptr + (gl.minimum(row, N - 1).to(gl.int64) * stride + at)


@gluon.jit
def word_pointers(w_ptr, row0, N, w_stride, WARPS: gl.constexpr):
    warp, row, word = axes(WARPS, 16, 16, words_layout(WARPS))
    return row_pointers(w_ptr, row0 + row, N, w_stride, warp * 16 + word)


@gluon.jit
def scale_axes(KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """Warp, row and where in the row the warps' first slices have their scales."""
    if KIND == "int4":
        L: gl.constexpr = gl.SliceLayout(2, mma)
        warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, L)), 1)
        return warp, gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, L)), 0), warp
    else:
        warp, row, col = axes(WARPS, 16, 4, scales_layout(WARPS))
        return warp, row, warp * 4 + col


@gluon.jit
def scale_pointers(s_ptr, row0, N, s_row, KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """Per row and thread a pair of E4M3 or one E8M0; per row one number (int4)."""
    _, row, at = scale_axes(KIND, WARPS, mma)
    return row_pointers(s_ptr, row0 + row, N, s_row, at)


@gluon.jit
def pointers(w_ptr, s_ptr, row0, N, w_stride, s_row, KIND: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """To the words and the scales of both tiles."""
    words = (word_pointers(w_ptr, row0, N, w_stride, WARPS), word_pointers(w_ptr, row0 + 16, N, w_stride, WARPS))
    scales = (
        scale_pointers(s_ptr, row0, N, s_row, KIND, WARPS, mma),
        scale_pointers(s_ptr, row0 + 16, N, s_row, KIND, WARPS, mma),
    )
    return words, scales


@gluon.jit
def load_slice(ptrs, warp, s, slices, other: gl.constexpr, EVEN: gl.constexpr, WARPS: gl.constexpr):
    """Slice s of every warp. EVEN: every warp has as many; else `other` for those that have none."""
    if EVEN:
        return gl.load(ptrs)
    else:
        return gl.load(ptrs, mask=warp + s * WARPS < slices, other=other)


@gluon.jit
def load_x(ptrs, s, slices, EVEN: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """The activations of a slice as the column operand, in the order in which `decode` leaves the weights."""
    warp, _, _ = axes(WARPS, 8, 64, x_layout(WARPS))
    x = load_slice(ptrs, warp, s, slices, 0, EVEN, WARPS)
    x = gl.reshape(halves(x), [WARPS, 8, 4, 4, 2, 2, 2])  # t, q, i, a, h: element 32t + 8q + 4i + 2a + h
    x = gl.reshape(gl.permute(x, (0, 1, 3, 5, 6, 2, 4)), [WARPS, 8, 128])
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def decode(words, raw_scale, KIND: gl.constexpr, ONCE: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    """(warp, 16, 16) words to the 16-row operand (warp, 16, 128), with ONCE 2^-14 times as large."""
    L: gl.constexpr = words.type.layout
    if KIND == "int4":
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            INT4_FMA_ASM, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        if KIND == "nvfp4":
            low, high = e4m3_pair(raw_scale)
        else:
            low = power(raw_scale, ONCE)
            high = low
        four = gl.join(gl.join(low, low), gl.join(high, high))
        scale = gl.convert_layout(gl.reshape(gl.permute(four, (0, 1, 2, 4, 3)), [WARPS, 16, 16]), L)
        if ONCE:
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                E2M1_ONCE_ASM, "=r,=r,=r,=r,r,r,r", [words, scale, scale],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True, pack=1,
            )  # fmt: skip
    a = gl.join(gl.join(halves(p0), halves(p1)), gl.join(halves(p2), halves(p3)))  # warp, 16, word, i, h, a
    a = gl.permute(gl.reshape(a, [WARPS, 16, 4, 4, 2, 2, 2]), (0, 1, 3, 6, 5, 2, 4))  # warp, row, q, a, h, t, i
    a = gl.reshape(a, [WARPS, 16, 128])
    return gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def multiply(acc, words, scale, x, KIND: gl.constexpr, ONCE: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    a = decode(words, scale, KIND, ONCE, WARPS, mma)
    if KIND == "int4":
        raw = mma_v2(a, x, gl.full_like(acc, 0))
        return acc + raw * gl.expand_dims(scale.to(gl.float32), 2)
    else:
        return mma_v2(a, x, acc)


@gluon.jit
def beyond(worst, scale):
    """How far the E8M0 scales so far are from the lowest of POWERS, as a number without a sign."""
    return gl.maximum(worst, scale.to(gl.uint32) - POWERS[0])


@gluon.jit
def load_words(words, s, slices, EVEN: gl.constexpr, WARPS: gl.constexpr):
    warp, _, _ = axes(WARPS, 16, 16, words_layout(WARPS))
    return load_slice(words, warp, s, slices, 0, EVEN, WARPS)


@gluon.jit
def load_scales(scales, s, slices, KIND: gl.constexpr, EVEN: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr):
    warp, _, _ = scale_axes(KIND, WARPS, mma)
    return load_slice(scales, warp, s, slices, 127 if KIND == "mxfp4" else 0, EVEN, WARPS)


@gluon.jit
def next_slices(
    acc, worst, words, scales, xs, s, slices, PAIR: gl.constexpr, KIND: gl.constexpr, ONCE: gl.constexpr,
    EVEN: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Slice s of a warp by both tiles, with PAIR the next one, too, all of them asked for at once."""
    PER: gl.constexpr = 1 if KIND == "int4" else 4  # scales of a slice
    v0 = load_words(words[0], s, slices, EVEN, WARPS)
    v1 = load_words(words[1], s, slices, EVEN, WARPS)
    if PAIR:
        w0 = load_words(words[0] + 16 * WARPS, s + 1, slices, EVEN, WARPS)
        w1 = load_words(words[1] + 16 * WARPS, s + 1, slices, EVEN, WARPS)
    s0 = load_scales(scales[0], s, slices, KIND, EVEN, WARPS, mma)
    s1 = load_scales(scales[1], s, slices, KIND, EVEN, WARPS, mma)
    if PAIR:
        t0 = load_scales(scales[0] + PER * WARPS, s + 1, slices, KIND, EVEN, WARPS, mma)
        t1 = load_scales(scales[1] + PER * WARPS, s + 1, slices, KIND, EVEN, WARPS, mma)
    x = load_x(xs, s, slices, EVEN, WARPS, mma)
    acc0 = multiply(acc[0], v0, s0, x, KIND, ONCE, WARPS, mma)
    acc1 = multiply(acc[1], v1, s1, x, KIND, ONCE, WARPS, mma)
    if KIND == "mxfp4" and ONCE:
        worst = beyond(beyond(worst, s0), s1)
    if PAIR:
        x = load_x(xs + 64 * WARPS, s + 1, slices, EVEN, WARPS, mma)
        acc0 = multiply(acc0, w0, t0, x, KIND, ONCE, WARPS, mma)
        acc1 = multiply(acc1, w1, t1, x, KIND, ONCE, WARPS, mma)
        if KIND == "mxfp4" and ONCE:
            worst = beyond(beyond(worst, t0), t1)
    return (acc0, acc1), worst


@gluon.jit
def sums(
    words, scales, x_ptr, M, x_stride, slices, each, KIND: gl.constexpr, ONCE: gl.constexpr, BODY: gl.constexpr,
    EVEN: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """(warp, 16 rows, 8 columns, 2 tiles), and what `beyond` found. Columns beyond the last row of x are that row."""
    PER: gl.constexpr = 1 if KIND == "int4" else 4
    PAIRS: gl.constexpr = BODY > 1 and KIND != "int4"  # which has no registers for them
    warp, column, word = axes(WARPS, 8, 64, x_layout(WARPS))
    xs = x_ptr + (gl.minimum(column, M - 1) * x_stride + (warp * 64 + word))
    zero = gl.zeros([WARPS, 16, 8], gl.float32, mma)
    acc = (zero, zero)
    worst = gl.zeros([WARPS, 16, 4], gl.uint32, scales_layout(WARPS))
    for k in range(0, each, BODY):
        for i in gl.static_range(0, BODY, 2 if PAIRS else 1):
            at = i * WARPS
            acc, worst = next_slices(
                acc, worst, (words[0] + at * 16, words[1] + at * 16), (scales[0] + at * PER, scales[1] + at * PER),
                xs + at * 64, k + i, slices, PAIRS, KIND, ONCE, EVEN, WARPS, mma,
            )  # fmt: skip
        words = (words[0] + BODY * WARPS * 16, words[1] + BODY * WARPS * 16)
        scales = (scales[0] + BODY * WARPS * PER, scales[1] + BODY * WARPS * PER)
        xs += BODY * WARPS * 64
    return gl.join(acc[0], acc[1]), worst


@gluon.jit
def w4_gemv_kernel(
    x_ptr, w_ptr, s_ptr, g_ptr, bias_ptr, out_ptr, N, M, x_stride, w_stride, s_row, out_stride, slices, each,
    KIND: gl.constexpr, GLOBAL: gl.constexpr, BIAS: gl.constexpr, AHEAD: gl.constexpr, SCALES_AHEAD: gl.constexpr,
    BODY: gl.constexpr, EVEN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out (M, N) = x (M, K) · w (N, K)^T, 32 rows of w a program. There is room for 16 warps a multiprocessor: two
    programs, one wave of most layers, or one. With room for more, those that start early crowd on the multiprocessors
    that are free first.
    x_ptr: pairs of activations; w_ptr: words of eight codes; each: slices of a warp, a multiple of BODY, which go to a
    turn of the loop; EVEN: there are as many for every warp; AHEAD: the first are brought to L2."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    row0 = gl.program_id(0) * ROWS
    gdc_launch_dependents()
    if SCALES_AHEAD:
        bring_to_l2(s_ptr, row0, N, s_row, slices * (8 if KIND == "nvfp4" else 4), WARPS)
    if AHEAD:
        bring_to_l2(w_ptr, row0, N, w_stride, gl.minimum(slices, WARPS) * 64, WARPS)
    words, scales = pointers(w_ptr, s_ptr, row0, N, w_stride, s_row, KIND, WARPS, mma)
    gdc_wait()
    ONCE: gl.constexpr = KIND != "int4"
    acc, worst = sums(words, scales, x_ptr, M, x_stride, slices, each, KIND, ONCE, BODY, EVEN, WARPS, mma)
    unit = 16384.0 if ONCE else 1.0
    if KIND == "mxfp4":
        worst = gl.max(gl.max(gl.max(worst.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1), axis=0)
        if worst > POWERS[1] - POWERS[0]:
            acc, _ = sums(words, scales, x_ptr, M, x_stride, slices, each, KIND, False, 1, False, WARPS, mma)
            unit = 1.0
    # Through shared memory by hand: gl.sum over the warps of acc took 3 us.
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    parts = gl.allocate_shared_memory(gl.float32, [WARPS, 16, 8, 2], in_order, acc)
    y = gl.sum(parts.load(parts_layout(WARPS)), axis=0)
    Y: gl.constexpr = y.type.layout  # row, column, tile
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, Y))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, Y))), 0), 2)
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, Y))), 0), 1)
    row = row0 + row + 16 * tile
    y = y * unit
    if GLOBAL:
        y = y * gl.load(g_ptr)
    if BIAS:
        y = y + gl.load(bias_ptr + row, mask=row < N, other=0).to(gl.float32)
    gl.store(out_ptr + m * out_stride + row, y.to(out_ptr.dtype.element_ty), mask=(row < N) & (m < M))


def turns(slices: int, warps: int) -> tuple[int, int]:
    """How many slices each of a program's warps takes in a turn of its loop, and how many it takes, all turns together.
    Whole turns for every warp need no masks."""
    each = triton.cdiv(slices, warps)
    if slices % warps == 0 and each % 4 != 3:
        body = 4 if each % 4 == 0 else 2 if each % 2 == 0 else 1
    else:
        body = 4 if each % 4 in (0, 3) else 2
    return body, triton.cdiv(each, body) * body


def w4_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype = torch.bfloat16,
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M <= 8, K) bf16 by packed weights (N, K/2 bytes) transposed: what `weights_matmul.takes`."""
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    x = x if aligned else x.clone(memory_format=torch.contiguous_format)
    if kind == "nvfp4":
        scale = one_byte_scales(scale).view(torch.int16)
    else:
        scale = scale if kind == "int4" else scale.view(torch.uint8)
        scale = scale if scale.stride(1) == 1 else scale.contiguous()
    row_bytes = k // (16 if kind == "nvfp4" else 32)
    warps = WARPS[triton.cdiv(n, ROWS.value) <= sm_count(x.device.index)]
    body, each = turns(k // 128, warps)
    sixteens = (row_bytes | scale.stride(0) * scale.element_size() | scale.data_ptr()) % 16 == 0
    launch(
        w4_gemv_kernel,
        (triton.cdiv(n, ROWS.value),),
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
        each,
        KIND=kind,
        GLOBAL=global_scale is not None,
        BIAS=bias is not None,
        AHEAD=kind != "int4" or m <= 2,
        SCALES_AHEAD=kind != "int4" and sixteens,  # of which INT4 has hardly any
        BODY=body,
        EVEN=each * warps == k // 128,
        WARPS=warps,
        num_warps=warps,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return out
