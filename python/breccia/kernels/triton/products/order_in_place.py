# SPDX-License-Identifier: Apache-2.0
# Device code: an `if` of a constant around another is a compile-time branch.
# ruff: noqa: SIM102
"""Warps of `hopper_weights` that bring slices of 128 of K into another order in shared memory, where they lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from breccia.kernels.triton.device.decode import TURN_NIBBLES_ASM, TURN_PAIRS_ASM
from breccia.kernels.triton.products.scale_range import any_outside


@gluon.constexpr_function
def turn_layout(rows, bits):
    """[8 or 16 rows, 128 of K] on one warp. A thread has whole 16 bytes before and after the turn, and eight threads
    side by side have eight rows, so that no two of them want the same banks."""
    own, others = ([32, 64], [8, 16]) if bits == 4 else ([16, 32], [8, 64])
    lanes = 2 if rows == 8 else 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i] for i in range(3)] + [[0, k] for k in own + others[lanes:]],
        lane_bases=[[1 << i, 0] for i in range(rows.bit_length() - 1)] + [[0, k] for k in others[:lanes]],
        warp_bases=[],
        block_bases=[],
        shape=[rows, 128],
    )


@gluon.jit
def order_x(p, WHICH: gl.constexpr, first, end):
    """Brings every other slice of the activations into the order of `order_kernel`, in place: no round trip through
    global memory, no kernel to wait for."""
    BN: gl.constexpr = p.x_bufs.shape[1]
    ROWS: gl.constexpr = 8 if BN == 8 else 16
    BITS: gl.constexpr = 4 if p.w_desc.block_type.shape[1] == 16 else 8
    L: gl.constexpr = turn_layout(ROWS, BITS)
    slices = p.x_bufs._reinterpret(gl.bfloat16, [p.X_STAGES, BN, 128], p.x_desc.layout)
    for k in range(first + WHICH, end, 2):
        stage = k % p.X_STAGES
        mbarrier.wait(p.x_here.index(stage), (k // p.X_STAGES) & 1)
        for r in gl.static_range(0, BN, ROWS):
            part = slices.index(stage).slice(r, ROWS)
            x = part.load(L)
            if BITS == 4:
                x = gl.permute(gl.reshape(x, [ROWS, 4, 4, 2, 2, 2]), (0, 2, 4, 5, 1, 3))
            else:
                x = gl.permute(gl.reshape(x, [ROWS, 2, 4, 4, 2, 2]), (0, 1, 3, 4, 2, 5))
            part.store(gl.reshape(x, [ROWS, 128]))
        fence_async_shared()
        mbarrier.arrive(p.x_ready.index(stage))


@gluon.constexpr_function
def turn_words_layout(words):
    """[32 rows, 16 or 32 words] on one warp, a row a thread: eight threads side by side want different banks."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i] for i in range(words.bit_length() - 1)],
        lane_bases=[[1 << i, 0] for i in range(5)],
        warp_bases=[],
        block_bases=[],
        shape=[32, words],
    )


@gluon.jit
def order_words(p, WHICH: gl.constexpr, stage, phase):
    """Brings every other slice of the weights into the order in which they decode to the activations' own."""
    ROWS: gl.constexpr = p.w_bufs.shape[1]
    WORDS: gl.constexpr = p.w_bufs.shape[2]
    L: gl.constexpr = turn_words_layout(WORDS)
    BLOCKS: gl.constexpr = WORDS // 4
    TURN: gl.constexpr = TURN_NIBBLES_ASM if WORDS == 16 else TURN_PAIRS_ASM
    for _ in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        for _ in range(0, p.padded(), 2):
            mbarrier.wait(p.w_here.index(stage), phase)
            for r in gl.static_range(0, ROWS, 32):
                part = p.w_bufs.index(stage).slice(r, 32)
                even, odd = gl.split(gl.reshape(part.load(L), [32, BLOCKS, 2, 2]))
                w0, w2 = gl.split(even)
                w1, w3 = gl.split(odd)
                w0, w1, w2, w3 = gl.inline_asm_elementwise(
                    TURN, "=&r,=&r,=&r,=&r,r,r,r,r", [w0, w1, w2, w3],
                    dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
                )  # fmt: skip
                w = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # row, block, t's high bit, its low bit
                w = gl.permute(gl.reshape(w, [32, BLOCKS // 4, 4, 4]), (0, 1, 3, 2))
                part.store(gl.convert_layout(gl.reshape(w, [32, WORDS]), L, assert_trivial=True))
            fence_async_shared()
            mbarrier.arrive(p.w_ready.index(stage))
            stage += 2
            if stage >= p.W_STAGES:
                stage = WHICH
                phase ^= 1
    return stage, phase


@gluon.jit
def order_slices(p, WHICH: gl.constexpr):
    if p.ORDER == "w":
        stage, phase = order_words(p, WHICH, gl.to_tensor(WHICH), gl.to_tensor(0))
        if p.ONCE:
            if any_outside(gl.to_tensor(0)):
                order_words(p, WHICH, stage, phase)
    else:
        count = p.padded()
        order_x(p, WHICH, 0, count)
        if p.ONCE:
            if any_outside(gl.to_tensor(0)):
                order_x(p, WHICH, count, 2 * count)
