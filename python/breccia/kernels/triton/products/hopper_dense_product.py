# SPDX-License-Identifier: Apache-2.0
"""What all warps of the Hopper kernel of dense operands know of a product, and which tile of it a number means."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@gluon.jit
def tile_position(tile, row_tiles, col_tiles, GROUP: gl.constexpr):
    """Tiles in bands of GROUP row tiles, so that concurrent tiles share operands in the L2 cache."""
    band = tile // (GROUP * col_tiles)
    first = band * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    inside = tile - band * (GROUP * col_tiles)
    return first + inside % height, inside // height


@gluon.jit
def tiles_along(count, SIZE: gl.constexpr):
    return (gl.maximum(count, 0) + SIZE - 1) // SIZE


@gluon.jit
def count_tiles(offset_ptr, activations, other_tiles, SIZE: gl.constexpr, EXPERTS: gl.constexpr, EP: gl.constexpr):
    """Tiles of all experts and of the rows of none, where every SIZE activations have `other_tiles`."""
    at = gl.arange(0, EP, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first = gl.load(offset_ptr + at, mask=at <= EXPERTS, other=0).to(gl.int32)
    last = gl.load(offset_ptr + at + 1, mask=at < EXPERTS, other=0).to(gl.int32)
    last = gl.where(at == EXPERTS, activations, last)
    return gl.sum(gl.where(at <= EXPERTS, tiles_along(last - first, SIZE), 0), 0) * other_tiles


@gluon.jit
def wait_for_kernel_before(m, n):
    """`gdc_wait`, on the condition that the numbers of a tile are not negative: so the compiler leaves their divisions
    before it, where they cost nothing. Returns them."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred known; .reg .b32 both;
        or.b32 both, $2, $3; setp.ge.s32 known, both, 0; @known griddepcontrol.wait; mov.b32 $0, $2; mov.b32 $1, $3;
        }""",
        "=&r,=r,r,r", [m, n], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@aggregate
class Product:
    """What every warp knows. ROW_SCALE, COL_SCALE: what each slice of K is multiplied by, nothing (0), one scale of the
    tile (1) or one of each row or column, which come by TMA (2) or, where no multiple of 16 bytes is sure to be before
    them, from where they lie, [K, rows] (3); EPILOGUE: the same of the whole sum. ROW_ZERO, COL_ZERO: integers of
    rows or columns have zero points; `total` is what each then takes of the other side. FAST: the tensor cores keep the
    sum. SWAP: rows are the output's columns. A consumer has WAVES times 64 rows and OUT_BUFS buffers for results.

    With EXPERTS columns are the weights, those of all one after the other, and `offset_ptr` says which rows are whose;
    those of none are zeros in the output. Tiles are dealt out expert by expert, all_tiles in all.

    With OWN_K the parts of K are those of experts, which `offset_ptr` says in multiples of a slice: each is a result of
    its own, one under the other in the output."""

    row_desc: tma.tensor_descriptor
    col_desc: tma.tensor_descriptor
    row_scale_desc: tma.tensor_descriptor
    col_scale_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    out_ptr: gl.tensor
    row_scale_ptr: gl.tensor
    col_scale_ptr: gl.tensor
    row_zero_ptr: gl.tensor
    col_zero_ptr: gl.tensor
    row_total_ptr: gl.tensor
    col_total_ptr: gl.tensor
    bias_ptr: gl.tensor
    offset_ptr: gl.tensor
    row_bufs: gl.shared_memory_descriptor
    col_bufs: gl.shared_memory_descriptor
    row_scale_bufs: gl.shared_memory_descriptor
    col_scale_bufs: gl.shared_memory_descriptor
    out_bufs: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    R: gl.tensor
    C: gl.tensor
    out_stride: gl.tensor
    part_stride: gl.tensor
    row_scale_stride: gl.tensor
    col_scale_stride: gl.tensor
    row_tiles: gl.tensor
    col_tiles: gl.tensor
    k_tiles: gl.tensor
    all_tiles: gl.tensor
    ROW_SCALE: gl.constexpr
    COL_SCALE: gl.constexpr
    ROW_ZERO: gl.constexpr
    COL_ZERO: gl.constexpr
    FAST: gl.constexpr
    EPILOGUE: gl.constexpr
    BIAS: gl.constexpr
    SWAP: gl.constexpr
    TMA_STORE: gl.constexpr
    WAVES: gl.constexpr
    STAGES: gl.constexpr
    OUT_BUFS: gl.constexpr
    GROUP: gl.constexpr
    PARTS: gl.constexpr
    PAIRS: gl.constexpr
    EXPERTS: gl.constexpr
    OWN_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, row_desc, col_desc, row_scale_desc, col_scale_desc, out_desc, out_ptr, row_scale_ptr, col_scale_ptr,
        row_zero_ptr, col_zero_ptr, row_total_ptr, col_total_ptr, bias_ptr, offset_ptr, row_bufs, col_bufs,
        row_scale_bufs, col_scale_bufs, out_bufs, ready, free, R, C, out_stride, part_stride, row_scale_stride,
        col_scale_stride, row_tiles, col_tiles, k_tiles, all_tiles, ROW_SCALE, COL_SCALE, ROW_ZERO, COL_ZERO, FAST,
        EPILOGUE, BIAS, SWAP, TMA_STORE, WAVES, STAGES, OUT_BUFS, GROUP, PARTS, PAIRS, EXPERTS,
        OWN_K,
    ):  # fmt: skip
        self.row_desc, self.col_desc = row_desc, col_desc
        self.row_scale_desc, self.col_scale_desc, self.out_desc = row_scale_desc, col_scale_desc, out_desc
        self.out_ptr, self.bias_ptr, self.offset_ptr = out_ptr, bias_ptr, offset_ptr
        self.row_scale_ptr, self.col_scale_ptr = row_scale_ptr, col_scale_ptr
        self.row_zero_ptr, self.col_zero_ptr = row_zero_ptr, col_zero_ptr
        self.row_total_ptr, self.col_total_ptr = row_total_ptr, col_total_ptr
        self.row_bufs, self.col_bufs, self.out_bufs = row_bufs, col_bufs, out_bufs
        self.row_scale_bufs, self.col_scale_bufs = row_scale_bufs, col_scale_bufs
        self.ready, self.free = ready, free
        self.R, self.C, self.out_stride, self.part_stride = R, C, out_stride, part_stride
        self.row_scale_stride, self.col_scale_stride = row_scale_stride, col_scale_stride
        self.row_tiles, self.col_tiles, self.k_tiles = row_tiles, col_tiles, k_tiles
        self.all_tiles = all_tiles
        self.ROW_SCALE, self.COL_SCALE = gl.constexpr(ROW_SCALE), gl.constexpr(COL_SCALE)
        self.ROW_ZERO, self.COL_ZERO = gl.constexpr(ROW_ZERO), gl.constexpr(COL_ZERO)
        self.FAST, self.EPILOGUE, self.BIAS = gl.constexpr(FAST), gl.constexpr(EPILOGUE), gl.constexpr(BIAS)
        self.SWAP, self.TMA_STORE = gl.constexpr(SWAP), gl.constexpr(TMA_STORE)
        self.WAVES, self.STAGES = gl.constexpr(WAVES), gl.constexpr(STAGES)
        self.OUT_BUFS, self.GROUP = gl.constexpr(OUT_BUFS), gl.constexpr(GROUP)
        self.PARTS, self.PAIRS, self.EXPERTS = gl.constexpr(PARTS), gl.constexpr(PAIRS), gl.constexpr(EXPERTS)
        self.OWN_K = gl.constexpr(OWN_K)

    @gluon.jit
    def first_expert(self):
        """(expert, the number of its first tile, its first activation, the one after its last): see `next_expert`."""
        none = gl.to_tensor(0)
        if self.EXPERTS == 0:
            return none, none, none, none
        return none, none, self.offset(0), self.offset(1)

    @gluon.jit
    def offset(self, expert):
        return gl.load(self.offset_ptr + expert).to(gl.int32)

    @gluon.jit
    def next_expert(self, tile, expert, before, first, last):
        """The expert whose tile it is, on from one at or before it; EXPERTS is who has the rows of none."""
        BM: gl.constexpr = self.row_bufs.shape[1]
        if self.EXPERTS == 0:
            return expert, before, first, last
        count = tiles_along(last - first, BM) * self.col_tiles
        while (tile >= before + count) & (expert < self.EXPERTS):
            before += count
            expert += 1
            first = last
            last = self.offset(gl.minimum(expert + 1, self.EXPERTS))
            last = gl.where(expert == self.EXPERTS, self.R, last)
            count = tiles_along(last - first, BM) * self.col_tiles
        return expert, before, first, last

    @gluon.jit
    def tiles(self):
        if self.EXPERTS > 0:
            return self.all_tiles
        return self.row_tiles * self.col_tiles * self.PARTS

    @gluon.jit
    def place(self, tile, before, count):
        """Of a tile's number: (row tile, column tile, part of K); of an expert's with `count` activations, whose first
        tile is the one `before`, counted from its first ones."""
        if self.EXPERTS > 0:
            row_tiles = tiles_along(count, self.row_bufs.shape[1])
            m, n = tile_position(tile - before, row_tiles, self.col_tiles, self.GROUP)
            return m, n, 0
        part = 0
        if self.PARTS > 1:
            part = tile // (self.row_tiles * self.col_tiles)
            tile -= part * (self.row_tiles * self.col_tiles)
        m, n = tile_position(tile, self.row_tiles, self.col_tiles, self.GROUP)
        return m, n, part

    @gluon.jit
    def corner(self, m, n, first):
        """A tile's first row and column in the output, where those of its expert begin with the row `first`."""
        row, col = m * self.row_bufs.shape[1], n * self.col_bufs.shape[1]
        if self.EXPERTS > 0:
            return first + row, col
        return row, col

    @gluon.jit
    def scale_row(self, col, cols, expert):
        """Of the scales of 128 columns each, with `cols` columns an expert, that of one; rows of none have the last
        one's, and no use for it."""
        if self.EXPERTS > 0:
            return gl.minimum(expert, self.EXPERTS - 1) * ((cols + 127) // 128) + col // 128
        return col // 128

    @gluon.jit
    def slices(self, part, expert):
        """Of a part of K: (its first slice, the one after its last)."""
        if self.EXPERTS > 0:
            return 0, gl.where(expert < self.EXPERTS, self.k_tiles, 0)
        if self.OWN_K:
            SLICE: gl.constexpr = self.row_bufs.shape[2]
            return self.offset(part) // SLICE, self.offset(part + 1) // SLICE
        if self.PARTS == 1:
            return 0, self.k_tiles
        length = (self.k_tiles + self.PARTS - 1) // self.PARTS
        return part * length, gl.minimum((part + 1) * length, self.k_tiles)
