# SPDX-License-Identifier: Apache-2.0
"""torch tensors below the verbs: dtypes, memory for the core, the parts of a cast, and the whole-array kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from breccia import _core, recipes
from breccia.frameworks.torch.meta import recipe_key, recipe_of, unflatten
from breccia.kernels import whole_array
from breccia.kernels.whole_array.namespace import Namespace
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import Form, cast_form
from breccia.value.inputs import SHORT_NAMES
from breccia.value.slicing import block_along
from breccia.verbs.cast_options import CastOptions

_NAN = {"float16": (0x7E00, torch.int16), "bfloat16": (0x7FC0, torch.int16)}


class Torch(Namespace):
    """`Namespace` for torch."""

    def astype(self, x: Any, dtype: str) -> Any:
        made = x.to(getattr(torch, dtype))
        if dtype in _NAN:  # which torch writes with any bits
            bits, integer = _NAN[dtype]
            nan = torch.full((), bits, dtype=integer, device=x.device).view(made.dtype)
            made = torch.where(x.isnan(), nan, made)
        return made

    def bits(self, x: Any) -> Any:
        return x.view(torch.int32)

    def floats(self, bits: Any) -> Any:
        return bits.view(torch.float32)

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value)).to(like.device, getattr(torch, dtype), non_blocking=True)
        return torch.full((), value, dtype=getattr(torch, dtype), device=like.device)

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        return torch.amax(x, axes, keepdim=True)

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        return torch.any(x, axes, keepdim=True)

    def sum(self, x: Any) -> Any:
        return torch.sum(x, dtype=torch.float64)

    def take(self, table: Any, index: Any) -> Any:
        return table[index.long()]

    def index(self, x: Any, axis: int, index: Any) -> Any:
        return torch.index_select(x, axis, torch.from_numpy(index).to(x.device, non_blocking=True))

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        return torch.nn.functional.pad(x, (0, cols, 0, rows))

    def is_known(self, x: Any) -> bool:
        return not torch.compiler.is_compiling()

    def is_zero(self, count: Any) -> bool:
        if not torch.compiler.is_compiling():
            return bool(count == 0)
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a second to import

        return bool(statically_known_true(count == 0))

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        if parts[0].itemsize == 1:  # torch joins bytes, but not codes of every format
            return torch.cat([part.view(torch.uint8) for part in parts], axis).view(parts[0].dtype)
        return torch.cat(parts, axis)

    def arange(self, n: int, like: Any) -> Any:
        return torch.arange(n, device=like.device).to(torch.int32)

    def integer(self, seed: Any, like: Any) -> Any:
        if isinstance(seed, int):
            return torch.full((), seed, dtype=torch.int64, device=like.device).to(torch.int32)
        return torch.as_tensor(seed, device=like.device).to(torch.int64).to(torch.int32)


NAMESPACE = Torch(torch)

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8")
DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "uint16")
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Formats with a torch dtype. The others are uint8.
NATIVE = {name: getattr(torch, name) for name in (*_EIGHT_BITS, "float4_e2m1fn_x2")}
NAMES = {dtype: name for name, dtype in {**NATIVE, **DTYPES}.items()}


def float_dtype(dtype: Any) -> torch.dtype:
    """A torch dtype from a dtype or name of any framework."""
    if isinstance(dtype, torch.dtype):
        found = dtype
    else:
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
        name = str(name).rpartition(".")[2]
        found = DTYPES.get(SHORT_NAMES.get(name, name), torch.bool)
    if found not in FLOATS:
        raise TypeError(f"out_dtype must be float32, float64, float16 or bfloat16, got {dtype!r}")
    return found


def dtype_name(x: Any) -> str:
    return NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))


def _memory(x: Any, argument: str, null: bool = False) -> tuple[int, Any, Any, str]:
    """The tensor's address, shape, strides in elements and dtype for the core."""
    name = NAMES.get(x.dtype)
    if name is None:
        raise TypeError(f"{argument} must be of a dtype the core has, got {x.dtype}")
    if not null and x.is_neg():
        raise TypeError(f"{argument} must not be a lazily negated view: call resolve_neg()")
    return 0 if null else x.data_ptr(), x.shape, x.stride(), name


def core_array(x: Any, argument: str, null: bool = False) -> _core.Array:
    """The tensor's memory for the core, as long as the tensor lives."""
    return _core.Array.of_elements(*_memory(x, argument, null))


_MOST = 4096  # tensors that are remembered: more than the layers of a model
_known: dict[Any, _core.ScaledTensor] = {}


def core_of(tensors: list[Any], key: str) -> _core.ScaledTensor:
    """The core's tensor, which describes memory and owns none: remembered by where the arrays lie and what they are."""
    places = (key, *[(one.data_ptr(), one.shape, one.stride(), one.dtype, one.is_neg()) for one in tensors])
    core = _known.get(places)
    if core is None:
        core = unflatten(tensors, key)._core
        if len(_known) >= _MOST:
            _known.clear()
        _known[places] = core
    return core


def data_dtype(element: str) -> torch.dtype:
    return NATIVE.get("float4_e2m1fn_x2" if element == "float4_e2m1fn" else element, torch.uint8)


# Shape, strides and dtype of data, scale, zero_point and global_scale, with None for what there is not.
_Parts = list[tuple[Any, Any, torch.dtype] | None]


def output_parts(shape: Any, key: str) -> _Parts:
    recipe = recipe_of(key)
    spec = _spec(recipe)
    plan = _plan(shape, recipe)
    fmt = recipes.scale_format(recipe)
    dtypes = (
        data_dtype(spec.element),
        DTYPES[plan["scale"][1]] if fmt is None else NATIVE[fmt],
        None if plan["zero_point"] is None else DTYPES[plan["zero_point"][1]],
        torch.float32,
    )
    return [
        None if part is None or dtype is None else (part[0], torch.empty(part[0], device="meta").stride(), dtype)
        for part, dtype in zip(plan.values(), dtypes, strict=True)
    ]


