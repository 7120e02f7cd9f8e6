# SPDX-License-Identifier: Apache-2.0
"""MXFP8 by MXFP8 and NVFP4 by NVFP4 on the tensor cores that multiply by block scales (compute capability 10.0 and
later), by ``torch._scaled_mm``. Not run by us: there is no such GPU here. What torch checks of shapes, dtypes and
strides is tested on meta tensors, the order of scales against torchao's.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia.kernels.triton import recipes

_ROWS, _COLUMNS = 128, 4  # scales of a tile, which cuBLAS reads as 32 lines of 16 bytes
_FORMATS = {("e4m3", "e8m0", (1, 32)): torch.float8_e4m3fn, ("e2m1", "e4m3", (1, 16)): torch.float4_e2m1fn_x2}
_SCALES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Scales (rows, blocks of K), one byte each, in the order of cuBLAS's 128 x 4 tiles, flat: within a tile row r and
    block b lie at 16 (r % 32) + 4 (r // 32) + b; what tiles have more is zero ("1D Block Scaling Factors Layout" of the
    cuBLAS documentation)."""
    rows, blocks = scale.shape
    bands, tiles = -(-rows // _ROWS), -(-blocks // _COLUMNS)
    kind, scale = scale.dtype, scale.view(torch.uint8)
    padded = torch.nn.functional.pad(scale, (0, tiles * _COLUMNS - blocks, 0, bands * _ROWS - rows))
    lines = padded.reshape(bands, 4, 32, tiles, _COLUMNS).permute(0, 3, 2, 1, 4)
    return lines.reshape(-1).view(kind)


def takes(x: recipes.Operand, w: recipes.Operand) -> bool:
    """Whether `product` takes x (..., M, K) and a weight (N, K): both MXFP8 or both NVFP4, sizes that cuBLAS reads."""
    forms = [(op.element, op.sfmt, op.block) for op in (x, w)]
    single = all(op.global_scale is None or op.global_scale.numel() == 1 for op in (x, w))
    plain = all(op.codes.stride(-1) == 1 and op.zero_point is None for op in (x, w))
    sizes = w.shape[0] % 16 == 0 and x.shape[-1] % 32 == 0
    return forms[0] == forms[1] and forms[0] in _FORMATS and single and plain and sizes


def product(x: recipes.Operand, w: recipes.Operand, dtype: torch.dtype, bias: Any = None) -> torch.Tensor:
    """x times w transposed, (M, N)."""
    kind = _FORMATS[x.element, x.sfmt, x.block]
    codes = [op.codes.reshape(-1, op.codes.shape[-1]).contiguous().view(kind) for op in (x, w)]
    scales = [swizzled(op.scale.reshape(-1, op.scale.shape[-1]).view(_SCALES[op.sfmt])) for op in (x, w)]
    levels = [op.global_scale for op in (x, w) if op.global_scale is not None]
    made = torch.float32 if levels else dtype
    y = torch._scaled_mm(codes[0], codes[1].T, scale_a=scales[0], scale_b=scales[1], out_dtype=made)
    for level in levels:
        y = y * level.reshape(())
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(dtype)
