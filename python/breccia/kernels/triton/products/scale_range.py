# SPDX-License-Identifier: Apache-2.0
"""Whether one product reaches all E8M0 scales of a program of `hopper_weights`: their 2^112-fold and its products with
E2M1 codes are bfloat16 numbers for bytes 15 ... 142."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def outside(words):
    """Of words of four scales, the highest bit of every byte that is beyond the range."""
    return (~(words ^ ((words & 0x7F7F7F7F) + 0x71717171))) & (0x80808080 - 2**32)


@gluon.jit
def eight_rows_outside(p, row, start, L: gl.constexpr):
    """`outside` of eight rows, from the start-th word on."""
    r = row + gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, L)), 1)
    k = start + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, L)), 0)
    words = p.s_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    stride = p.s_row if p.NATURAL else p.s_row // 4
    return outside(gl.load(words + r.to(gl.int64) * stride + k, mask=(r < p.N) & (k < p.slices), other=0x7F7F7F7F))


@gluon.jit
def look_at_scales(p, WHICH: gl.constexpr):
    """Whether a scale is outside, of every other eight rows of the program's tiles. For one warp."""
    ROWS: gl.constexpr = p.w_desc.block_type.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    found = gl.zeros([8, 32], gl.int32, L)
    for tile in range(gl.program_id(0), p.tiles(), gl.num_programs(0)):
        row, _, _, _, _, _ = p.position(tile, False)
        for start in range(0, p.slices, 32):
            if ROWS == 64:
                for part in gl.static_range(WHICH * 8, ROWS, 16):
                    found |= eight_rows_outside(p, row + part, start, L)
            else:  # registers for all loads at once are not there, but time is
                for part in range(WHICH * 8, ROWS, 16):
                    found |= eight_rows_outside(p, row + part, start, L)
    return gl.max(gl.max(gl.where(found != 0, 1, 0), axis=1), axis=0)


@gluon.jit
def any_outside(found):
    """Whether any of a program's twelve warps found a scale outside. They meet here, at a barrier of the hardware that
    Triton leaves alone."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred found;
        setp.ne.s32 found, $1, 0; barrier.cta.red.or.pred found, 15, 384, found; selp.b32 $0, 1, 0, found;
        }""",
        "=r,r", [found], dtype=gl.int32, is_pure=False, pack=1,
    ) != 0  # fmt: skip
