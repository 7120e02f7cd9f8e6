# SPDX-License-Identifier: Apache-2.0
"""FP8 by FP8, INT8 by INT8 and bf16 by bf16 products on raw tensors, on Hopper: operands (M, K) and (N, K), scales per
tensor, row or block, any shape."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from breccia.kernels.triton.products.add_parts import add_parts
from breccia.kernels.triton.products.code_sums import code_sums
from breccia.kernels.triton.products.configs import LARGE, Tile, dense_tile, experts_tile, fp8_tile
from breccia.kernels.triton.products.hopper_dense import dense_kernel
from breccia.kernels.triton.products.turn_scales import scales_along_rows
from breccia.kernels.triton.runtime import constant, launch

FLAT32 = NVMMASharedLayout(0, 32, 2)
CODES = {1: NVMMASharedLayout(128, 8, 2), 2: NVMMASharedLayout(128, 16, 2)}  # by bytes of an element


@cache
def sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def k_major(x: torch.Tensor) -> torch.Tensor:
    """x as the copy engine needs it: unit stride along K, rows 16-byte aligned. Copies only where that does not
    hold."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if x.stride(-1) == 1 and aligned and x.stride(0) >= x.shape[1]:
        return x
    rows, cols = x.shape
    whole = torch.empty((rows, -(-cols // 16) * 16), dtype=x.dtype, device=x.device)
    bits = torch.uint8 if x.element_size() == 1 else torch.int16
    whole.view(bits)[:, :cols].copy_(x.view(bits) if x.stride(-1) == 1 else x.T.view(bits).T)
    return whole[:, :cols]


def descriptor(x: torch.Tensor, box: list[int], layout: NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def dense_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    block: bool = False,
    fast: bool = False,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
    a_zero: torch.Tensor | None = None,
    b_zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """a (M, K) times b (N, K) transposed, both FP8, int8 or bfloat16.

    block=False: each scale has one element or one per row. block=True: each is (rows, K/128) or (rows/128, K/128),
    float32. `fast` leaves the whole sum of FP8 to the tensor cores' short accumulator (not with block scales).
    `a_zero`, `b_zero`: zero points of int8, one per row, not with block scales.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand(m, n))
    a, b = k_major(a), k_major(b)
    sms = sm_count(a.device.index)
    fp8, size = a.dtype.is_floating_point and a.element_size() == 1, a.element_size()
    fast = not block and (fast or not fp8)  # int32 and bf16 sums lose nothing
    if tile is None and fp8:
        tile = fp8_tile(m, n, k, "block" if block else "fast" if fast else "precise", sms)
    elif tile is None:
        tile = dense_tile(m, n, k, "bf16" if size == 2 else "int8", block, sms)
    if block:
        epilogue, sides = 0, [_block_scales(a_scale, m, False), _block_scales(b_scale, n, True)]
    else:
        epilogue = 1 if a_scale.numel() == 1 and b_scale.numel() == 1 else 2
        sides = [_Side(scale.reshape(-1), stride=int(scale.numel() > 1)) for scale in (a_scale, b_scale)]
    made, added = out, bias
    if tile.parts > 1:
        made, added = torch.empty((tile.parts, m, n), dtype=torch.float32, device=a.device), None
    rows, cols, zeros = a, b, [a_zero, b_zero]
    if tile.swap:
        rows, cols, zeros = b, a, [b_zero, a_zero]
        sides.reverse()
    totals: list[torch.Tensor | None] = [
        None if zeros[1] is None else code_sums(rows, zeros[0]),
        None if zeros[0] is None else code_sums(cols),
    ]
    _launch(rows, cols, sides, made, tile, fast, epilogue, added, zeros, totals)
    if tile.parts > 1:
        add_parts(made, bias, out)
    return out


def experts_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> torch.Tensor:
    """FP8 a (T, K) times expert e's b (E, N, K)[e] transposed, for rows offsets[e] to offsets[e + 1].

    a_scale is (T, K/128), b_scale (E, N, K/128) or (E, N/128, K/128), float32; K is a multiple of 16, b contiguous.
    """
    t, (experts, n) = a.shape[0], b.shape[:2]
    out = torch.empty((t, n), dtype=out_dtype, device=a.device)
    if t == 0 or n == 0:
        return out
    tile = experts_tile(t, experts, len(b_scale[0]) == n) if tile is None else tile
    a, b, b_scale = k_major(a), b.flatten(0, 1), b_scale.flatten(0, 1)
    along = scales_along_rows(a_scale)  # an expert's begin anywhere, and TMA reads from multiples of 16 bytes
    sides = [_Side(along, 3, along.stride(0)), _block_scales(b_scale, len(b), True)]
    _launch(a, b, sides, out, tile, False, 0, offsets=offsets, experts=experts)
    return out


def experts_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> torch.Tensor:
    """FP8 a (M, K) times b (N, K) transposed for each expert of its own part of K, offsets[e] to offsets[e + 1], which
    are multiples of 128: (E, M, N).

    a_scale is (M/128, K/128), b_scale (N/128, K/128), float32; M and K are multiples of 128, N is one of 8.
    """
    experts, m, n = offsets.shape[0] - 1, a.shape[0], b.shape[0]
    out = torch.empty((experts, m, n), dtype=out_dtype, device=a.device)
    if out.numel():
        tile = replace(LARGE["block"] if tile is None else tile, parts=experts)
        sides = [_block_scales(a_scale, m, True), _block_scales(b_scale, n, True)]
        _launch(k_major(a), k_major(b), sides, out, tile, False, 0, offsets=offsets, own_k=True)
    return out


def _launch(
    rows: torch.Tensor,
    cols: torch.Tensor,
    sides: list[_Side],
    made: torch.Tensor,
    tile: Tile,
    fast: bool,
    epilogue: int,
    added: torch.Tensor | None = None,
    zeros: list[torch.Tensor | None] | None = None,
    totals: list[torch.Tensor | None] | None = None,
    offsets: torch.Tensor | None = None,
    experts: int = 0,
    own_k: bool = False,
) -> None:
    """The kernel: `rows` and `cols` are its sides, `made` (M, N) or a part of K each (parts, M, N)."""
    zeros, totals = zeros or [None, None], totals or [None, None]
    size, device, sms = rows.element_size(), rows.device.index, sm_count(rows.device.index)
    (m, n), tma_store = made.shape[-2:], _stores_by_tma(made, tile)
    r, c = (n, m) if tile.swap else (m, n)
    row_tiles, col_tiles = triton.cdiv(r, tile.rows), triton.cdiv(c, tile.cols)
    tiles = (row_tiles + experts) * col_tiles * tile.parts  # at most: an expert's last tile may be a part of one
    launch(
        dense_kernel,
        (min(sms, tiles),),
        descriptor(rows, [tile.rows, 128 // size], CODES[size]),
        descriptor(cols, [tile.cols, 128 // size], CODES[size]),
        *_scale_descriptors(sides, tile, device),
        _out_descriptor(made.flatten(0, -2), tile, tma_store),
        made,
        sides[0].scale,
        sides[1].scale,
        *(sides[0].scale if part is None else part for part in (*zeros, *totals, added, offsets)),
        r,
        c,
        made.stride(-2),
        m * n,
        sides[0].stride,
        sides[1].stride,
        row_tiles,
        col_tiles,
        triton.cdiv(rows.shape[1] * size, 128),
        ROW_SCALE=sides[0].kind,
        COL_SCALE=sides[1].kind,
        ROW_ZERO=zeros[0] is not None,
        COL_ZERO=zeros[1] is not None,
        FAST=fast,
        EPILOGUE=epilogue,
        BIAS=added is not None,
        SWAP=tile.swap,
        TMA_STORE=tma_store,
        CONSUMERS=tile.consumers,
        WAVES=tile.waves,
        STAGES=tile.stages,
        OUT_BUFS=tile.out_bufs,
        GROUP=tile.group,
        PARTS=tile.parts,
        PAIRS=tile.pairs and not fast,
        EXPERTS=experts,
        EP=triton.next_power_of_2(experts + 1),
        OWN_K=own_k,
        num_warps=4,
        maxnreg=tile.maxnreg,
        launch_pdl=True,
    )


class _Side(NamedTuple):
    """The scales of one operand: `kind` 0 where the end of the kernel multiplies by them, 1 where a scale is one for
    128 rows, 2 where there is one per row and they are copied with the codes, from `along`, 3 where `scale` is that."""

    scale: torch.Tensor
    kind: int = 0
    stride: int = 0
    along: torch.Tensor | None = None


def _block_scales(scale: torch.Tensor, rows: int, is_weight: bool) -> _Side:
    """Of (rows, K/128) or (rows/128, K/128) scales."""
    if scale.shape[0] == rows and not (is_weight and rows == 1):
        return _Side(scale, 2, along=scales_along_rows(scale))
    flat = scale if scale.dtype == torch.float32 and scale.stride(1) == 1 else scale.float().contiguous()
    return _Side(flat, 1, flat.stride(0))


def _stores_by_tma(made: torch.Tensor, tile: Tile) -> bool:
    aligned = made.stride(-2) % 8 == 0 and made.data_ptr() % 16 == 0
    return not tile.swap and made.element_size() == 2 and aligned and tile.cols >= 64


def _scale_descriptors(sides: list[_Side], tile: Tile, device: int) -> list[TensorDescriptor]:
    """One for rows and one for columns; where a side has none, of something that is not read."""
    some = next((side.along for side in sides if side.along is not None), None)
    made = []
    for side, box in zip(sides, (max(tile.rows, 32), max(tile.cols, 32)), strict=True):
        along = side.along if side.along is not None else zero_scales(device) if some is None else some
        made.append(descriptor(along, [1, box if side.kind == 2 else 32], FLAT32))
    return made


def _out_descriptor(made: torch.Tensor, tile: Tile, tma_store: bool) -> TensorDescriptor:
    if tma_store:
        return descriptor(made, [64, tile.cols], NVMMASharedLayout(128, 16, 2))
    layout = NVMMASharedLayout(min(128, tile.cols * 2), 16, 2)
    return descriptor(zero_outputs(made.device.index), [8, tile.cols], layout)


@cache
def zero_scales(index: int) -> torch.Tensor:
    """Stands where a kernel takes a scale descriptor it does not read."""
    return constant(lambda: torch.zeros((1, 32), dtype=torch.float32, device=f"cuda:{index}"))


@cache
def zero_outputs(index: int) -> torch.Tensor:
    return constant(lambda: torch.zeros((8, 256), dtype=torch.bfloat16, device=f"cuda:{index}"))
