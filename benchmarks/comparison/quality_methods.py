# SPDX-License-Identifier: Apache-2.0
"""Ways to round a weight to 4 bits: ours, and what they are compared with that is no program of its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import torch
from breccia.bridges import dequantize_gguf, quantize_gguf
from breccia.bridges.gguf.mixes import fitting, type_in_mix
from breccia.checkpoint import plan_bits
from breccia.gguf.models import ModelMap
from breccia.moments import Moments, save_moments
from breccia.recipes import choices
from safetensors.numpy import save_file

# (weight, moments, recipe) → the weight that the codes stand for
Method = Callable[[np.ndarray, Moments, Any], np.ndarray]
DAMP = 0.05  # of what most programs do


def recipes(group: int) -> dict[str, Any]:
    """Formats by name."""
    return {
        "NVFP4": breccia.NVFP4BlockScaling(),
        "MXFP4": breccia.MXFP4BlockScaling(),
        f"INT4, {group}, symmetric": breccia.INT4Scaling(group_size=group),
        f"INT4, {group}, asymmetric": breccia.INT4Scaling(group_size=group, signed=False, symmetric=False),
    }


def bits(recipe: Any) -> float:
    """Of a weight, with its share of the scale and, packed, of the zero point."""
    block = block_of(recipe)
    scale = {"float16": 16, "bfloat16": 16, "float32": 32}.get(choices(recipe).scale, 8)
    return 4 + (scale + 4 * (not getattr(recipe, "symmetric", True))) / block


def block_of(recipe: Any) -> int:
    """How many weights share a scale."""
    q = breccia.cast(np.ones((1, 1536), np.float32), recipe)
    return 1536 // np.asarray(q.scale).shape[-1]


def amax(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    return breccia.cast(w, recipe).numpy()


def mse(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    return breccia.cast(w, replace(recipe, scale_search="mse")).numpy()


def importance(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    return breccia.cast(w, recipe, importance=moments.diag).numpy()


def gptq(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    return breccia.gptq(w, moments, recipe).numpy()


def more_damped(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    return breccia.gptq(w, moments, recipe, damp=DAMP).numpy()


def _numbers(q: Any) -> torch.Tensor:
    """The scales of a cast of one block a row, with the global one, (N, 1)."""
    scale = q.scale.float()
    level = 1.0 if q.global_scale is None else q.global_scale.float()
    return (scale * level).reshape(-1, 1)


def natural(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    """GPTQ as its paper has it, columns as they stand, the scale of each block by the amax of what its columns have
    become when it begins (Frantar et al., ICLR 2023): what most programs do."""
    h = torch.from_numpy(np.array(moments.full, np.float64))
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMP * diagonal.mean()
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    grid = torch.tensor(np.unique(breccia.formats.decode(np.arange(16, dtype=np.uint8), recipe.element)))
    grid = grid.float()
    middles = (grid[1:] + grid[:-1]) / 2
    rest, out = torch.from_numpy(w.copy()), torch.empty(w.shape)
    block, step = block_of(recipe), 128 if w.shape[1] % 128 == 0 else 64
    level = {"amax": float(np.abs(w).max())} if "NVFP4" in type(recipe).__name__ else {}
    for start in range(0, w.shape[1], step):
        errors = torch.empty(len(w), step)
        for column in range(start, start + step):
            if column % block == 0:
                part = rest[:, column : column + block].contiguous()
                if start + step < column + block:  # its last columns have not met the errors of this step
                    raise ValueError("step must hold whole blocks")
                q = breccia.cast(part, recipe, **level)
                scale = _numbers(q)
                zero = 0.0 if q.zero_point is None else q.zero_point.float().reshape(-1, 1)
            at = torch.bucketize(rest[:, column : column + 1] / scale + zero, middles)
            value = ((grid[at] - zero) * scale)[:, 0]
            error = (rest[:, column] - value) / upper[column, column]
            rest[:, column : start + step] -= error[:, None] * upper[column, column : start + step]
            out[:, column], errors[:, column - start] = value, error
        rest[:, start + step :] -= errors @ upper[start : start + step, start + step :]
    return out.numpy()


def hadamard(method: Method, block: int = 16) -> Method:
    """The method on weights, and for inputs, that blocks of a row are rotated of; turned back afterwards."""
    turn = np.ones((1, 1))
    while len(turn) < block:
        turn = np.block([[turn, turn], [turn, -turn]]) / np.sqrt(2)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], block)
    turn = (signs[:, None] * turn).astype(np.float32)

    def turned(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        return (x.reshape(-1, block) @ by).reshape(x.shape)

    def rotated(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
        full = turned(turned(np.asarray(moments.full), turn).T.copy(), turn)
        diagonal = np.maximum(full.diagonal(), 0).copy()
        there = Moments(diag=diagonal, count=moments.count, full=full)
        return turned(method(turned(w, turn), there, recipe), turn.T.copy())

    return rotated


def awq(w: np.ndarray, moments: Moments, recipe: Any) -> np.ndarray:
    """Columns multiplied by a power of their inputs' size before rounding, and inputs divided by it: the power of least
    output error of 20 from 0 to 1 (Lin et al., AWQ, MLSys 2024), for each layer by itself."""
    size = np.sqrt(np.asarray(moments.diag, np.float64)) + 1e-12
    h, best = torch.from_numpy(np.asarray(moments.full)), None
    for power in np.arange(20) / 20:
        by = size**power
        by = (by / np.sqrt(by.max() * by.min())).astype(np.float32)
        made = mse(w * by, moments, recipe) / by
        wrong = torch.from_numpy(w - made)
        error = float(((wrong @ h) * wrong).sum())
        if best is None or error < best[0]:
            best = error, made
    assert best is not None
    return best[1]


def mixed(
    weights: dict[str, np.ndarray], moments: dict[str, Moments], most: float
) -> tuple[dict[str, np.ndarray], float]:
    """GPTQ of every layer in the format that `breccia plan-bits` chooses for it.

    Args:
        weights: name of a layer → float32 (N, K).
        moments: name → moments of its inputs.
        most: bits a weight.

    Returns:
        What the codes stand for, by name, and the bits that a weight takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, seen = Path(folder, "model.safetensors"), Path(folder, "moments.safetensors")
        save_file({f"{name}.weight": w for name, w in weights.items()}, model)
        save_moments({name: moments[name] for name in weights}, seen)
        plan = plan_bits(model, seen, most, ("nvfp4", "fp8"))
    chosen = [(group["layers"], group["format"]) for group in plan["groups"]]
    of = {n: next(kind for some, kind in chosen if any(fnmatch(n, one) for one in some)) for n in weights}
    return {n: breccia.gptq(w, moments[n], of[n]).numpy() for n, w in weights.items()}, plan["bits"]


