# SPDX-License-Identifier: Apache-2.0
"""The FP8 of AMD's MI300, called fnuz: finite, no negative zero, whose code is the only NaN, and a bias one larger.

    E4M3: code b of fnuz is half of what b is in float8_e4m3fn; 0x7F and 0xFF, NaN there, are ±240; 0x80 is NaN
    E5M2: code b of fnuz is half of what b is in float8_e5m2; 0x7C … 0x7F, infinity and NaN there, are 32768 … 57344

So codes stay as they are under twice or half the scale. Source: the dtypes of ml_dtypes and torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from breccia.bridges._common import Array, as_numpy, codes, fp8_recipe, made
from breccia.formats import decode
from breccia.scaled_tensor import ScaledTensor

__all__ = ["from_fnuz", "to_fnuz"]

FNUZ_DTYPES = {"F8_E4M3FNUZ": "E4M3", "F8_E5M2FNUZ": "E5M2"}


class _Form(NamedTuple):
    """A format with a fnuz sibling, and its codes from which on a magnitude is no finite number."""

    element: str
    sibling: str
    first_special: int
    one: int


_FORMS = {
    "E4M3": _Form("float8_e4m3fn", "float8_e4m3fnuz", 0x7F, 0x38),
    "E5M2": _Form("float8_e5m2", "float8_e5m2fnuz", 0x7C, 0x3C),
}
_NAN = 0x80


def from_fnuz(data: Any, scale: Any, fp8_format: str | None = None) -> ScaledTensor:
    """A weight of fnuz codes as one of E4M3 or E5M2, without loss: the same codes under half the scale.

    Args:
        data: codes (N, K), of a fnuz dtype or as uint8.
        scale: float32, float16 or bfloat16, one for the tensor, a row, a block of a row or a square tile.
        fp8_format: "E4M3" or "E5M2"; told from the dtype of ``data`` if None.

    Returns:
        A ScaledTensor in NumPy. NaN becomes the NaN of its format.

    Raises:
        ValueError: a code has no sibling, as ±240 of E4M3 has none; half of a scale is no number of its dtype; the
            shapes do not fit, or ``fp8_format`` is needed.
    """
    name = _format_of(data, fp8_format)
    form, raw = _FORMS[name], codes(data, "data")
    lost = int(np.count_nonzero((raw & 0x7F) >= form.first_special))
    if lost:
        raise ValueError(
            f"data must not have codes of {form.sibling} from {form.first_special:#04x} on, for which {form.element} "
            f"has no number under half the scale, got {lost}"
        )
    factors = as_numpy(scale, "scale")
    recipe, layout, scale_shape = fp8_recipe(name, raw.shape, factors.shape, factors.dtype.name)
    nan = 0x7F
    return made(np.where(raw == _NAN, np.uint8(nan), raw), _times(factors, 0.5).reshape(scale_shape), recipe, layout)


def to_fnuz(scaled: ScaledTensor) -> tuple[Array, Array]:
    """The inverse of `from_fnuz`: the same codes under twice the scale. Negative zeros lose their sign.

    Args:
        scaled: FP8 with scales of float32, float16 or bfloat16.

    Returns:
        Codes, of ml_dtypes' fnuz dtype where that package is there and uint8 elsewhere, and scales.

    Raises:
        TypeError: ``scaled`` has another format or other scales.
        ValueError: it has an infinity, or twice a scale is no number of its dtype.
    """
    from breccia.checkpoint.dtypes import numpy_dtype

    name = next((name for name, form in _FORMS.items() if form.element == scaled.recipe.element), None)
    factors = as_numpy(scaled.scale, "scale")
    if name is None or factors.dtype.itemsize == 1:
        raise TypeError(f"scaled must be FP8 with scales of 16 or 32 bits, got {scaled.recipe}")
    raw = codes(scaled.data, "data")
    magnitude = raw & 0x7F
    if name == "E5M2" and bool((magnitude == 0x7C).any()):
        raise ValueError("scaled must have no infinity, which float8_e5m2fnuz has not")
    made_codes = np.where(magnitude >= _FORMS[name].first_special, np.uint8(_NAN), raw)
    made_codes[raw == _NAN] = 0
    return made_codes.view(numpy_dtype(f"F8_{name}FNUZ")), _times(factors, 2.0)


def fnuz_values(data: Any, scale: Any) -> Array:
    """What fnuz codes stand for, of any codes.

    Args:
        data, scale: as of `from_fnuz`; ``data`` of a fnuz dtype.

    Returns:
        float32, of the shape of ``data``.

    Raises:
        ValueError: the shapes do not fit.
    """
    from breccia.verbs import dequantize

    name = _format_of(data, None)
    raw, factors = codes(data, "data"), as_numpy(scale, "scale")
    recipe, layout, scale_shape = fp8_recipe(name, raw.shape, factors.shape, factors.dtype.name)
    ones = made(np.full_like(raw, _FORMS[name].one), factors.reshape(scale_shape), recipe, layout)
    values: Array = decode(raw, _FORMS[name].sibling) * dequantize(ones)
    return values


def _format_of(data: Any, fp8_format: str | None) -> str:
    told = {form.sibling: name for name, form in _FORMS.items()}.get(as_numpy(data, "data").dtype.name)
    name = fp8_format or told
    if name not in _FORMS or (told is not None and name != told):
        raise ValueError(f"fp8_format must be 'E4M3' or 'E5M2', as the dtype of data is, got {fp8_format!r}")
    return name


def _times(scale: Array, factor: float) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        changed = (scale.astype(np.float32) * np.float32(factor)).astype(scale.dtype)
        back = changed.astype(np.float32) * np.float32(1 / factor)
    if not np.array_equal(back, scale.astype(np.float32), equal_nan=True):
        raise ValueError(f"scale must stay exact when it is multiplied by {factor:g}, some does not in {scale.dtype}")
    return changed
