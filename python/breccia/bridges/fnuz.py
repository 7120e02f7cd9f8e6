# SPDX-License-Identifier: Apache-2.0
"""The FP8 of AMD's MI300, called fnuz: finite, no negative zero, whose code is the only NaN, and a bias one larger.

    E4M3: code b of fnuz is half of what b is in float8_e4m3fn; 0x7F and 0xFF, NaN there, are ±240; 0x80 is NaN
    E5M2: code b of fnuz is half of what b is in float8_e5m2; 0x7C … 0x7F, infinity and NaN there, are 32768 … 57344

So codes stay as they are under twice or half the scale. Source: the dtypes of ml_dtypes and torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32
from breccia.bridges.fp8 import fp8_recipe
from breccia.bridges.scales import STORED_SCALES, made
from breccia.formats import decode
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

FNUZ_DTYPES = {"F8_E4M3FNUZ": "E4M3", "F8_E5M2FNUZ": "E5M2"}


class _Form(NamedTuple):
    """A format and its fnuz sibling."""

    element: str
    sibling: str
    first_special: int  # the first code that is infinity or NaN in the format, and a number in its sibling
    one: int  # the code of 1 in the format


_FORMS = {
    "E4M3": _Form("float8_e4m3fn", "float8_e4m3fnuz", 0x7F, 0x38),
    "E5M2": _Form("float8_e5m2", "float8_e5m2fnuz", 0x7C, 0x3C),
}
_NAN = 0x80


def from_fnuz(data: Any, scale: Any, fp8_format: str | None = None) -> ScaledTensor:
    """A weight of fnuz codes as one of E4M3 or E5M2: the same codes under half the scale, the same values.

    Args:
        data: codes (N, K), of a fnuz dtype or as uint8.
        scale: float32, float16 or bfloat16, one for the tensor, a row, a block of a row or a square tile.
        fp8_format: "E4M3" or "E5M2"; told from the dtype of ``data`` if None.

    Returns:
        A ScaledTensor in NumPy. NaN becomes the NaN of its format.

    Raises:
        TypeError: ``scale`` has another dtype.
        ValueError: a code has no sibling, as ±240 of E4M3 has none, which scales of amax / 240 always use; half of a
            scale is no number of its dtype; the shapes do not fit, or ``fp8_format`` is needed.
    """
    form, raw, factors, recipe, layout = _stored(data, scale, fp8_format)
    lost = int(np.count_nonzero((raw & 0x7F) >= form.first_special))
    if lost:
        raise ValueError(
            f"data must not have codes of {form.sibling} from {form.first_special:#04x} on, for which {form.element} "
            f"has no number under half the scale, got {lost}"
        )
    nan = 0x7F  # in both formats
    return made(np.where(raw == _NAN, np.uint8(nan), raw), _times(factors, 0.5), recipe, layout)


def to_fnuz(scaled: ScaledTensor) -> tuple[Array, Array]:
    """The inverse of `from_fnuz`: the same codes under twice the scale. Negative zeros lose their sign.

    Args:
        scaled: FP8 with scales of float32, float16 or bfloat16.

    Returns:
        Codes, of ml_dtypes' fnuz dtype where that package is there and uint8 elsewhere, and scales.

    Raises:
        TypeError: ``scaled`` has another format or other scales.
        ValueError: it is a transposed view or has an infinity, or twice a scale is no number of its dtype.
    """
    from breccia.checkpoint.files.dtypes import numpy_dtype

    check_upright(scaled)
    name = next((name for name, form in _FORMS.items() if form.element == scaled.recipe.element), None)
    if name is None or as_numpy(scaled.scale, "scale").dtype.itemsize == 1:
        raise TypeError(f"scaled must be FP8 with scales of 16 or 32 bits, got {scaled.recipe}")
    factors, raw = _factors(scaled.scale), codes(scaled.data, "data")
    magnitude = raw & 0x7F
    if name == "E5M2" and bool((magnitude == _FORMS[name].first_special).any()):
        raise ValueError("scaled must have no infinity, which float8_e5m2fnuz has not")
    made_codes = np.where(magnitude >= _FORMS[name].first_special, np.uint8(_NAN), raw)
    made_codes[raw == _NAN] = 0
    return made_codes.view(numpy_dtype(f"F8_{name}FNUZ")), _times(factors, 2.0)


def fnuz_values(data: Any, scale: Any, fp8_format: str | None = None) -> Array:
    """What fnuz codes stand for, of any codes: float32 of the shape of ``data``. Arguments are those of `from_fnuz`.
    Raises ValueError where the shapes do not fit."""
    from breccia.verbs import dequantize

    form, raw, factors, recipe, layout = _stored(data, scale, fp8_format)
    ones = made(np.full_like(raw, form.one), float32(factors), recipe, layout)
    values: Array = decode(raw, form.sibling) * dequantize(ones)
    return values


def _stored(data: Any, scale: Any, fp8_format: str | None) -> tuple[_Form, Array, Array, ScalingRecipe, Layout]:
    """The format, codes, scales in the shape of their layout, recipe and layout of a stored weight."""
    name = _format_of(data, fp8_format)
    raw, factors = codes(data, "data"), _factors(scale)
    recipe, layout, scale_shape = fp8_recipe(name, raw.shape, factors.shape, factors.dtype.name)
    return _FORMS[name], raw, factors.reshape(scale_shape), recipe, layout


def _format_of(data: Any, fp8_format: str | None) -> str:
    told = {form.sibling: name for name, form in _FORMS.items()}.get(as_numpy(data, "data").dtype.name)
    name = fp8_format or told
    if name not in _FORMS or (told is not None and name != told):
        raise ValueError(f"fp8_format must be 'E4M3' or 'E5M2', as the dtype of data is, got {fp8_format!r}")
    return name


def _factors(scale: Any) -> Array:
    """Scales of 16 or 32 bits; bfloat16 may come as ``uint16``."""
    factors = as_numpy(scale, "scale")
    if factors.dtype.name not in STORED_SCALES:
        raise TypeError(f"scale must be float32, float16 or bfloat16, got {factors.dtype}")
    return factors


def _times(scale: Array, factor: float) -> Array:
    if scale.dtype == np.uint16:  # for whose numbers NumPy has no dtype
        raise TypeError("scale must be float32 or float16 where the package ml_dtypes is missing, got bfloat16")
    values = float32(scale)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = values * np.float32(factor)
        changed = product.astype(scale.dtype)
        back = float32(changed) * np.float32(1 / factor)
    if not np.array_equal(back, values, equal_nan=True):
        raise ValueError(f"scale must stay exact when it is multiplied by {factor:g}, some does not in {scale.dtype}")
    return changed