def q4_k_m(
    weights: dict[str, np.ndarray], moments: dict[str, Moments], by_gptq: bool
) -> tuple[dict[str, np.ndarray], float]:
    """GGUF's Q4_K_M of a Llama's layers, scales by importance, codes to nearest or by GPTQ.

    Args:
        weights: name of a layer → float32 (N, K).
        moments: name → moments of its inputs.
        by_gptq: whether codes are.

    Returns:
        What the codes stand for, by name, and the bits that a weight takes.
    """
    depth = 1 + max(int(re.search(r"layers\.(\d+)\.", name)[1]) for name in weights)  # type: ignore[index]
    names, made, nbytes = ModelMap("llama", depth=depth), {}, 0
    for name, w in weights.items():
        inside = names.inside(f"{name}.weight")
        assert inside is not None
        kind = fitting(type_in_mix("q4_k_m", inside, names), w.shape[1])
        data = {"moments": moments[name]} if by_gptq else {"importance": moments[name].diag}
        raw = quantize_gguf(w, kind, **data)
        made[name], nbytes = dequantize_gguf(raw, kind), nbytes + raw.size
    return made, 8 * nbytes / sum(w.size for w in weights.values())


METHODS: dict[str, Method] = {
    "nearest, amax": amax,
    "nearest, mse": mse,
    "nearest, importance": importance,
    "GPTQ, natural order, amax": natural,
    "GPTQ": gptq,
    f"GPTQ, damping {DAMP}": more_damped,
}
# What is said not to help: formats, and what is done to them.
OTHERS: dict[str, tuple[Method, tuple[str, ...]]] = {
    "AWQ, mse": (awq, ("NVFP4",)),
    "Hadamard 16, mse": (hadamard(mse), ("NVFP4", "MXFP4", "INT4")),
    "Hadamard 16, GPTQ": (hadamard(gptq), ("NVFP4", "MXFP4", "INT4")),
}
