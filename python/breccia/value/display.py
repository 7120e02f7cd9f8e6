# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of a ScaledTensor, and a model of its recipes."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import frameworks
from breccia.formats import decode, finfo
from breccia.recipes import ScalingRecipe, scale_format

if TYPE_CHECKING:
    from breccia.scaled_tensor import ScaledTensor


def brief(value: Any) -> str:
    """A dataclass of recipes, or a recipe, by the fields that are not the default: ``INT4Scaling(group_size=32)``;
    anything else as it shows itself."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    shown = [f"{name}={brief(found)}" for name, found, default in fields if found != default]
    return f"{type(value).__name__}({', '.join(shown)})"


def scale_values(scaled: ScaledTensor) -> Any:
    """The block scales as float32 numbers in NumPy, without the global scale."""
    array, name = frameworks.on_host(scaled.scale)
    if array.dtype.itemsize == 1:
        return decode(array.view(np.uint8), scale_format(scaled.recipe) or "float8_e8m0fnu")
    if name == "bfloat16" or array.dtype == np.uint16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def html_of(scaled: ScaledTensor) -> str:
    """A table: recipe, layout, shape, bytes, range of the scales, and how far rounding can move a value."""
    rows = {
        "shape": f"{scaled.shape}, cast from {scaled.original_dtype}",
        "recipe": repr(scaled.recipe),
        "layout": repr(scaled.layout),
        "bytes": _bytes(scaled),
    }
    if isinstance(scaled.recipe, ScalingRecipe):
        rows |= _numbers(scaled)
    cells = "".join(
        f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>breccia.{type(scaled).__name__}</caption>{cells}</table>"


def _bytes(scaled: ScaledTensor) -> str:
    if not scaled.size:
        return f"{scaled.nbytes:,}"
    bits, ratio = 8 * scaled.nbytes / scaled.size, scaled.nbytes / (4 * scaled.size)
    return f"{scaled.nbytes:,}: {bits:.2f} bits a value, {ratio:.3f} of float32"


def _numbers(scaled: ScaledTensor) -> dict[str, str]:
    element = finfo(scaled.recipe.element)
    if element.name.startswith(("int", "uint")):
        rounding = "a value moves by half a scale at most"
    else:
        rounding = f"a value moves by 1/{2 ** (element.mantissa_bits + 1)} of itself at most, but near zero"
    try:
        scales = np.abs(scale_values(scaled))
    except (TypeError, RuntimeError):  # traced, deleted, or on a device without memory
        return {"rounding": rounding}
    known = scales[np.isfinite(scales) & (scales > 0)]
    text = f"{scales.size:,}"
    if known.size:
        low, high = float(known.min()), float(known.max())
        text += f", from {low:.3g} to {high:.3g} (2^{np.log2(low):.1f} to 2^{np.log2(high):.1f})"
    odd = scales.size - known.size
    if odd:
        text += f"; {odd:,} zero or not finite"
    if scaled.global_scale is not None and scaled.global_scale.shape == ():
        text += f"; global scale {float(scaled.global_scale):.3g}"
    return {"scales": text, "rounding": rounding}