def _plan(shape: Any, recipe: ScalingRecipe) -> Any:
    """What the core says of a cast: (shape, dtype) of each part. Extents that a compiler leaves open stay so: the core
    is asked about a number of blocks in place of each, and every part has as many, or one element for so many."""
    known = [n if type(n) is int else None for n in shape]
    if None not in known:
        return _core.plan_cast(shape, _spec(recipe))
    asked = [4 * block_along(recipe.layout, True, i - len(known)) if n is None else n for i, n in enumerate(known)]
    plan: Any = _core.plan_cast(asked, _spec(recipe))

    def opened(part: Any) -> Any:
        extents = [
            n if known[i] is not None or n == 1 else (shape[i] + asked[i] // n - 1) // (asked[i] // n)
            for i, n in enumerate(part[0])
        ]
        return extents, part[1]

    return {name: None if part is None else opened(part) for name, part in plan.items()}


@functools.lru_cache(maxsize=1024)
def _known_parts(shape: Any, key: str) -> tuple[Any, ...]:
    """The four parts of a cast, how it packs and which there are: a small one would spend its time in finding out."""
    form = cast_form(recipe_of(key), shape, "")
    return (*output_parts(shape, key), form.packing, form.parts)


def empty(parts: _Parts, device: Any) -> list[Any]:
    return [torch.empty_strided(part[0], part[1], dtype=part[2], device=device) for part in parts if part is not None]


def cast_here(x: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    """The cast of memory the core may read."""
    memory = _memory(x, "x")
    return _converted(_core.cast_at, memory, memory[1], x.device, recipe, memory[3], options)


def requantize_here(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """The same of a ScaledTensor."""
    device, dtype = scaled.data.device, scaled.original_dtype
    return _converted(_core.requantize_at, (scaled._core,), scaled.shape, device, recipe, dtype, {})


def _converted(
    convert: Any, source: Any, shape: Any, device: Any, recipe: ScalingRecipe, dtype: str, options: dict[str, Any]
) -> ScaledTensor:
    """What a function of the core makes of ``source``, its first arguments. Without loops and helpers, which would take
    a tenth of the time of a small cast; empty_strided takes two thirds of the time of empty."""
    new = torch.empty_strided
    data, scale, zero_point, global_scale, packing, parts = _known_parts(shape, recipe_key(recipe))
    data = new(data[0], data[1], dtype=data[2], device=device)
    scale = new(scale[0], scale[1], dtype=scale[2], device=device)
    addresses = [data.data_ptr(), scale.data_ptr(), 0, 0]
    if zero_point is not None:
        zero_point = new(zero_point[0], zero_point[1], dtype=zero_point[2], device=device)
        addresses[2] = zero_point.data_ptr()
    if global_scale is not None:
        global_scale = new(global_scale[0], global_scale[1], dtype=global_scale[2], device=device)
        addresses[3] = global_scale.data_ptr()
    convert(*source, _spec(recipe), addresses, **options)
    return ScaledTensor._of(Form(recipe, recipe.layout, packing, dtype, parts), data, scale, zero_point, global_scale)


def parts_to_tensor(made: Any, shape: Any, recipe: ScalingRecipe, original_dtype: str) -> ScaledTensor:
    """The ScaledTensor of an operator's outputs, which are those parts that there are."""
    form = cast_form(returnable(recipe), shape, original_dtype)
    return ScaledTensor._of(form, *form.place(made))


def returnable(recipe: ScalingRecipe) -> ScalingRecipe:
    """The recipe; the one that torch.compile can return where it traces, which cannot return one made meanwhile."""
    return recipes.known(recipe) if torch.compiler.is_dynamo_compiling() else recipe


def raw(x: Any) -> Any:
    """Codes as uint8."""
    return x.view(torch.uint8) if x.dtype in NATIVE.values() else x


def _as_outputs(parts: whole_array.Parts, recipe: ScalingRecipe) -> list[Any]:
    spec = _spec(recipe)
    fmt = recipes.scale_format(recipe)
    data = parts.data.view(data_dtype(spec.element))
    scale = parts.scale if fmt is None else parts.scale.view(NATIVE[fmt])
    return [x for x in (data, scale, parts.zero_point, parts.global_scale) if x is not None]


def whole_array_cast(x: Any, recipe: ScalingRecipe, options: CastOptions) -> list[Any]:
    return _as_outputs(whole_array.cast(NAMESPACE, _widened(x), recipe, options), recipe)


def whole_array_dequantize(scaled: ScaledTensor, dtype: torch.dtype) -> Any:
    made = whole_array.dequantize(NAMESPACE, scaled, raw)
    nan = torch.full((), float("nan"), device=made.device)  # arithmetic may give a NaN any bits
    made = torch.where(made.isnan(), nan, made).expand(scaled.shape)
    return made.to(dtype) if dtype == torch.float64 else NAMESPACE.astype(made, NAMES[dtype])


def whole_array_requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> list[Any]:
    return _as_outputs(whole_array.requantize(NAMESPACE, scaled, recipe, raw), recipe)


def _widened(x: Any) -> Any:
    """float32 of x, the sign of a NaN kept, which a GPU's conversion from float16 loses."""
    values = x.to(torch.float32)
    if x.dtype != torch.float16:
        return values
    nan, negative = (
        torch.full((), bits, dtype=torch.int32, device=x.device).view(torch.float32) for bits in (0x7FC00000, -0x400000)
    )
    return torch.where(x.isnan(), torch.where(x.view(torch.int16) < 0, negative, nan), values)
