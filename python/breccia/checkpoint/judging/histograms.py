# SPDX-License-Identifier: Apache-2.0
"""Histograms of a tensor's scales and of its errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from breccia.bridges.common import codes, float32
from breccia.bridges.outside import comparable
from breccia.bridges.parts import Found
from breccia.bridges.scales import global_scale
from breccia.checkpoint.reading.source import Checkpoint
from breccia.comparison import compare, error_magnitudes, magnitudes
from breccia.formats import decode
from breccia.scaled_tensor import ScaledTensor

ERROR_RANGE = (-14, 2)  # log2 of errors in units of the reference's RMS; what is beyond counts at the ends


def scales_of(checkpoint: Checkpoint, found: Found, tensor: Any) -> Any:
    """Scales of a loaded tensor as floats; None where they are not known."""
    return block_scales(tensor) if isinstance(tensor, ScaledTensor) else _scales_of_blocks(checkpoint, found)


def block_scales(scaled: ScaledTensor) -> np.ndarray[Any, Any]:
    """Block scales as floats, the global scale in them."""
    scale = np.asarray(scaled.scale)
    if scale.dtype.itemsize == 1:
        scale = decode(codes(scale, "scale"), "float8_e4m3fn" if scaled.recipe.name == "nvfp4" else "float8_e8m0fnu")
    scale = float32(scale) if scale.dtype != np.float32 else scale
    second = global_scale(scaled, "multiplier")
    with np.errstate(invalid="ignore", over="ignore"):  # what a file says may be anything
        return scale if second is None else scale * second.reshape(-1)[0]


def _scales_of_blocks(checkpoint: Checkpoint, found: Found) -> np.ndarray[Any, Any] | None:
    """Scales of a tensor of blocks that is read as values: of K-quants and others; None where they are not known."""
    parts = [_scales_of_blocks(checkpoint, one) for one in found.origin.members]
    if parts:
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if "blocks" not in found.parts or found.origin.whole is not None:
        return None
    scales: np.ndarray[Any, Any] | None = checkpoint.container.scales_of_blocks(checkpoint.blocks(found), found.kind)
    return scales


def of_scales(scales: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Of log2 of the scales, half an octave a bin, from the octave of the least to that of the largest."""
    found = magnitudes(scales)
    there = np.flatnonzero(found.counts)
    low = (found.first + int(there[0])) // 2 if there.size else 0
    mantissa, exponent = math.frexp(found.largest)
    high = exponent - (mantissa == 0.5) if there.size else 1  # a power of two ends the octave below it
    high = max(high, low + 1)
    return {"counts": found.between(low, high).tolist(), "low": low, "high": high, "zeros": found.zeros}


def of_errors(reference: Any, tensor: Any) -> dict[str, Any]:
    """Of log2 of the errors' sizes in units of the reference's root mean square, half an octave a bin, over
    `ERROR_RANGE`."""
    exact, checked = comparable(reference), comparable(tensor)
    sums = compare(exact, exact)
    root = math.sqrt(sums.signal / sums.count) if sums.count else 0.0
    limits = np.finfo(np.float32)
    unit = 1.0 if root == 0 or math.isnan(root) else min(max(root, float(limits.tiny)), float(limits.max))
    found = error_magnitudes(exact, checked, unit)
    counts = found.between(*ERROR_RANGE)
    counts[0] += found.zeros
    return {"counts": counts.tolist(), "low": ERROR_RANGE[0], "high": ERROR_RANGE[1], "largest": found.largest}
