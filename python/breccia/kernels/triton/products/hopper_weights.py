# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return and an `if` of a constant around another are compile-time branches.
# ruff: noqa: RET505, SIM102
"""bf16 activations by quantized weights on Hopper, in Gluon: TMA brings packed weights and activations to shared
memory, weights decode on the way to the registers and feed the tensor cores as their register operand.

A thread of the register operand holds, of every 16 along K, elements 2t, 2t+1, 2t+8 and 2t+9 of a row (t = lane mod
4). A product does not care in which order K runs, so the order is chosen for the weights: thread t takes 16 consecutive
bytes (`decode.py`), and the activations are brought into the same order, by `order_kernel` or, where they are few, by
two warps of the product (`order_in_place.py`). Where they are many, those warps turn the weights instead, which are
fewer bytes, and K keeps its order. Nor does it care which weight is in which row: lane g's two rows are neighbours, so
that a thread stores pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents

from breccia.kernels.triton.products.hopper_dense_product import tile_position, wait_for_kernel_before
from breccia.kernels.triton.products.order_in_place import order_slices
from breccia.kernels.triton.products.scale_range import any_outside, look_at_scales
from breccia.kernels.triton.products.weights_steps import (
    decode,
    free_x,
    scales,
    step_narrow,
    step_stream,
    step_wide,
    take_words,
    wait_for_x,
)

UNIT = gl.constexpr(64)


@aggregate
class Product:
    """What every warp knows. KIND: nvfp4, mxfp4, int4, mxfp8, block (one float per SN rows and 128 of K) or whole (one
    per row or for all); FMT: the element of the 8-bit kinds. ROUND: the floats of int4 and block are multiplied into
    the weights, which rounds them to bf16; else they multiply the float32 sum of each slice. SPLIT: the consumers
    share 64 rows of w and divide K, one tile a program; else each has 64 rows of its own. ORDER: two warps
    bring the activations into the weights' order ("x") or the weights into theirs ("w"), or a kernel did before ("").
    X_UNITS: units of K in one buffer of activations, of which there are X_STAGES. TMA_STORE: results leave through
    these buffers. parts: into how many parts K is divided, each the work of a program of its own, whose float32 sums
    are the rows `part * M` and on of the output."""

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    s_ptr: gl.tensor
    g_ptr: gl.tensor
    bias_ptr: gl.tensor
    out_ptr: gl.tensor
    table_ptr: gl.tensor
    x_bufs: gl.shared_memory_descriptor
    w_bufs: gl.shared_memory_descriptor
    red_bufs: gl.shared_memory_descriptor
    x_here: gl.shared_memory_descriptor
    x_ready: gl.shared_memory_descriptor
    x_free: gl.shared_memory_descriptor
    w_here: gl.shared_memory_descriptor
    w_ready: gl.shared_memory_descriptor
    w_free: gl.shared_memory_descriptor
    N: gl.tensor
    M: gl.tensor
    s_row: gl.tensor
    s_col: gl.tensor
    s_expert: gl.tensor
    out_stride: gl.tensor
    row_tiles: gl.tensor
    col_tiles: gl.tensor
    slices: gl.tensor
    fours: gl.tensor
    parts: gl.tensor
    KIND: gl.constexpr
    FMT: gl.constexpr
    SN: gl.constexpr
    ROUND: gl.constexpr
    GLOBAL: gl.constexpr
    BIAS: gl.constexpr
    EXPERTS: gl.constexpr
    SPLIT: gl.constexpr
    ORDER: gl.constexpr
    CONSUMERS: gl.constexpr
    X_STAGES: gl.constexpr
    X_UNITS: gl.constexpr
    W_STAGES: gl.constexpr
    GROUP: gl.constexpr
    FOLD: gl.constexpr
    NATURAL: gl.constexpr
    TMA_STORE: gl.constexpr
    STEP: gl.constexpr
    ONCE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x_desc, w_desc, out_desc, s_ptr, g_ptr, bias_ptr, out_ptr, table_ptr, x_bufs, w_bufs, red_bufs,
        x_here, x_ready, x_free, w_here, w_ready, w_free, N, M, s_row, s_col, s_expert, out_stride,
        row_tiles, col_tiles, slices, fours, parts, KIND, FMT, SN, ROUND, GLOBAL, BIAS, EXPERTS, SPLIT, ORDER,
        CONSUMERS, X_STAGES, X_UNITS, W_STAGES, GROUP, TMA_STORE,
    ):  # fmt: skip
        self.x_desc, self.w_desc, self.out_desc = x_desc, w_desc, out_desc
        self.s_ptr, self.g_ptr, self.bias_ptr, self.out_ptr = s_ptr, g_ptr, bias_ptr, out_ptr
        self.table_ptr = table_ptr
        self.x_bufs, self.w_bufs, self.red_bufs = x_bufs, w_bufs, red_bufs
        self.x_here, self.x_ready, self.x_free = x_here, x_ready, x_free
        self.w_here, self.w_ready, self.w_free = w_here, w_ready, w_free
        self.N, self.M, self.out_stride = N, M, out_stride
        self.s_row, self.s_col, self.s_expert = s_row, s_col, s_expert
        self.row_tiles, self.col_tiles = row_tiles, col_tiles
        self.slices, self.fours, self.parts = slices, fours, parts
        self.KIND, self.FMT, self.SN, self.ROUND = (gl.constexpr(v) for v in (KIND, FMT, SN, ROUND))
        self.GLOBAL, self.BIAS, self.EXPERTS = gl.constexpr(GLOBAL), gl.constexpr(BIAS), gl.constexpr(EXPERTS)
        self.SPLIT, self.ORDER = gl.constexpr(SPLIT), gl.constexpr(ORDER)
        self.CONSUMERS, self.GROUP = gl.constexpr(CONSUMERS), gl.constexpr(GROUP)
        self.X_STAGES, self.X_UNITS, self.W_STAGES = (gl.constexpr(v) for v in (X_STAGES, X_UNITS, W_STAGES))
        self.FOLD = gl.constexpr(ROUND or KIND not in ("int4", "block"))  # scales are part of the operand, or last
        self.TMA_STORE = gl.constexpr(TMA_STORE)
        self.NATURAL = gl.constexpr(ORDER == "w")
        self.STEP = gl.constexpr(CONSUMERS if SPLIT else 1)
        # First with one product by the scales, again with two where it does not reach.
        self.ONCE = gl.constexpr(KIND == "mxfp4" and ORDER != "")

    @gluon.jit
    def tiles(self):
        return self.row_tiles * self.col_tiles * self.parts

    @gluon.jit
    def padded(self):
        """Slices of a part of K in whole rounds of four a consumer. Past the end both operands are zeros."""
        return self.fours * (4 * self.STEP)

    @gluon.jit
    def position(self, tile, WAIT: gl.constexpr):
        """(first row of w, expert, first row of x, its end, part of K, its slices): no slices for rows of no expert.
        WAIT: for the kernel before this one, after what does not depend on it."""
        ROWS: gl.constexpr = self.w_desc.block_type.shape[0]
        BN: gl.constexpr = self.x_desc.block_type.shape[0]
        part = tile % self.parts
        m, n = tile_position(tile // self.parts, self.row_tiles, self.col_tiles, self.GROUP)
        rounds = self.padded()
        if WAIT or self.EXPERTS > 0:
            m, n = wait_for_kernel_before(m, n)
        if self.EXPERTS > 0:
            expert = gl.load(self.table_ptr + n * 3)
            first = gl.load(self.table_ptr + n * 3 + 1)
            end = gl.load(self.table_ptr + n * 3 + 2)
            none = expert >= self.EXPERTS
            return (
                m * ROWS, gl.where(none, 0, expert), first, gl.where(none, self.M, end), part, gl.where(none, 0, rounds)
            )  # fmt: skip
        else:
            return m * ROWS, m * 0, n * BN, self.M, part, rounds


@gluon.jit
def bring_weights(p, stage, phase):
    ROWS: gl.constexpr = p.w_desc.block_type.shape[0]
    WORDS: gl.constexpr = p.w_desc.block_type.shape[1]
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        # Where a kernel orders the activations, it has waited for who wrote the weights.
        row, expert, _, _, part, rounds = p.position(tile, p.ORDER != "")
        first = part * rounds
        for k in range(rounds):
            mbarrier.wait(p.w_free.index(stage), phase)
            bar = (p.w_here if p.ORDER == "w" else p.w_ready).index(stage)
            mbarrier.expect(bar, ROWS * WORDS * 4)
            tma.async_copy_global_to_shared(
                p.w_desc, [expert * p.N + row, (first + k) * WORDS], bar, p.w_bufs.index(stage)
            )
            stage += 1
            if stage == p.W_STAGES:
                stage = 0
                phase ^= 1
    return stage, phase


@gluon.jit
def weights_producer(p):
    stage, phase = bring_weights(p, gl.to_tensor(0), gl.to_tensor(1))
    if p.ONCE:
        if any_outside(look_at_scales(p, 0)):  # nothing else to do while what was brought is being multiplied
            bring_weights(p, stage, phase)


@gluon.jit
def bring_activations(p, stage, phase):
    BN: gl.constexpr = p.x_desc.block_type.shape[0]
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        _, _, col, _, part, rounds = p.position(tile, True)
        first = part * rounds * 2
        for k in range(rounds * (2 // p.X_UNITS)):
            mbarrier.wait(p.x_free.index(stage), phase)
            bar = (p.x_here if p.ORDER == "x" else p.x_ready).index(stage)
            mbarrier.expect(bar, p.X_UNITS * BN * UNIT * 2)
            for u in gl.static_range(p.X_UNITS):
                at = (first + k * p.X_UNITS + u) * UNIT
                tma.async_copy_global_to_shared(p.x_desc, [col, at], bar, p.x_bufs.index(stage * p.X_UNITS + u))
            stage += 1
            if stage == p.X_STAGES:
                stage = 0
                phase ^= 1
    return stage, phase


@gluon.jit
def activations_producer(p):
    stage, phase = bring_activations(p, gl.to_tensor(0), gl.to_tensor(1))
    if p.ONCE:
        if any_outside(look_at_scales(p, 1)):
            bring_activations(p, stage, phase)


@gluon.constexpr_function
def pairs_layout(cols):
    """The tensor cores' result with each thread's two rows, neighbours in w, as its first register pair."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1]] + [[0, 8 << i] for i in range((cols // 8).bit_length() - 1)],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, cols],
    )


