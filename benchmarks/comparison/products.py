# SPDX-License-Identifier: Apache-2.0
"""matmul: activations (M, K) by a weight of N rows, and the products a user would call instead.

Results are of the type that torch's are: float32 for float32 activations, bfloat16 for bfloat16 and FP8 ones. INT8
activations are rounded in the call, as a layer with ``activations="int8"`` does and ggml always: their results are
float32, and both of torch's products stand beside them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import breccia
import ml_dtypes
import numpy as np

from comparison import limits
from comparison.ggml import Ggml
from comparison.timing import Run, Work, in_turn

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

RECIPES: dict[str, Any] = {
    "FP8 per tensor": breccia.Float8CurrentScaling(),
    "FP8 1×128": breccia.Float8BlockScaling(),
    "FP8 128×128": breccia.Float8BlockScaling(block_m=128),
    "MXFP8": breccia.MXFP8BlockScaling(),
    "INT8 per row": breccia.INT8Scaling(),
    "MXFP4": breccia.MXFP4BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "INT4 g128": breccia.INT4Scaling(),
    "INT4 g128, zero points": breccia.INT4Scaling(signed=False, symmetric=False),
}
# Weights are compared with those of as many bits, and with the unquantized ones.
RECIPE_BITS = {name: breccia.formats.finfo(recipe.element).bits for name, recipe in RECIPES.items()}
BITS = {"torch int8": 8, "torch int4": 4, "ggml q8_0": 8, "ggml q4_0": 4, "ggml q4_K": 4, "ggml mxfp4": 4}
BITS |= {f"{name} repacked": bits for name, bits in BITS.items() if name.startswith("ggml")}
# Of the activations in products of low precision by low precision.
ACTIVATIONS = breccia.Float8BlockScaling()
ROUNDED = breccia.INT8Scaling()
BY_ROUNDED = ("INT8 per row", "MXFP4", "NVFP4", "INT4 g128", "INT4 g128, zero points")
SOURCES = ("bf16", "fp32", "FP8", "INT8")  # kinds of activations


def rounds(
    rows: list[int], extent: int, cache: int, ggml: Ggml | None, sources: Sequence[str] = SOURCES
) -> Iterator[list[Work]]:
    """Works that are measured together: those of one number of rows and one kind of activations, of `sources`."""
    w = np.random.default_rng(1).normal(0, 0.02, (extent, extent)).astype(np.float32)
    for m in rows:
        yield from _products(f"matmul M={m}", m, w, RECIPES, cache, ggml, sources)


def square(extent: int, sources: Sequence[str] = SOURCES) -> Iterator[list[Work]]:
    """The square product, for a few recipes."""
    w = np.random.default_rng(1).normal(0, 0.02, (extent, extent)).astype(np.float32)
    yield from _products(f"matmul {extent}³", extent, w, ["FP8 1×128", "NVFP4"], 0, None, sources)


def _products(
    group: str, m: int, w: np.ndarray, names: Iterable[str], cache: int, ggml: Ggml | None, sources: Sequence[str]
) -> Iterator[list[Work]]:
    n, k = w.shape
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    half_peers, full_peers = _peers(x, w)
    if ggml is not None:
        half_peers |= ggml.products(x, w)
    weights = {name: breccia.cast(w, RECIPES[name]) for name in names}
    ready = {name: breccia.prepare(weight) for name, weight in weights.items()}
    operands = {"bf16": x.astype(ml_dtypes.bfloat16), "fp32": x}
    if m > 1:
        operands["FP8"] = breccia.cast(x, ACTIVATIONS)
    for source, a in operands.items():
        if source not in sources:
            continue
        peers = full_peers if source == "fp32" else half_peers
        limit = "fp32 FLOP" if source == "fp32" else "bf16 FLOP"
        out_dtype = np.float32 if source == "fp32" else ml_dtypes.bfloat16
        linear = functools.partial(breccia.linear, a, out_dtype=out_dtype)
        works = []
        for name, weight in weights.items():
            runs: dict[str, Run] = {
                "breccia": functools.partial(linear, weight),
                "breccia prepared": functools.partial(linear, ready[name]),
            }
            work = Work(group, f"{source} × {name}", runs | _alike(peers, name), 2.0 * m * n * k, limit)
            if m == 1:
                work.size, work.limit = weight.nbytes, limits.read_limit(weight.nbytes)
                work.memory = _rotating(linear, weight, 4 * cache // weight.nbytes + 1)
                work.memory_limit = limits.MEMORY_READ
            works.append(work)
        yield works
    rounded = []
    for name in BY_ROUNDED:
        if name not in weights:
            continue
        runs = {"breccia": functools.partial(_rounded, x, weights[name])}
        work = Work(group, f"INT8 × {name}", runs | _alike(full_peers | half_peers, name), 2.0 * m * n * k, "int8 FLOP")
        if m == 1:
            work.size, work.limit = weights[name].nbytes, limits.read_limit(weights[name].nbytes)
        rounded.append(work)
    if rounded and "INT8" in sources:
        yield rounded


def _rounded(x: np.ndarray, weight: Any) -> Any:
    return breccia.linear(breccia.cast(x, ROUNDED), weight)


def _alike(peers: dict[str, Run], name: str) -> dict[str, Run]:
    return {peer: run for peer, run in peers.items() if BITS.get(peer, RECIPE_BITS[name]) == RECIPE_BITS[name]}


def _rotating(linear: Callable[[Any], Any], weight: Any, count: int) -> dict[str, Run]:
    weights = [copy.deepcopy(weight) for _ in range(count)]
    prepared = [breccia.prepare(weight) for weight in weights]
    return {"breccia": in_turn(linear, weights), "breccia prepared": in_turn(linear, prepared)}


def _peers(x: np.ndarray, w: np.ndarray) -> tuple[dict[str, Run], dict[str, Run]]:
    """Those who multiply bf16 activations, and those who multiply fp32 ones."""
    full: dict[str, Run] = {"NumPy fp32": lambda: x @ w.T}
    if torch is None:
        return {}, full
    n, k = w.shape
    activations, weight = torch.from_numpy(x), torch.from_numpy(w)
    full["torch fp32"] = lambda: torch.nn.functional.linear(activations, weight)
    x_half, w_half = activations.bfloat16(), weight.bfloat16()
    half: dict[str, Run] = {"torch bf16": lambda: torch.nn.functional.linear(x_half, w_half)}
    scale = (weight.abs().amax(1) / 127).bfloat16()
    int8 = (weight / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8)
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    scales = torch.full((k // 128, n, 2), 0.01, dtype=torch.bfloat16)
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
        candidates: dict[str, Run] = {
            "torch int8": lambda: torch._weight_int8pack_mm(x_half, int8, scale),
            "torch int4": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x_half, packed, 128, scales),
        }
        for run in candidates.values():
            run()
    except (RuntimeError, AttributeError) as error:
        print(f"torch's int8 and int4 products are left out: {str(error).splitlines()[0]}")
        return half, full
    return half | candidates, full
