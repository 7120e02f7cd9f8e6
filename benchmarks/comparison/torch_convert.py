# SPDX-License-Identifier: Apache-2.0
"""torch's ways to cast and dequantize: eager, and the same functions through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from comparison.timing import Run

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

BLOCK = 128


def casts(name: str, x: np.ndarray, *, compiled: bool) -> dict[str, Run]:
    if torch is None:
        return {}
    functions = {
        "FP8 per tensor": _fp8_per_tensor,
        "FP8 1×128": _fp8_blocks,
        "FP8 128×128": _fp8_tiles,
        "MXFP8": _mxfp8,
        "INT8 per row": _int8,
        "INT4 g128": _int4,
    }
    if name not in functions:
        return {}
    tensor = torch.from_numpy(x)
    runs = _both(functions[name], (tensor,), compiled=compiled)
    if name == "FP8 1×128":
        runs["torch .to, no scale"] = lambda: tensor.to(torch.float8_e4m3fn)
    return runs


def dequantizations(name: str, scaled: Any, *, compiled: bool) -> dict[str, Run]:
    if torch is None or name not in ("FP8 per tensor", "FP8 1×128", "MXFP8", "INT8 per row", "INT4 g128"):
        return {}
    data, scale = torch.from_numpy(scaled.data), torch.from_numpy(np.asarray(scaled.scale))
    if name.startswith(("FP8", "MX")):
        data = data.view(torch.float8_e4m3fn)
    if name == "INT8 per row":
        data = data.view(torch.int8)
    if name == "MXFP8":
        scale = scale.view(torch.float8_e8m0fnu)
    function = {"INT4 g128": _from_int4}.get(name, _from_blocks)
    runs = _both(function, (data, scale), compiled=compiled)
    if name == "FP8 1×128":
        runs["torch .to, no scale"] = lambda: data.to(torch.float32)
    return runs


def searches(name: str, x: np.ndarray) -> dict[str, Run]:
    if torch is None or name != "INT4 g128":
        return {}
    tensor = torch.from_numpy(x)
    return {"torch eager": lambda: _search_int4(tensor)}


def _both(function: Callable[..., Any], arguments: tuple[Any, ...], *, compiled: bool) -> dict[str, Run]:
    runs: dict[str, Run] = {"torch eager": lambda: function(*arguments)}
    if not compiled:
        return runs
    fast = torch.compile(function, dynamic=False)
    try:
        fast(*arguments)
    except Exception as error:  # whatever the compiler of the day says: it is left out, and named
        print(f"torch.compile of {function.__name__} is left out: {str(error).splitlines()[0][:200]}")
        return runs
    return runs | {"torch.compile": lambda: fast(*arguments)}


def _scaled_fp8(blocks: Any, dims: Any) -> Any:
    scale = blocks.abs().amax(dims, keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn), scale


def _fp8_per_tensor(x: Any) -> Any:
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def _fp8_blocks(x: Any) -> Any:
    return _scaled_fp8(x.unflatten(-1, (-1, BLOCK)), -1)


def _fp8_tiles(x: Any) -> Any:
    return _scaled_fp8(x.unflatten(-1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))


def _mxfp8(x: Any) -> Any:
    blocks = x.unflatten(-1, (-1, 32))
    bits = (blocks.abs().amax(-1, keepdim=True) / 448).view(torch.int32)
    exponent = (bits + 0x007F_FFFF) >> 23
    return (blocks / (exponent << 23).view(torch.float32)).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def _int8(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def _int4(x: Any) -> Any:
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).half()
    codes = (blocks / scale.float()).round().clamp(-8, 7).to(torch.int8).view(torch.uint8) & 15
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def _from_blocks(data: Any, scale: Any) -> Any:
    values = data.to(torch.float32)
    if scale.ndim == 0 or scale.shape[-1] == 1:
        return values * scale
    return values.unflatten(-1, (scale.shape[-1], -1)) * scale.to(torch.float32).unsqueeze(-1)


def _from_int4(data: Any, scale: Any) -> Any:
    low, high = (data << 4).view(torch.int8) >> 4, data.view(torch.int8) >> 4
    values = torch.stack([low, high], -1).flatten(-2).to(torch.float32)
    return values.unflatten(-1, (scale.shape[-1], -1)) * scale.to(torch.float32).unsqueeze(-1)


def _search_int4(x: Any) -> Any:
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    best_error, best = torch.full_like(amax, torch.inf), amax
    for candidate in range(32):
        shrink = (1 - 0.02 * (candidate % 16)) * (-1 if candidate >= 16 else 1)
        scale = (amax / 7 * shrink).half().float()
        error = ((blocks / scale).round().clamp(-8, 7) * scale - blocks).square().sum(-1, keepdim=True)
        best = torch.where(error < best_error, scale, best)
        best_error = torch.minimum(error, best_error)
    return best