@gluon.jit
def load_ending(p, rows, expert, ONCE: gl.constexpr, L: gl.constexpr):
    """What the sums of 64 rows are multiplied by and what is added; asked for early, for it comes from far."""
    r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    if p.KIND == "whole":
        factor = gl.load(p.s_ptr + expert * p.s_expert + r * p.s_row, mask=r < p.N, other=0).to(gl.float32)
    else:
        factor = gl.full([64], 16384.0 if ONCE else 1.0, gl.float32, gl.SliceLayout(1, L))
    if p.GLOBAL:
        factor *= gl.load(p.g_ptr + expert)
    if p.BIAS:
        return factor, gl.load(p.bias_ptr + r, mask=r < p.N, other=0).to(gl.float32)
    else:
        return factor, factor


@gluon.jit
def finish(p, acc, factor, bias):
    """Sums with rows in the tensor cores' order, times the scales that were left out, plus the bias; rows in order."""
    BN: gl.constexpr = acc.type.shape[1]
    acc = gl.reshape(gl.permute(gl.reshape(acc, [4, 2, 8, BN]), (0, 2, 1, 3)), [64, BN])
    acc = gl.convert_layout(acc, pairs_layout(BN), assert_trivial=True) * gl.expand_dims(factor, 1)
    return (acc + gl.expand_dims(bias, 1) if p.BIAS else acc).to(p.out_ptr.dtype.element_ty)


