# SPDX-License-Identifier: Apache-2.0
"""What the kernels read of a recipe and a ScaledTensor: names, block sizes and raw tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from breccia.kernels.triton.device.elements import BY_FORMAT, ELEMENTS, Form, form_of
from breccia.layouts import Layout
from breccia.recipes import Choices, choices, global_divides, scale_format
from breccia.value.form import axis_of

_SCALES = {None: "float", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}  # what kernels call a scale's codes
_MOST_COLUMNS = 16384  # of a tile of whole rows
_FLOAT_RULES = ("divide", "multiply", "asymmetric")  # whose scales are numbers
_TORCH_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def decodes(scaled: Any) -> bool:
    """Whether the kernels know what codes of a ScaledTensor stand for."""
    return scaled.recipe.element in BY_FORMAT and not choices(scaled.recipe).expanded


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

    def fits_rows(self, columns: int) -> bool:
        """Whether one tile holds whole rows, to each of which a scale belongs."""
        return self.rule == "divide" and 0 < columns <= _MOST_COLUMNS

    def over_rows(self, columns: int) -> Plan:
        """This plan, whose scales, if they are of whole rows, are of blocks that have all columns."""
        if self.kind != "row":
            return self
        return replace(self, block=(1, 1 << max(4, (columns - 1).bit_length())))

    @property
    def form(self) -> Form:
        """What a cast is compiled for; one-level NVFP4 is the rule "single" of kernels."""
        nvfp4 = self.kind == "nvfp4"
        scale = "e4m3" if nvfp4 else "float" if self.rule in _FLOAT_RULES else "e8m0"
        rule = "single" if nvfp4 and not self.two_level else self.rule
        return Form(ELEMENTS[self.element], scale, rule, *self.block, self.packed)


def plan(recipe: Any) -> Plan:
    """The plan of a recipe."""
    row = BY_FORMAT.get(recipe.element)
    element = "" if row is None else row.name
    if row is None or global_divides(recipe):
        return Plan("core", element)
    chosen = choices(recipe)
    if chosen.expanded:
        return Plan("core", element)
    made = _plain(chosen, element, recipe.layout.block)
    if not chosen.has_zero_point and not chosen.searches:
        return made
    if made.kind not in ("block", "nvfp4") or made.block[0] != 1 or made.block[1] not in (16, 32, 64, 128):
        return Plan("core", element)
    return replace(made, kind="search", rule=chosen.rule, search=chosen.searches)


def _plain(chosen: Choices, element: str, block: tuple[int, int]) -> Plan:
    """Without its search and its zero points."""
    rule = "divide" if chosen.has_zero_point else chosen.rule
    scale = _TORCH_FLOATS.get(chosen.scale, torch.float32)
    if block[1] == 0:
        kind = "row" if block[0] else "tensor"
        return Plan(kind, element, rule, block, scale, margin=2.0 ** max(-126, min(126, chosen.margin)))
    packed = ELEMENTS[element].packed
    if chosen.scale == "float8_e4m3fn":
        return Plan("nvfp4", element, rule, block, scale, packed, two_level=chosen.two_level)
    rows, cols = block
    powers = rows & (rows - 1) == 0 and cols & (cols - 1) == 0
    fits = powers and cols >= 2 and rows * max(cols, 16) <= 16384
    return Plan("block" if fits else "core", element, rule, block, scale, packed)


def finds_exact_scales(source: Any, layout: Any, target: Any) -> bool:
    """Whether `conversion.requantize` finds every scale that loses nothing. It tries the source's own and a power of
    two: that is all where scales are powers of two, and enough where the source's own always does."""
    known = {source.element, target.element} <= BY_FORMAT.keys()
    if not known or target.name == "nvfp4" or choices(target).has_zero_point:
        return False
    if scale_format(target) == "float8_e8m0fnu":
        return True
    return plan(target).scale_dtype == torch.float32 and _refines(layout, target.layout) and _holds(source, target)


def _holds(source: Any, target: Any) -> bool:
    """Whether every code of the source, less its zero point, is one of the target."""
    if choices(source).has_zero_point or "int" in target.element:
        return target.element == "int8" and "int4" in source.element
    if source.element == target.element:
        return True
    return bool(target.element == "float8_e4m3fn" and source.element.startswith(("float4", "float6")))


def _refines(source: Layout, target: Layout) -> bool:
    """Whether every block of one layout lies in one block of the other."""
    if source.one_scale:
        return True
    if axis_of(source) != -1:
        return False
    (m, n), (tm, tn) = source.block, target.block
    if source.block == (1, 0):
        return tm == 1
    return tn > 0 and m % tm == 0 and n % tn == 0


@dataclass(frozen=True)
class Source:
    """A matrix of codes, or a stack of them. `block` is (rows, columns) per scale, 0 for all of them."""

    codes: torch.Tensor
    scale: torch.Tensor
    element: str
    sfmt: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    packed: bool = False
    zero_point: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    def pointers(self) -> tuple[torch.Tensor, ...]:
        return (
            self.codes,
            self.scale,
            self.scale if self.zero_point is None else self.zero_point,
            self.scale if self.global_scale is None else self.global_scale,
        )

    def strides(self) -> tuple[int, int, int]:
        return self.codes.stride(0), self.scale.stride(0), self.scale.stride(1)

    def form(self) -> Form:
        """What a kernel is compiled for."""
        return form_of(self.element, self.sfmt, self.block, self.packed, self.zero_point, self.global_scale)


@dataclass(frozen=True, kw_only=True)
class Operand(Source):
    """A ScaledTensor as the kernels take it: codes (rows, K), scales along K, whatever way round it came."""

    tensor: Any
    transposed: bool  # the tensor is the transpose of what stands here


def operand(scaled: Any, exact: bool = True) -> Operand:
    """The raw parts of a ScaledTensor, transposed so that its blocks run along the last axis.

    Kernels multiply by a global scale. One that divides goes into float32 block scales, to the last bit, or with
    exact=False is replaced by its reciprocal, which leaves the scales bytes: a product's own rounding is larger."""
    if not decodes(scaled):
        what = scaled.recipe.element + (" in groups with exponents" if choices(scaled.recipe).expanded else "")
        raise TypeError(f"no GPU kernel decodes {what}: move the tensor to the CPU with .to('cpu')")
    transposed = scaled.layout.axis == -2
    source = scaled.mT if transposed else scaled
    recipe, layout = source.recipe, source.layout
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
    codes = source.data if source.data.dtype == torch.uint8 else source.data.view(torch.uint8)
    element, shape, zero = BY_FORMAT[recipe.element].name, tuple(source.shape), source.zero_point
    stored = (codes, scale, element, sfmt, shape, layout.block, source.is_packed, zero, global_scale)
    return Operand(*stored, tensor=scaled, transposed=transposed)
