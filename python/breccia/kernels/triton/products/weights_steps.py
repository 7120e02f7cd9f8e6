# SPDX-License-Identifier: Apache-2.0
"""What a consumer of `hopper_weights` does with one slice of K: takes its words, decodes them, multiplies. p is the
`Product` there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from breccia.kernels.triton.device.decode import decode_unit, load_scales, words_layout
from breccia.kernels.triton.products.hopper_dense import fma


@gluon.jit
def take_words(p, WHICH: gl.constexpr, it, more):
    """The words of the it-th slice. Their buffer is free once products have taken all of them, not when the loads are
    issued: behind the tensor cores' own reads those can outlast the next copy's way here."""
    stage = it % p.W_STAGES
    mbarrier.wait(p.w_ready.index(stage), (it // p.W_STAGES) & 1, pred=more)
    w = p.w_bufs.index(stage)
    WORDS: gl.constexpr = w.shape[1]
    w = w if p.SPLIT else w.slice(WHICH * 64, 64)
    return w.load(words_layout(WORDS))


@gluon.jit
def scales(p, rows, base, k, mma: gl.constexpr):
    return load_scales(p.s_ptr, rows, base, k, p.slices, p.N, p.s_row, p.s_col, p.KIND, p.SN, p.ROUND, p.NATURAL, mma)


@gluon.jit
def decode(p, words, U: gl.constexpr, scale, ONCE: gl.constexpr, mma: gl.constexpr):
    return decode_unit(words, U, scale, p.KIND, p.FMT, p.ROUND, p.NATURAL, ONCE, mma)


@gluon.jit
def wait_for_x(p, at, more):
    """Waits for the at-th buffer of activations. It stands before the wait for the tensor cores: the compiler leaves
    what is decoded before it in their shadow."""
    mbarrier.wait(p.x_ready.index(at % p.X_STAGES), (at // p.X_STAGES) & 1, pred=more)


@gluon.jit
def free_x(p, at, pred):
    """Gives the at-th buffer of activations back."""
    mbarrier.arrive(p.x_free.index(at % p.X_STAGES), pred=pred)


@gluon.jit
def step_wide(
    p, WHICH: gl.constexpr, acc, a0, words, now, after, k, base, rows, s_at, first, last,
    ONCE: gl.constexpr,
):  # fmt: skip
    """Slice k, of which the first unit `a0` is decoded and its activations are here: each unit multiplies while the
    next one decodes. Returns the sum, the next slice's first unit and words, and in the place of `now` the scales of
    the slice four on."""
    BN: gl.constexpr = acc.type.shape[1]
    mma: gl.constexpr = acc.type.layout
    gl.static_assert(p.X_UNITS == 1)
    it = base + k
    more = k + p.STEP < last
    first = (2 * it) % p.X_STAGES
    second = (2 * it + 1) % p.X_STAGES
    start = acc if p.FOLD else gl.zeros([64, BN], gl.float32, mma)
    raw = warpgroup_mma(a0, p.x_bufs.index(first).permute((1, 0)), start, use_acc=p.FOLD, is_async=True)
    a1 = decode(p, words, 1, now, ONCE, mma)
    wait_for_x(p, 2 * it + 1, True)
    raw, a0 = warpgroup_mma_wait(0, deps=[raw, a0])
    raw = warpgroup_mma(a1, p.x_bufs.index(second).permute((1, 0)), raw, is_async=True)
    free_x(p, 2 * it, True)
    mbarrier.arrive(p.w_free.index(it % p.W_STAGES))
    words = take_words(p, WHICH, it + p.STEP, more)
    a0 = decode(p, words, 0, after, ONCE, mma)
    wait_for_x(p, 2 * (it + p.STEP), more)
    raw, a1 = warpgroup_mma_wait(0, deps=[raw, a1])
    free_x(p, 2 * it + 1, True)
    acc = raw if p.FOLD else fma(raw, gl.expand_dims(now.to(gl.float32), 1), acc)
    now = scales(p, rows, s_at, k + 4 * p.STEP, mma)
    return acc, a0, words, now


@gluon.jit
def wait_for_all_but_last():
    """Waits for all products but those of the unit issued last. Not `warpgroup_mma_wait`: the compiler takes sums that
    go through it for used, and would wait for each product before the next."""
    gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 1; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def step_stream(
    p, WHICH: gl.constexpr, acc, a0, words, now, after, k, base, rows, s_at, first, last,
    ONCE: gl.constexpr,
):  # fmt: skip
    """The same for wide tiles, without a pause of the tensor cores between units: a unit decodes behind the wait for
    the last but one, and before the products that need it, so that the compiler cannot take it out of their shadow."""
    mma: gl.constexpr = acc.type.tensor_type.layout
    gl.static_assert(p.X_UNITS == 1 and p.FOLD)
    at = 2 * (base + k)
    more = k + p.STEP < last
    acc = warpgroup_mma(a0, p.x_bufs.index(at % p.X_STAGES).permute((1, 0)), acc, is_async=True)
    wait_for_all_but_last()  # their registers are those of a1
    free_x(p, at - 2 * p.STEP + 1, k >= first + p.STEP)
    a1 = decode(p, words, 1, now, ONCE, mma)
    wait_for_x(p, at + 1, True)
    acc = warpgroup_mma(a1, p.x_bufs.index((at + 1) % p.X_STAGES).permute((1, 0)), acc, is_async=True)
    wait_for_all_but_last()
    free_x(p, at, more if p.TMA_STORE else True)  # the last slice's are for results
    mbarrier.arrive(p.w_free.index((base + k) % p.W_STAGES))
    words = take_words(p, WHICH, base + k + p.STEP, more)
    a0 = decode(p, words, 0, after, ONCE, mma)
    wait_for_x(p, at + 2 * p.STEP, more)
    now = scales(p, rows, s_at, k + 4 * p.STEP, mma)
    return acc, a0, words, now


@gluon.jit
def step_narrow(
    p, WHICH: gl.constexpr, acc, a0, a1, now, after, k, base, rows, s_at, first, last,
    ONCE: gl.constexpr,
):  # fmt: skip
    """The same where registers are plenty: slice k multiplies while the next one decodes."""
    BN: gl.constexpr = acc.type.shape[1]
    mma: gl.constexpr = acc.type.layout
    gl.static_assert(p.X_UNITS == 2)
    it = base + k
    more = k + p.STEP < last
    stage = it % p.X_STAGES
    start = acc if p.FOLD else gl.zeros([64, BN], gl.float32, mma)
    raw = warpgroup_mma(a0, p.x_bufs.index(2 * stage).permute((1, 0)), start, use_acc=p.FOLD, is_async=True)
    raw = warpgroup_mma(a1, p.x_bufs.index(2 * stage + 1).permute((1, 0)), raw, is_async=True)
    mbarrier.arrive(p.w_free.index(it % p.W_STAGES))
    words = take_words(p, WHICH, it + p.STEP, more)
    b0 = decode(p, words, 0, after, ONCE, mma)
    b1 = decode(p, words, 1, after, ONCE, mma)
    wait_for_x(p, it + p.STEP, more)
    raw, a0, a1 = warpgroup_mma_wait(0, deps=[raw, a0, a1])
    free_x(p, it, True)
    acc = raw if p.FOLD else fma(raw, gl.expand_dims(now.to(gl.float32), 1), acc)
    now = scales(p, rows, s_at, k + 4 * p.STEP, mma)
    return acc, b0, b1, now
