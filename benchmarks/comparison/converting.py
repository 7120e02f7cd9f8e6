# SPDX-License-Identifier: Apache-2.0
"""cast, dequantize, requantize and the search by squared error, and what a user would write instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import breccia
import ml_dtypes
import numpy as np

from comparison import limits, torch_convert
from comparison.timing import Run, Work, in_turn

BLOCK = 128
RECIPES: dict[str, Any] = {
    "FP8 per tensor": breccia.Float8CurrentScaling(),
    "FP8 1×128": breccia.Float8BlockScaling(),
    "FP8 128×128": breccia.Float8BlockScaling(block_m=128),
    "MXFP8": breccia.MXFP8BlockScaling(),
    "MXFP6": breccia.MXFP6BlockScaling(),
    "MXFP4": breccia.MXFP4BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "INT8 per row": breccia.INT8Scaling(),
    "INT4 g128": breccia.INT4Scaling(),
}
SEARCHES: dict[str, Any] = {
    "NVFP4": breccia.NVFP4BlockScaling(scale_search="mse"),
    "INT4 g128": breccia.INT4Scaling(scale_search="mse"),
}
REQUANTIZATIONS = [
    ("FP8 1×128", "NVFP4"),
    ("FP8 128×128", "FP8 per tensor"),
    ("FP8 128×128", "MXFP8"),
    ("MXFP4", "FP8 1×128"),
    ("MXFP4", "NVFP4"),
    ("MXFP8", "FP8 128×128"),
]
HALVES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
FP8 = ml_dtypes.float8_e4m3fn
FP4_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_MIDPOINTS = (FP4_LEVELS[1:] + FP4_LEVELS[:-1]) / 2


def works(extent: int, threads: int, cache: int, groups: list[str], *, quick: bool) -> Iterator[Work]:
    x = np.random.default_rng(0).normal(0, 0.02, (extent, extent)).astype(np.float32)
    # The yardstick of all: copying the float32 tensor.
    copy, copy_memory = (limits.copier(x.nbytes, threads, count) for count in (1, _rotation(2 * x.nbytes, cache)))
    found: list[Iterator[Work]] = []
    if "cast" in groups:
        found.append(_casts(x, cache, quick=quick))
    if "dequantize" in groups:
        found.append(_dequantizations(x, cache, quick=quick))
    if "search" in groups:
        found.append(_searches(x))
    if "requantize" in groups:
        found.append(_requantizations(x))
    for work in chain.from_iterable(found):
        work.runs["memcpy"], work.sizes["memcpy"] = copy, 2 * x.nbytes
        if work.memory:
            work.memory["memcpy"], work.memory_limit = copy_memory, "memcpy"
        yield work


def _rotation(nbytes: int, cache: int) -> int:
    return 4 * cache // nbytes + 1


def _casts(x: np.ndarray, cache: int, *, quick: bool) -> Iterator[Work]:
    for name, recipe in RECIPES.items():
        sources = ["fp32", "bf16", "fp16"] if name in ("FP8 1×128", "NVFP4") else ["fp32"]
        for source in sources:
            array = x if source == "fp32" else x.astype(HALVES[source])
            size = array.nbytes + breccia.cast(array, recipe).nbytes
            runs: dict[str, Run] = {"breccia": lambda a=array, r=recipe: breccia.cast(a, r)}
            if source == "fp32":
                runs |= numpy_casts(name, array) | torch_convert.casts(name, array, compiled=not quick)
            count = _rotation(size, cache)
            copies = [array.copy() for _ in range(count)]
            memory = {
                "breccia": in_turn(lambda a, r=recipe: breccia.cast(a, r), copies),
            }
            yield Work("cast", f"{source} → {name}", runs, size, "memcpy", memory)


def _dequantizations(x: np.ndarray, cache: int, *, quick: bool) -> Iterator[Work]:
    for name, recipe in RECIPES.items():
        for target, dtype in (("fp32", np.dtype(np.float32)), ("bf16", np.dtype(ml_dtypes.bfloat16))):
            scaled = breccia.cast(x, recipe)
            out = np.ones(x.shape, dtype)
            size = scaled.nbytes + out.nbytes
            runs: dict[str, Run] = {
                "breccia": lambda s=scaled, o=out, d=dtype: breccia.dequantize(s, out_dtype=d, out=o),
            }
            if target == "fp32":
                runs |= numpy_dequantizations(name, scaled) | torch_convert.dequantizations(
                    name, scaled, compiled=not quick
                )
            count = _rotation(size, cache)
            pairs = [(breccia.cast(x, recipe), np.ones(x.shape, dtype)) for _ in range(count)]
            memory = {
                "breccia": in_turn(lambda pair, d=dtype: breccia.dequantize(pair[0], out_dtype=d, out=pair[1]), pairs),
            }
            yield Work("dequantize", f"{name} → {target}", runs, size, "memcpy", memory)


def _searches(x: np.ndarray) -> Iterator[Work]:
    for name, recipe in SEARCHES.items():
        size = x.nbytes + breccia.cast(x, recipe).nbytes
        search = search_nvfp4 if name == "NVFP4" else search_int4
        # The others are slow: an eighth of the rows is enough for them.
        part = x[: max(x.shape[0] // 8, 1)]
        runs: dict[str, Run] = {
            "breccia": lambda r=recipe: breccia.cast(x, r),
            "NumPy": lambda s=search, p=part: s(p),
        }
        runs |= torch_convert.searches(name, part)
        sizes = {peer: size * part.size / x.size for peer in runs if peer != "breccia"}
        yield Work("search", f"fp32 → {name}, least squared error", runs, size, "memcpy", sizes=sizes)


def _requantizations(x: np.ndarray) -> Iterator[Work]:
    for source, target in REQUANTIZATIONS:
        scaled, to = breccia.cast(x, RECIPES[source]), RECIPES[target]
        size = scaled.nbytes + breccia.cast(x, to).nbytes
        runs: dict[str, Run] = {
            "breccia": lambda s=scaled, r=to: breccia.requantize(s, r),
            "dequantize, then cast": lambda s=scaled, r=to: breccia.cast(breccia.dequantize(s), r),
        }
        yield Work("requantize", f"{source} → {target}", runs, size, "memcpy")


# --- NumPy, vectorised, with ml_dtypes' conversions -------------------------------------------------------------------


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, size)


def _powers_of_two(amax: np.ndarray, largest: float) -> np.ndarray:
    bits = (amax / np.float32(largest)).view(np.uint32)
    return ((bits + 0x007F_FFFF) & 0x7F80_0000).view(np.float32)


def numpy_casts(name: str, x: np.ndarray) -> dict[str, Run]:
    def per_tensor() -> Any:
        scale = np.abs(x).max() / 448
        return (x / scale).astype(FP8), scale

    def fp8() -> Any:
        blocks = _blocks(x, BLOCK)
        scale = np.abs(blocks).max(-1, keepdims=True) / 448
        return (blocks / scale).astype(FP8), scale

    def mx(element: Any, largest: float) -> Any:
        blocks = _blocks(x, 32)
        scale = _powers_of_two(np.abs(blocks).max(-1, keepdims=True), largest)
        return (blocks / scale).astype(element), scale.astype(ml_dtypes.float8_e8m0fnu)

    def nvfp4() -> Any:
        blocks = _blocks(x, 16)
        amax = np.abs(blocks).max(-1, keepdims=True)
        unit = amax.max() / (448 * 6)
        scale = (amax / 6 / unit).astype(FP8)
        codes = (blocks / (scale.astype(np.float32) * unit)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4, scale, unit

    def int4() -> Any:
        blocks = _blocks(x, BLOCK)
        scale = (np.abs(blocks).max(-1, keepdims=True) / 7).astype(np.float16)
        codes = np.rint(blocks / scale.astype(np.float32)).clip(-8, 7).astype(np.int8).view(np.uint8) & 15
        return codes[..., ::2] | codes[..., 1::2] << 4, scale

    known: dict[str, dict[str, Run]] = {
        "FP8 per tensor": {"NumPy": per_tensor},
        "FP8 1×128": {"NumPy": fp8, "ml_dtypes astype, no scale": lambda: x.astype(FP8)},
        "MXFP8": {"NumPy": lambda: mx(FP8, 448)},
        "MXFP4": {"NumPy": lambda: mx(ml_dtypes.float4_e2m1fn, 6)},
        "NVFP4": {"NumPy": nvfp4},
        "INT4 g128": {"NumPy": int4},
    }
    return known.get(name, {})


def numpy_dequantizations(name: str, scaled: Any) -> dict[str, Run]:
    data, scale = scaled.data, scaled.scale
    if name == "FP8 1×128":
        codes = data.view(FP8)
        return {
            "NumPy": lambda: _blocks(codes.astype(np.float32), BLOCK) * scale[..., None],
            "ml_dtypes astype, no scale": lambda: codes.astype(np.float32),
        }
    if name == "MXFP8":
        codes, powers = data.view(FP8), scale.view(ml_dtypes.float8_e8m0fnu)
        return {"NumPy": lambda: _blocks(codes.astype(np.float32), 32) * powers.astype(np.float32)[..., None]}
    if name in ("INT4 g128", "NVFP4", "MXFP4"):
        size = {"INT4 g128": BLOCK, "NVFP4": 16, "MXFP4": 32}[name]
        element = {"INT4 g128": "int4"}.get(name, "float4_e2m1fn")
        values = breccia.formats.decode(np.arange(16, dtype=np.uint8), element)
        pairs = np.stack([np.tile(values, 16), np.repeat(values, 16)], -1)  # both values of each byte
        kind = {"NVFP4": FP8, "MXFP4": ml_dtypes.float8_e8m0fnu}.get(name, np.float16)
        unit = np.float32(1) if scaled.global_scale is None else scaled.global_scale

        def table() -> Any:
            return (
                _blocks(pairs[data].reshape(scaled.shape), size)
                * (scale.view(kind).astype(np.float32) * unit)[..., None]
            )

        return {"NumPy": table}
    return {}


def search_nvfp4(x: np.ndarray) -> Any:
    blocks = _blocks(x, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    unit = amax.max() / (448 * 6)
    first = (amax / 6 / unit).astype(FP8).view(np.uint8)
    best_error, best = np.full(amax.shape, np.inf, np.float32), first
    for offset in (0, 1, -1, 2, -2, 3, 4, 5, 6):
        code = np.clip(first.astype(np.int16) + offset, 1, 126).astype(np.uint8)
        scale = code.view(FP8).astype(np.float32) * unit
        rounded = FP4_LEVELS[np.searchsorted(FP4_MIDPOINTS, np.abs(blocks) / scale)] * scale
        error = np.square(rounded - np.abs(blocks)).sum(-1, keepdims=True)
        best, best_error = np.where(error < best_error, code, best), np.minimum(error, best_error)
    return best


def search_int4(x: np.ndarray) -> Any:
    blocks = _blocks(x, BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    best_error, best = np.full(amax.shape, np.inf, np.float32), amax
    for candidate in range(32):
        shrink = np.float32((1 - 0.02 * (candidate % 16)) * (-1 if candidate >= 16 else 1))
        scale = (amax / 7 * shrink).astype(np.float16).astype(np.float32)
        error = np.square(np.rint(blocks / scale).clip(-8, 7) * scale - blocks).sum(-1, keepdims=True)
        best, best_error = np.where(error < best_error, scale, best), np.minimum(error, best_error)
    return best