@gluon.jit
def store(p, results, rows, col, end):
    """out[x, w] in pairs along w."""
    L: gl.constexpr = results.type.layout
    r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    c = col + gl.arange(0, results.type.shape[1], layout=gl.SliceLayout(0, L))
    at = gl.expand_dims(c.to(gl.int64) * p.out_stride, 0) + gl.expand_dims(r, 1)
    inside = gl.expand_dims(r < p.N, 1) & gl.expand_dims(c < end, 0)
    gl.store(p.out_ptr + at, results, mask=inside)


@gluon.jit
def consumers_meet(p):
    """A barrier of the hardware that Triton leaves alone."""
    threads = gl.to_tensor(128 * p.CONSUMERS)
    gl.inline_asm_elementwise(
        "barrier.cta.sync 14, $1; mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_by_tma(p, WHICH: gl.constexpr, results, rows, col, at):
    """The same through shared memory: the at-th buffer of activations and the next, which nobody has given back, take
    64 columns each. A third of the instructions, which are cold where a program has one tile."""
    consumers_meet(p)
    free_x(p, at + 1 - WHICH, True)
    buffer = p.x_bufs.index((at + WHICH) % p.X_STAGES)
    buffer.store(gl.permute(results, (1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(p.out_desc, [col, rows], buffer)
    tma.store_wait(0)
    free_x(p, at + WHICH, True)


@gluon.jit
def multiply(p, WHICH: gl.constexpr, base, AGAIN: gl.constexpr):
    """All tiles of a program, for the first time (AGAIN: 0) or once more (1), from the base-th slice of its buffers on.
    Returns the base of what follows."""
    ONCE: gl.constexpr = p.KIND == "nvfp4" or (p.ONCE and AGAIN == 0)
    BN: gl.constexpr = p.x_bufs.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    STREAM: gl.constexpr = BN > 128  # elsewhere no faster, or slower (docs/design/0006-gpu-kernel-log.md)
    gl.static_assert(STREAM or not p.TMA_STORE)
    step: gl.constexpr = step_stream if STREAM else step_wide if p.X_UNITS == 1 else step_narrow
    FIRST: gl.constexpr = WHICH if p.SPLIT else 0
    S: gl.constexpr = p.STEP
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        row, expert, col, end, part, rounds = p.position(tile, p.ORDER != "")  # as the weights
        first = part * rounds
        last = first + rounds
        base -= first
        rows = row + (0 if p.SPLIT else WHICH * 64)
        acc = gl.zeros([64, BN], gl.float32, mma)
        factor, bias = load_ending(p, rows, expert, ONCE, pairs_layout(BN))
        if rounds > 0:
            at = expert.to(gl.int64) * p.s_expert
            s0 = scales(p, rows, at, first + FIRST, mma)
            s1 = scales(p, rows, at, first + FIRST + S, mma)
            s2 = scales(p, rows, at, first + FIRST + 2 * S, mma)
            s3 = scales(p, rows, at, first + FIRST + 3 * S, mma)
            words = take_words(p, WHICH, base + first + FIRST, True)
            a = decode(p, words, 0, s0, ONCE, mma)
            ahead = words if p.X_UNITS == 1 else decode(p, words, 1, s0, ONCE, mma)
            wait_for_x(p, (base + first + FIRST) * (2 // p.X_UNITS), True)
            if STREAM:
                acc = warpgroup_mma_init(acc)
            if AGAIN:  # rare, and long enough: a short body
                for k in range(first + FIRST, last, 2 * S):
                    acc, a, ahead, _ = step(p, WHICH, acc, a, ahead, s0, s1, k, base, rows, at, first, last, ONCE)
                    acc, a, ahead, _ = step(p, WHICH, acc, a, ahead, s1, s2, k + S, base, rows, at, first, last, ONCE)
                    s0 = s2
                    s1 = s3
                    s2 = scales(p, rows, at, k + 4 * S, mma)
                    s3 = scales(p, rows, at, k + 5 * S, mma)
                    if STREAM:
                        acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
            else:
                # Every set of scales has its own place in the body: moving one that is still being loaded waits for it.
                # The loop counts from zero, so that where eight buffers go around their numbers are constants.
                for start in range(0, rounds, 4 * S):
                    k = first + start + FIRST
                    acc, a, ahead, s0 = step(p, WHICH, acc, a, ahead, s0, s1, k, base, rows, at, first, last, ONCE)
                    acc, a, ahead, s1 = step(p, WHICH, acc, a, ahead, s1, s2, k + S, base, rows, at, first, last, ONCE)
                    acc, a, ahead, s2 = step(
                        p, WHICH, acc, a, ahead, s2, s3, k + 2 * S, base, rows, at, first, last, ONCE
                    )
                    acc, a, ahead, s3 = step(
                        p, WHICH, acc, a, ahead, s3, s0, k + 3 * S, base, rows, at, first, last, ONCE
                    )
                    if STREAM:  # the compiler does not follow products from one round to the next
                        acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
            if STREAM:
                acc = warpgroup_mma_wait(0, deps=[acc])
                free_x(p, 2 * (base + last) - 1, not p.TMA_STORE)
            if not p.SPLIT:
                base += last
        if p.SPLIT and p.CONSUMERS > 1:
            if WHICH > 0:
                p.red_bufs.index(WHICH - 1).store(acc)
            consumers_meet(p)
            if WHICH == 0:
                for other in gl.static_range(p.CONSUMERS - 1):
                    acc += p.red_bufs.index(other).load(mma)
        if not p.SPLIT or WHICH == 0:
            results = finish(p, acc, factor, bias)
            if p.TMA_STORE:
                store_by_tma(p, WHICH, results, rows, col, 2 * base - 2)
            else:
                store(p, results, rows, part * p.M + col, part * p.M + end)
    return p.padded() if p.SPLIT else base


@gluon.jit
def consumer(p, WHICH: gl.constexpr):
    base = multiply(p, WHICH, gl.to_tensor(0), 0)
    if p.ONCE:
        if any_outside(gl.to_tensor(0)):
            multiply(p, WHICH, base, 1)


@gluon.jit
def barriers(N: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def start_barriers(p):
    """In turn, because the compiler lets all threads meet before the second of an array: that would be 34 times."""
    READERS: gl.constexpr = 1 if p.SPLIT else p.CONSUMERS
    for i in gl.static_range(max(p.X_STAGES, p.W_STAGES)):
        if i < p.X_STAGES:
            mbarrier.init(p.x_ready.index(i), count=1)
            mbarrier.init(p.x_free.index(i), count=READERS)
            if p.ORDER == "x":
                mbarrier.init(p.x_here.index(i), count=1)
        if i < p.W_STAGES:
            mbarrier.init(p.w_ready.index(i), count=1)
            mbarrier.init(p.w_free.index(i), count=READERS)
            if p.ORDER == "w":
                mbarrier.init(p.w_here.index(i), count=1)


@gluon.jit
def weights_kernel(
    x_desc, w_desc, out_desc, s_ptr, g_ptr, bias_ptr, out_ptr, table_ptr, N, M, s_row, s_expert, out_stride,
    row_tiles, col_tiles, slices, fours, parts, s_col, KIND: gl.constexpr, FMT: gl.constexpr, SN: gl.constexpr,
    ROUND: gl.constexpr, GLOBAL: gl.constexpr, BIAS: gl.constexpr, EXPERTS: gl.constexpr, SPLIT: gl.constexpr,
    ORDER: gl.constexpr, CONSUMERS: gl.constexpr, X_STAGES: gl.constexpr, X_UNITS: gl.constexpr, W_STAGES: gl.constexpr,
    GROUP: gl.constexpr, TMA_STORE: gl.constexpr,
):  # fmt: skip
    """out (M, N) = x (M, K) · w (N, K)^T, or by w[expert] for the rows that `table_ptr` gives each expert."""
    gdc_launch_dependents()
    BN: gl.constexpr = x_desc.block_type.shape[0]
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES * X_UNITS, BN, UNIT], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(
        gl.int32, [W_STAGES, w_desc.block_type.shape[0], w_desc.block_type.shape[1]], w_desc.layout
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    red_bufs = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS - 1 if SPLIT and CONSUMERS > 1 else 1, 64, BN if SPLIT else 8], flat
    )
    p = Product(  # integers that are one come as constants
        x_desc, w_desc, out_desc, s_ptr, g_ptr, bias_ptr, out_ptr, table_ptr, x_bufs, w_bufs, red_bufs,
        barriers(X_STAGES), barriers(X_STAGES), barriers(X_STAGES), barriers(W_STAGES), barriers(W_STAGES),
        barriers(W_STAGES),
        gl.to_tensor(N), gl.to_tensor(M), gl.to_tensor(s_row), gl.to_tensor(s_col), gl.to_tensor(s_expert),
        gl.to_tensor(out_stride), gl.to_tensor(row_tiles), gl.to_tensor(col_tiles), gl.to_tensor(slices),
        gl.to_tensor(fours), gl.to_tensor(parts), KIND, FMT, SN, ROUND, GLOBAL, BIAS, EXPERTS, SPLIT, ORDER,
        CONSUMERS, X_STAGES, X_UNITS, W_STAGES, GROUP, TMA_STORE,
    )  # fmt: skip
    start_barriers(p)
    if ORDER != "":
        OWN: gl.constexpr = 224 if BN > 128 else 208  # registers of a consumer's thread
        REST: gl.constexpr = 56 if BN > 128 else 80
        gl.warp_specialize(
            [
                (consumer, (p, 0)), (consumer, (p, 1)), (weights_producer, (p,)), (activations_producer, (p,)),
                (order_slices, (p, 0)), (order_slices, (p, 1)),
            ],
            [4, 1, 1, 1, 1],
            [OWN, REST, REST, REST, REST],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consumer, (p, 0)), (consumer, (p, 1)), (weights_producer, (p,)), (activations_producer, (p,))],
            [4, 1, 1],
            [240, 24, 24],
        )
