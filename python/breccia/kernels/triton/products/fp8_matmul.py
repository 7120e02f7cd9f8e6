# SPDX-License-Identifier: Apache-2.0
"""FP8 by FP8 products on raw tensors: operands (M, K) and (N, K), scales per tensor, row or block, any shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from breccia.kernels.triton.products.add_parts import add_parts
from breccia.kernels.triton.products.configs import Tile, fp8_tile
from breccia.kernels.triton.products.hopper_fp8 import fp8_kernel
from breccia.kernels.triton.products.turn_scales import scales_along_rows
from breccia.kernels.triton.runtime import launch

FLAT32 = NVMMASharedLayout(0, 32, 2)
FP8 = NVMMASharedLayout(128, 8, 2)


@cache
def sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def k_major(x: torch.Tensor) -> torch.Tensor:
    """x as the copy engine needs it: unit stride along K, rows 16-byte aligned. Copies only where that does not
    hold."""
    if x.stride(-1) == 1 and x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0:
        return x
    rows, cols = x.shape
    padded = torch.empty((rows, -(-cols // 16) * 16), dtype=x.dtype, device=x.device)[:, :cols]
    padded.view(torch.uint8).copy_(x.view(torch.uint8) if x.stride(-1) == 1 else x.T.view(torch.uint8).T)
    return padded


def descriptor(x: torch.Tensor, box: list[int], layout: NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def fp8_matmul(
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
) -> torch.Tensor:
    """a (M, K) times b (N, K) transposed.

    block=False: each scale has one element or one per row. block=True: a_scale is (M, K/128) and b_scale (N, K/128) or
    (N/128, K/128), float32. `fast` leaves the whole sum to the tensor cores' short accumulator (not with block scales).
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else out
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand(m, n))
    a, b = k_major(a), k_major(b)
    mode = "block" if block else "fast" if fast else "precise"
    sms = sm_count(a.device.index)
    tile = fp8_tile(m, n, k, mode, sms) if tile is None else tile
    kb = triton.cdiv(k, 128)
    kinds, strides = [0, 0], [0, 0]
    descs: list[Any] = [None, None]
    epilogue = 0
    if block:
        for i, (scale, rows) in enumerate(((a_scale, m), (b_scale, n))):
            if scale.shape[0] == rows and not (i == 1 and rows == 1):
                along = scales_along_rows(scale)
                kinds[i], descs[i] = 2, along
            else:
                flat = scale if scale.dtype == torch.float32 and scale.stride(1) == 1 else scale.float().contiguous()
                kinds[i], strides[i] = 1, flat.stride(0)
                a_scale, b_scale = (flat, b_scale) if i == 0 else (a_scale, flat)
    else:
        epilogue = 1 if a_scale.numel() == 1 and b_scale.numel() == 1 else 2
        if epilogue == 2:
            a_scale, b_scale = a_scale.reshape(-1).expand(m), b_scale.reshape(-1).expand(n)
            a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    made, added = out, bias
    if tile.parts > 1:
        made, added = torch.empty((tile.parts, m, n), dtype=torch.float32, device=a.device), None
    rows, cols = (b, a) if tile.swap else (a, b)
    scale_r, scale_c = (b_scale, a_scale) if tile.swap else (a_scale, b_scale)
    if tile.swap:
        kinds.reverse()
        descs.reverse()
        strides.reverse()
    tma_store = (
        not tile.swap
        and made.element_size() == 2
        and made.stride(-2) % 8 == 0
        and made.data_ptr() % 16 == 0
        and tile.cols >= 64
    )
    row_desc = descriptor(rows, [tile.rows, 128], FP8)
    col_desc = descriptor(cols, [tile.cols, 128], FP8)
    boxes = (max(tile.rows, 32), max(tile.cols, 32))
    scale_descs: list[Any] = []
    for kind, desc, box in zip(kinds, descs, boxes, strict=True):
        base = desc if kind == 2 else next((d for d in descs if d is not None), None)
        if base is None:
            base = zero_scales(rows.device.index)
        scale_descs.append(descriptor(base, [1, box if kind == 2 else 32], FLAT32))
    if tma_store:
        out_desc = descriptor(made, [64, tile.cols], NVMMASharedLayout(128, 16, 2))
    else:
        out_desc = descriptor(
            zero_outputs(rows.device.index), [8, tile.cols], NVMMASharedLayout(min(128, tile.cols * 2), 16, 2)
        )
    row_tiles, col_tiles = triton.cdiv(rows.shape[0], tile.rows), triton.cdiv(cols.shape[0], tile.cols)
    launch(
        fp8_kernel,
        (min(sms, row_tiles * col_tiles * tile.parts),),
        a,
        row_desc,
        col_desc,
        scale_descs[0],
        scale_descs[1],
        out_desc,
        made,
        scale_r,
        scale_c,
        scale_r if added is None else added,
        rows.shape[0],
        cols.shape[0],
        made.stride(-2),
        m * n,
        strides[0],
        strides[1],
        row_tiles,
        col_tiles,
        kb,
        ROW_SCALE=kinds[0],
        COL_SCALE=kinds[1],
        FAST=fast and not block,
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
        PAIRS=tile.pairs and not (fast and not block),
        num_warps=4,
        maxnreg=tile.maxnreg,
        launch_pdl=True,
    )
    if tile.parts > 1:
        add_parts(made, bias, out)
    return out


@cache
def zero_scales(index: int) -> torch.Tensor:
    """Stands where a kernel takes a scale descriptor it does not read."""
    return torch.zeros((1, 32), dtype=torch.float32, device=f"cuda:{index}")


@cache
def zero_outputs(index: int) -> torch.Tensor:
    return torch.zeros((8, 256), dtype=torch.bfloat16, device=f"cuda:{index}")
