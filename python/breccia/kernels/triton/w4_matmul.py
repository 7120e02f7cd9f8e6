# SPDX-License-Identifier: Apache-2.0
"""bf16 rows by NVFP4, MXFP4 or INT4 (groups of 128) weights on Hopper, on raw tensors."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .configs import W4Tile, w4_tile
from .fp8_matmul import sm_count
from .hopper_w4 import permute_kernel, w4_kernel
from .runtime import launch

X_LAYOUT = NVMMASharedLayout(128, 16, 2)


def kind_of(element: str, sfmt: str, block: tuple[int, int]) -> str | None:
    """The kernel's name for a weight format; None for those it does not take."""
    return {
        ("e2m1", "e4m3", (1, 16)): "nvfp4",
        ("e2m1", "e8m0", (1, 32)): "mxfp4",
        ("int4", "float", (1, 128)): "int4",
    }.get((element, sfmt, block))


def takes(x: torch.Tensor, w: torch.Tensor, kind: str | None) -> bool:
    """Whether `w4_matmul` takes these operands: bf16, K a multiple of 128, whole words."""
    return (
        kind is not None
        and x.dtype == torch.bfloat16
        and x.shape[1] % 128 == 0
        and x.shape[1] > 0
        and w.stride(1) == 1
        and w.stride(0) % 4 == 0
        and w.data_ptr() % 4 == 0
    )


def w4_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype = torch.bfloat16,
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: W4Tile | None = None,
) -> torch.Tensor:
    """x (M, K) bf16 by packed weights (N, K/2 bytes) transposed."""
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    sms = sm_count(x.device.index)
    tile = w4_tile(m, n, k, kind, sms) if tile is None else tile
    x = x if x.stride(1) == 1 else x.contiguous()
    ordered = torch.empty((m, k), dtype=torch.bfloat16, device=x.device)
    launch(permute_kernel, (m, triton.cdiv(k, 1024)), x, x, ordered, k, x.stride(0), k, BK=1024, num_warps=4)
    scale = scale if kind == "int4" else scale.view(torch.uint8).contiguous()
    if kind == "nvfp4":
        scale = scale.view(torch.int16)
    elif kind == "int4" and scale.stride(1) != 1:
        scale = scale.contiguous()
    rows = 64 if tile.split else 64 * tile.consumers
    row_tiles, col_tiles = triton.cdiv(n, rows), triton.cdiv(m, tile.cols)
    tiles = row_tiles * col_tiles
    desc = TensorDescriptor(ordered, [m, k], [k, 1], [tile.cols, 128], X_LAYOUT)
    launch(
        w4_kernel,
        (tiles if tile.split else min(tiles, sms),),
        x,
        desc,
        w.view(torch.int32),
        scale,
        scale if global_scale is None else global_scale,
        scale if bias is None else bias,
        out,
        n,
        m,
        w.stride(0) // 4,
        scale.stride(0),
        out.stride(0),
        row_tiles,
        col_tiles,
        k // 128,
        KIND=kind,
        GLOBAL=global_scale is not None,
        BIAS=bias is not None,
        SPLIT=tile.split,
        CONSUMERS=tile.consumers,
        STAGES=tile.stages,
        GROUP=tile.group,
        REGS=160 if tile.consumers == 3 else 240,
        num_warps=4,
        maxnreg=128 if tile.consumers == 3 else 168,
    )
    return out
