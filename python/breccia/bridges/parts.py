# SPDX-License-Identifier: Apache-2.0
"""How a bridge describes tensors of a checkpoint that are not read yet, or not made yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from breccia import _core
from breccia.bridges.common import Array, check_upright, float_dtype, to_torch, turned_shape
from breccia.formats import finfo
from breccia.layouts import Layout
from breccia.recipes import INT8Scaling, ScalingRecipe, choices
from breccia.recipes import _spec as recipe_spec
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import axis_of, cast_form, parts_there


@dataclass(frozen=True)
class Part:
    """One stored tensor: the header's dtype and shape, and how to make it."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    def in_torch(self) -> Any:
        """The tensor, on the CPU, in torch's type of the header's dtype; in bytes where elements are smaller than
        one."""
        from breccia.checkpoint.files.dtypes import DTYPES

        return as_torch(self.make(), "U8" if DTYPES[self.dtype].bits < 8 else self.dtype, self.shape)


def as_torch(array: Array, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array's bytes as a tensor on the CPU, in torch's type of the header's dtype."""
    from breccia.checkpoint.files.dtypes import torch_dtype

    raw = to_torch(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return raw.view(torch_dtype(dtype)).reshape(shape)


def part(array: Array, dtype: str) -> Part:
    """A part that is there already. ``dtype`` is the header's."""
    return Part(dtype, tuple(array.shape), lambda: array)


def materialize(parts: Mapping[str, Part]) -> dict[str, Array]:
    """The arrays, typed as their headers say."""
    from breccia.checkpoint.files.dtypes import numpy_dtype

    result = {}
    for name, value in parts.items():
        array = np.ascontiguousarray(value.make()).reshape(value.shape)
        wanted = numpy_dtype(value.dtype)
        result[name] = array if array.dtype == wanted else array.view(wanted)
    return result


LayOut = Callable[..., "dict[str, Part]"]


def rows_only(lay_out: LayOut, outside: bool = False) -> LayOut:
    """Decorates a bridge's ``lay_out(scaled)``: a transposed view has no place in a checkpoint, nor has an
    OutsideTensor, except ``outside``. The function raises what `check_upright` does."""

    @functools.wraps(lay_out)
    def checked(scaled: Any, **options: Any) -> dict[str, Part]:
        check_upright(getattr(scaled, "scaled", scaled) if outside else scaled)
        return lay_out(scaled, **options)

    return checked


rows_or_outside = functools.partial(rows_only, outside=True)


class Cut(Protocol):
    """What a tensor is of another that a format keeps as two, see `breccia.gguf.models`."""

    def of(self, whole: Any) -> Any:
        """This half of a tensor."""

    def together(self, halves: Sequence[Any]) -> Any:
        """The whole of both halves."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a logical tensor is made of the stored ones, where it is not what they are.

    Attributes:
        turned: whether rows are stored as columns.
        numbers: format of FP8 codes that are the numbers themselves, with no scale; "" of others.
        row_order: which of the model's rows each stored row is, if in another order.
        offset: what the file's values have more, 0 where nothing.
        expert: which matrix of a stored batch; None where it is the whole.
        experts: matrices in that batch.
        factor: name of a stored scale of the layer's inputs, which multiplies the columns; "" where there is none.
        low_rank: names of two stored matrices, (rank, columns) and (rows, rank), whose product is added before that.
        rotations: what is turned back in the values, in order, each with ``undone(values, array)``.
        members: tensors that are put together, along a new first axis or by ``cut``.
        whole: the tensor that this is a half of.
        cut: which half, or how halves are put together.
    """

    turned: bool = False
    numbers: str = ""
    row_order: Array | None = None
    offset: float = 0.0
    expert: int | None = None
    experts: int = 1
    factor: str = ""
    low_rank: tuple[str, ...] = ()
    rotations: tuple[Any, ...] = ()
    members: tuple[Found, ...] = ()
    whole: Found | None = None
    cut: Cut | None = None

    @property
    def is_made(self) -> bool:
        """Whether no stored tensor has the bytes."""
        return bool(self.members or self.expert is not None or self.offset or self.cut or self.rotations)

    @property
    def sources(self) -> tuple[Found, ...]:
        """The tensors that it is made of, or a half of."""
        return self.members if self.whole is None else (self.whole,)


STORED = Origin()  # as it is stored

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Found:
    """One logical tensor of a checkpoint, known from headers alone.

    Attributes:
        name: of the logical tensor, such as ``model.layers.0.mlp.up_proj.weight``.
        format: the bridge that reads it, or "plain".
        kind: which of the bridge's formats.
        parts: role → name of the stored tensor.
        shape: logical.
        recipe: None where the values have no ScaledTensor form.
        layout: of the scales.
        scale_dtype: NumPy name of the scales' dtype.
        zero_dtype: of the zero points', "" for the recipe's own.
        global_shape: of the global scale, if there is one.
        dtype: header's dtype of a plain tensor.
        details: what else the bridge knows, a frozen record of a class that it declares; see `record`.
        origin: how it is made of the stored tensors.
        findings: what looks wrong.
    """

    name: str
    format: str
    kind: str
    parts: dict[str, str]
    shape: tuple[int, ...]
    recipe: ScalingRecipe | None = None
    layout: Layout | None = None
    scale_dtype: str = "uint8"
    zero_dtype: str = ""
    global_shape: tuple[int, ...] = ()
    dtype: str = ""
    details: object = None
    origin: Origin = STORED
    findings: tuple[str, ...] = ()

    def record(self, kind: type[Record]) -> Record:
        """What the bridge that found the tensor knows of it.

        Args:
            kind: the class that the bridge declares.

        Returns:
            `details`.

        Raises:
            TypeError: it is of another class.
        """
        if not isinstance(self.details, kind):
            raise TypeError(f"details must be of {kind.__qualname__}, got {type(self.details).__qualname__}")
        return self.details

    def ghost(self) -> ScaledTensor:
        """A ScaledTensor of this shape, recipe and layout whose memory was never touched."""
        assert self.recipe is not None
        assert self.layout is not None
        if axis_of(self.layout) == -2:  # a transposed view
            return replace(self, shape=turned_shape(self.shape), layout=self.layout.T).ghost().mT
        return ghost(
            self.shape,
            self.recipe,
            self.layout,
            self.scale_dtype,
            zero_dtype=self.zero_dtype,
            global_scale="global_scale" in self.parts,
            global_shape=self.global_shape,
        )


@functools.lru_cache(maxsize=8)
def ghost(
    shape: tuple[int, ...],
    recipe: ScalingRecipe,
    layout: Layout | None = None,
    scale_dtype: str | None = None,
    *,
    zero_dtype: str = "",
    global_scale: bool = False,
    global_shape: tuple[int, ...] = (),
) -> ScaledTensor:
    """What casting a tensor of that shape would give, as to shapes and types; the memory is never
    touched, so that its size costs nothing."""

    layout = layout or recipe.layout
    spec = recipe_spec(recipe)
    if scale_dtype is None:
        plan = _core.plan_cast(list(shape), spec)
        scale_dtype = str(plan["scale"][1])
        global_scale = plan["global_scale"] is not None
        scale_dtype = "uint8" if scale_dtype.startswith("float8") else scale_dtype
    four = finfo(recipe.element).bits == 4
    stored = (*shape[:-1], (shape[-1] + 1) // 2) if four else shape
    scale_shape = layout.scale_shape(shape)
    width = {"bfloat16": "uint16"}.get(scale_dtype, scale_dtype)
    scale = np.empty(scale_shape, width)
    if scale_dtype == "bfloat16" and choices(recipe).scale != "bfloat16":
        scale = np.empty(scale_shape, float_dtype("bfloat16"))
    own = "float16" if choices(recipe).expanded else "int8" if isinstance(recipe, INT8Scaling) else "uint8"
    second = choices(recipe).has_zero_point or choices(recipe).expanded
    zero_point = np.empty(scale_shape, zero_dtype or own) if second else None
    level = np.empty(global_shape, np.float32) if global_scale else None
    form = cast_form(recipe, shape, "float32")._replace(layout=layout, parts=parts_there(zero_point, level))
    return ScaledTensor._of(form, np.empty(stored, np.uint8), scale, zero_point, level)


def low_rank_of(module: str, entries: Mapping[str, Any]) -> tuple[str, ...]:
    """The matrices of the branch beside a weight, (rank, columns) and (rows, rank); none where there is none.
    ``module`` ends with a dot."""
    pairs = [tuple(f"{module}{at}svdquant_lora_{one}" for one in "ab") for at in ("", "weight_quantizer.")]
    return next((pair for pair in pairs if all(name in entries for name in pair)), ())
