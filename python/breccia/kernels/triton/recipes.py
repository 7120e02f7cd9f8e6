# SPDX-License-Identifier: Apache-2.0
"""What the kernels read of a recipe and a ScaledTensor: names, block sizes and raw tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from breccia.kernels.triton.runtime import ELEMENTS
from breccia.recipes import global_divides, scale_format

_SCALES = {None: "float", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}  # what kernels call a scale's codes
_ELEMENTS = {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float6_e2m3fn": "e2m3",
    "float6_e3m2fn": "e3m2",
    "float4_e2m1fn": "e2m1",
    "int4": "int4",
    "uint4": "uint4",
    "int8": "int8",
}
_TORCH_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def decodes(scaled: Any) -> bool:
    """Whether the kernels know the element format of a ScaledTensor."""
    return scaled.recipe.element in _ELEMENTS


@dataclass(frozen=True)
class Plan:
    """How `cast` quantizes to a recipe. `block` is (rows, columns) per scale, 0 for all of them."""

    kind: str  # tensor, row, block, nvfp4, search (`cast_search`) or core (whole-array operations)
    element: str
    rule: str = "divide"
    block: tuple[int, int] = (0, 0)
    scale_dtype: torch.dtype = torch.float32
    packed: bool = False
    margin: float = 1.0
    two_level: bool = False
    search: bool = False  # for the scale of least squared error


def plan(recipe: Any) -> Plan:
    """The plan of a recipe."""
    element = _ELEMENTS.get(recipe.element, "")
    if not element or global_divides(recipe):
        return Plan("core", element)
    made = _plain(recipe, element)
    search = getattr(recipe, "scale_search", "amax") != "amax"
    symmetric = getattr(recipe, "symmetric", True)
    if symmetric and not search:
        return made
    if made.kind not in ("block", "nvfp4") or made.block[0] != 1 or made.block[1] not in (16, 32, 64, 128):
        return Plan("core", element)
    return replace(made, kind="search", rule=made.rule if symmetric else "asymmetric", search=search)


def _plain(recipe: Any, element: str) -> Plan:
    """Without its search and its zero points."""
    rule = "multiply" if getattr(recipe, "scale_rule", "") == "transformer_engine" else "divide"
    if recipe.name == "delayed":
        return Plan("tensor", element, rule, margin=2.0 ** max(-126, min(126, recipe.margin)))
    if recipe.name == "current":
        return Plan("row", element, rule, (1, 0)) if recipe.granularity == "row" else Plan("tensor", element, rule)
    if recipe.name == "nvfp4":
        return Plan("nvfp4", element, recipe.scale_rule, (1, 16), packed=True, two_level=recipe.two_level)
    scale = _TORCH_FLOATS.get(getattr(recipe, "scale_format", getattr(recipe, "scale_dtype", "")), torch.float32)
    if recipe.name == "block":
        rule = "rceil" if recipe.scale_format == "e8m0" else "divide"
        return _block(element, rule, (recipe.block_m, recipe.block_k), scale)
    if recipe.name in ("mxfp8", "mxfp6", "mxfp4"):
        return _block(element, recipe.scale_rounding, (1, 32), scale, element == "e2m1")
    if recipe.name == "int8" and recipe.group_size is None:
        return Plan("row", element, "divide", (1, 0), scale)
    return _block(element, "divide", (1, recipe.group_size), scale, recipe.name == "int4")


def finds_exact_scales(source: Any, layout: Any, target: Any) -> bool:
    """Whether `conversion.requantize` finds every scale that loses nothing. It tries the source's own and a power of
    two: that is all where scales are powers of two, and enough where the source's own always does."""
    a, b = ELEMENTS.get(_ELEMENTS.get(source.element, "")), ELEMENTS.get(_ELEMENTS.get(target.element, ""))
    if a is None or b is None or target.name == "nvfp4" or not getattr(target, "symmetric", True):
        return False
    if scale_format(target) == "float8_e8m0fnu":
        return True
    return plan(target).scale_dtype == torch.float32 and _refines(layout, target.layout) and _holds(source, target)


def _holds(source: Any, target: Any) -> bool:
    """Whether every code of the source, less its zero point, is one of the target."""
    if not getattr(source, "symmetric", True) or "int" in target.element:
        return target.element == "int8" and "int4" in source.element
    if source.element == target.element:
        return True
    return bool(target.element == "float8_e4m3fn" and source.element.startswith(("float4", "float6")))


def _refines(source: Any, target: Any) -> bool:
    """Whether every block of one layout lies in one block of the other."""
    if source.name == "per_tensor":
        return True
    if source.axis != -1:
        return False
    (m, n), (tm, tn) = (
        (getattr(x, "block_m", 1), getattr(x, "block_n", getattr(x, "block_size", 0))) for x in (source, target)
    )
    if source.name == "per_channel":
        return tm == 1
    return m % tm == 0 and tn > 0 and n % tn == 0


def _block(element: str, rule: str, block: tuple[int, int], scale: torch.dtype, packed: bool = False) -> Plan:
    rows, cols = block
    powers = rows & (rows - 1) == 0 and cols & (cols - 1) == 0
    fits = powers and cols >= 2 and rows * max(cols, 16) <= 16384
    return Plan("block" if fits else "core", element, rule, block, scale, packed)


@dataclass(frozen=True)
class Operand:
    """A ScaledTensor as the kernels take it: codes (rows, K), scales along K, whatever way round it came."""

    tensor: Any
    codes: torch.Tensor
    scale: torch.Tensor
    element: str
    sfmt: str
    block: tuple[int, int]
    packed: bool
    zero_point: torch.Tensor | None
    global_scale: torch.Tensor | None
    shape: tuple[int, ...]
    transposed: bool  # the tensor is the transpose of what stands here


def operand(scaled: Any, exact: bool = True) -> Operand:
    """The raw parts of a ScaledTensor, transposed so that its blocks run along the last axis.

    Kernels multiply by a global scale. One that divides goes into float32 block scales, to the last bit, or with
    exact=False is replaced by its reciprocal, which leaves the scales bytes: a product's own rounding is larger.

    Raises:
        TypeError: no kernel decodes the element format.
    """
    if not decodes(scaled):
        raise TypeError(f"no GPU kernel decodes {scaled.recipe.element}: move the tensor to the CPU with .to('cpu')")
    transposed = scaled.layout.axis == -2
    source = scaled.mT if transposed else scaled
    recipe, layout = source.recipe, source.layout
    block = {
        "per_tensor": (0, 0),
        "per_channel": (1, 0),
        "per_block_k": (1, getattr(layout, "block_size", 0)),
        "per_block_mn": (getattr(layout, "block_m", 0), getattr(layout, "block_n", 0)),
    }[layout.name]
    scale = source.scale
    if layout.name == "per_channel" and scale.ndim < source.ndim:
        scale = scale[..., None]
    sfmt = _SCALES[scale_format(recipe)]
    global_scale = source.global_scale
    if global_scale is not None and global_divides(recipe):
        if exact:
            scale = scale.view(torch.float8_e4m3fn).float() / global_scale
            sfmt, global_scale = "float", None
        else:
            global_scale = 1 / global_scale
    codes = source.data
    return Operand(
        scaled,
        codes if codes.element_size() == 1 and codes.dtype == torch.uint8 else codes.view(torch.uint8),
        scale,
        _ELEMENTS[recipe.element],
        sfmt,
        block,
        source.is_packed,
        source.zero_point,
        global_scale,
        tuple(source.shape),
        transposed,
    )
