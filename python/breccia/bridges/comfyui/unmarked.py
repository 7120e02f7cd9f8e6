# SPDX-License-Identifier: Apache-2.0
"""Block scales of which nothing in a file says whether they are in rows, as ModelOpt and compressed-tensors store them,
or in cuBLAS's tiles, as ComfyUI does: where sizes are multiples of a tile, both have one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from breccia.bridges.common import Array, codes, unswizzle
from breccia.formats import decode

_METHOD = "quantization_config"
_SURE = 8.0  # standard deviations by which rows or columns must differ in one order
_CLEAR = 1.5  # times as much as in the other order


def in_tiles(prefix: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> bool | None:
    """Whether a layer's scales are in tiles; None where only their numbers can tell. What is found of all entries is
    kept in the context."""
    said = (context.get(_METHOD) or {}).get("quant_method")
    if said:
        return bool(said == "comfyui")
    if isinstance(context, dict):
        if "comfyui" not in context:
            context["comfyui"] = _by_others(entries)
        return context["comfyui"] if _fits(prefix, entries) == (True, True) else _fits(prefix, entries)[1]
    return _by_others(entries)


def _by_others(entries: Mapping[str, Any]) -> bool | None:
    """What the other tensors of the checkpoint tell."""
    if any(name.endswith(".comfy_quant") for name in entries):
        return True
    told = {tiles for prefix in _layers(entries) for rows, tiles in [_fits(prefix, entries)] if rows != tiles}
    return told.pop() if len(told) == 1 else None


def _layers(entries: Mapping[str, Any]) -> Iterator[str]:
    return (name.removesuffix("weight_scale") for name in entries if name.endswith(".weight_scale"))


def may_be_tiles(prefix: str, entries: Mapping[str, Any]) -> bool:
    """Whether a layer has block scales of the shape that tiles have."""
    return _fits(prefix, entries)[1]


def _fits(prefix: str, entries: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the shape of a layer's block scales is that of rows, and that of tiles."""
    weight, scale = entries.get(f"{prefix}weight"), entries.get(f"{prefix}weight_scale")
    if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return False, False
    if (weight.dtype, scale.dtype) == ("U8", "F8_E4M3") and f"{prefix}weight_scale_2" in entries:
        rows, columns = weight.shape[0], weight.shape[1] * 2 // 16
    elif weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0"):
        rows, columns = weight.shape[0], -(-weight.shape[1] // 32)
    else:
        return False, False
    return scale.shape == (rows, columns), scale.shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)


def decided(scale: Array, element: str, name: str) -> bool:
    """Whether scales are in tiles, by their numbers: rows of a weight differ in size, and so do its columns. In the
    wrong order each row has numbers of many, and they differ less."""
    raw = codes(scale, "weight_scale")
    sizes = np.abs(decode(raw, element))
    known = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.float32(1))
    logs = np.log2(known).astype(np.float64)
    rows = _differ(logs)
    tiles = _differ(unswizzle(logs.reshape(-1), *logs.shape))
    for first, second, answer in ((rows, tiles, False), (tiles, rows, True)):
        if first > _SURE and first > _CLEAR * max(second, 0):
            return answer
    raise ValueError(
        f"{name} must tell whether it is in rows, as ModelOpt stores it, or in tiles, as ComfyUI does: nothing else in "
        "the file says which, and both fit: say it by --unmarked modelopt or --unmarked comfyui (unmarked= in Python), "
        'or in a config.json of {"quantization_config": {"quant_method": "modelopt"}} beside it'
    )


def _differ(logs: Array) -> float:
    """By how many standard deviations rows and columns differ more than numbers in any order would."""
    spread = logs.var()
    if spread == 0:
        return 0.0
    result = 0.0
    for axis in (0, 1):
        count, each = logs.shape[1 - axis], logs.shape[axis]
        excess = each * ((logs.mean(axis) - logs.mean()) ** 2).sum() / spread - (count - 1)
        result += float(excess) / (2 * max(count - 1, 1)) ** 0.5
    return result
