# SPDX-License-Identifier: Apache-2.0
"""FP8 weights of other libraries: what their codes are called, and which recipe a scale of that shape tells; and the
FP8 of AMD's MI300, called fnuz: finite, no negative zero, whose code is the only NaN, and a bias one larger.

    E4M3: code b of fnuz is half of what b is in float8_e4m3fn; 0x7F and 0xFF, NaN there, are ±240; 0x80 is NaN
    E5M2: code b of fnuz is half of what b is in float8_e5m2; 0x7C … 0x7F, infinity and NaN there, are 32768 … 57344

So codes stay as they are under twice or half the scale. Source: the dtypes of ml_dtypes and torch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32
from breccia.bridges.parts import Part, part
from breccia.bridges.scales import SCALE_NAMES, STORED_SCALES, group_size_of, made, row_blocks
from breccia.formats import decode
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

FP8_DTYPES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_FP8_NAMES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
FP8_CODES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
# What safetensors calls FP8 codes. It has no names for other elements of vendors.
FP8_STORED = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def fp8_format_of(weight: Array, said: str | None = None) -> str:
    """The format of FP8 codes: what the header said, else what the array's dtype says (E4M3 where those are bytes)."""
    if weight.dtype.name.endswith("fnuz"):
        raise ValueError(f"weight must be of E4M3 or E5M2, got {weight.dtype}: breccia.bridges.from_fnuz reads it")
    return said or FP8_CODES.get(weight.dtype.name, "E4M3")


def of_a_vendor(recipe: ScalingRecipe) -> bool:
    """Whether codes are of an FP8 element that is neither E4M3 nor E5M2 of the OCP."""
    return isinstance(recipe, ScalingRecipe) and recipe.element.startswith("float8") and recipe.element not in FP8_CODES


def is_of_tensor(recipe: ScalingRecipe) -> bool:
    """Whether a recipe is E4M3 with one scale."""
    one = recipe.name == "delayed" or getattr(recipe, "granularity", "") == "tensor"
    return one and recipe.element == "float8_e4m3fn"


def fp8_stored(recipe: ScalingRecipe) -> str:
    """What safetensors calls the codes of an FP8 recipe, in the formats of other programs."""
    if of_a_vendor(recipe):
        raise ValueError(f"scaled must be of E4M3 or E5M2, whose codes the format has, got {recipe.element}")
    return FP8_STORED[recipe.element]


def fp8_parts(scaled: ScaledTensor, one: tuple[int, ...] = ()) -> dict[str, Part]:
    """``weight`` and ``weight_scale`` of FP8 with float scales: of shape ``one`` where there is one scale, and with an
    axis of 1 for columns, where there is one per row, as long as ``one``."""
    scale = as_numpy(scaled.scale, "scale")
    if scaled.layout.one_scale:
        scale = scale.reshape(one)
    elif scaled.layout.block == (1, 0):
        scale = scale.reshape(*scaled.shape[:-1], *one)
    return {
        "weight": part(codes(scaled.data, "data"), fp8_stored(scaled.recipe)),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
    }


def fp8_values(raw: Array, fp8_format: str) -> Array:
    """The numbers that FP8 codes stand for, as float32."""
    return decode(codes(raw, "raw"), _FP8_NAMES[fp8_format])


def fp8_recipe(
    fp8_format: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_dtype: str
) -> tuple[ScalingRecipe, Layout, tuple[int, ...]]:
    """Recipe, layout and the scale's shape in that layout, for an FP8 weight and the shape its scale is stored in."""
    if not shape:
        raise ValueError("weight.shape must have at least one axis, got ()")
    rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[-1])
    if math.prod(scale_shape) == 1 and rows * columns != 1:
        return Float8CurrentScaling(fp8_format=fp8_format), PerTensor(), ()
    batch = shape[:-2]
    scale_format = SCALE_NAMES.get(scale_dtype, "e8m0")
    scale_format = "fp32" if scale_format == "fp16" else scale_format
    if scale_shape in ((*batch, rows, 1), (*batch, rows)):
        return Float8CurrentScaling(fp8_format=fp8_format, granularity="row"), PerChannel(), scale_shape
    if len(scale_shape) == len(batch) + 4 and scale_shape[-3] == scale_shape[-1] == 1:  # (N/128, 1, K/128, 1)
        scale_shape = (*batch, scale_shape[-4], scale_shape[-2])
    if scale_shape[:-1] == (*batch, rows):
        size = group_size_of(columns, scale_shape[-1], "scale")
        recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, scale_format=scale_format)
        return recipe, row_blocks(size, columns), scale_shape
    for size in (128, 64, 256, 32, 16, 512):
        if scale_shape == (*batch, -(-rows // size), -(-columns // size)):
            recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, block_m=size, scale_format=scale_format)
            return recipe, PerBlockMN(size, size), scale_shape
    raise ValueError(
        f"scale.shape must be that of one scale per tensor, row, block of a row or square tile of {shape}, "
        f"got {scale_shape}"
    )


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
