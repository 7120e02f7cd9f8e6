# SPDX-License-Identifier: Apache-2.0
"""A weight of codes at rest under FSDP2, for layers that pass gradients on and do not learn.

    row n of the weight:   | codes of the row | its scales | its zero points |     bytes

FSDP2 cuts rows wherever it likes: each has the scales of its blocks, those of tiles too, which are joined again after
the gather. What is one number for all rows is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from breccia import layouts, verbs
from breccia.frameworks.torch.weights import LinearWeight, MadeWeight, QuantizedWeight
from breccia.recipes import choices
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import Form

_aten = torch.ops.aten
EQUAL = {_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten._pin_memory.default}


@dataclass(frozen=True)
class Packing:
    """What the rows of bytes mean."""

    form: Form
    square_blocks: bool
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole
    parts: tuple[tuple[str, int, torch.dtype], ...]  # of each row: name, bytes, dtype

    @property
    def rows_of_scale(self) -> int:
        """Rows that share one stored scale."""
        return self.form.layout.block.rows or 1

    @property
    def each_row_alone(self) -> bool:
        """Whether the bytes of a row follow from its own values."""
        return not choices(self.form.recipe).one_for_all and not self.square_blocks and self.rows_of_scale == 1

    def like(self, other: Packing) -> bool:
        """Whether rows of the other mean the same, whatever dtype they look like."""
        form = other.form._replace(original_dtype=self.form.original_dtype)
        return replace(other, dtype=self.dtype, form=form) == self


def resting_of(scaled: ScaledTensor, dtype: torch.dtype, square_blocks: bool) -> RestingWeight:
    """A weight as rows of bytes that looks like floats of the dtype."""
    rows, kinds, shared = packed_rows(scaled)
    packing = Packing(scaled._form, square_blocks, dtype, scaled.shape, kinds)
    return made(rows, packing, shared)


def packed_rows(
    scaled: ScaledTensor,
) -> tuple[torch.Tensor, tuple[tuple[str, int, torch.dtype], ...], dict[str, torch.Tensor]]:
    """The bytes of some rows of a weight, what they mean, and the parts that are one number for all rows."""
    rows, kinds, shared = [], [], {}
    for name in scaled._form.parts:
        part = getattr(scaled, name)
        if part.ndim < 2:
            shared[name] = part
            continue
        bits = part.contiguous().view(torch.uint8)
        per = -(-scaled.shape[0] // max(bits.shape[0], 1))
        if per > 1:
            per = scaled.layout.block_m
            bits = bits.repeat_interleave(per, 0)[: scaled.shape[0]]
        rows.append(bits)
        kinds.append((name, bits.shape[1], part.dtype))
    return torch.cat(rows, 1), tuple(kinds), shared


def unpack(packing: Packing, rows: torch.Tensor, shared: dict[str, Any], whole: bool = True) -> ScaledTensor:
    """The weight of rows of bytes: all of them, or some, each of which then is a row of blocks by itself."""
    parts, at = dict(shared), 0
    per = packing.rows_of_scale
    form = packing.form
    if not whole and per > 1:
        form = form._replace(layout=layouts.PerBlockMN(1, form.layout.block_n))
    for name, size, dtype in packing.parts:
        bits = rows[:, at : at + size]
        at += size
        if name != "data" and per > 1 and whole:
            bits = bits[::per]
        parts[name] = bits.clone(memory_format=torch.contiguous_format).view(dtype)
    return ScaledTensor._of(form, *form.place([parts[name] for name in form.parts]))


class RestingWeight(LinearWeight):
    """A frozen parameter of floats (N, K) whose memory holds codes; see `breccia.distributed.ScaledParameter`."""

    _rows: Any
    _packing: Packing
    _shared: dict[str, Any]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Any, ...], Any]:
        """See `breccia.distributed.ScaledParameter`."""
        rows = -(-self._packing.shape[0] // mesh.size())
        held = self._rows
        shared: tuple[str, ...] = ()
        if rows * (mesh.size() - 1) >= self._packing.shape[0]:  # the last rank has no rows, and loads nothing
            shared = tuple(self._shared)
            numbers = (self._shared[name].reshape(1).view(torch.uint8) for name in shared)
            held = torch.cat([held, *(number.expand(len(held), -1) for number in numbers)], 1)
        short = rows - held.shape[0]
        return (torch.nn.functional.pad(held, (0, 0, 0, short)) if short else held.contiguous(),), shared

    def fsdp_post_all_gather(
        self, outs: tuple[Any, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """See `breccia.distributed.ScaledParameter`."""
        shared = {name: part.to(outs[0].device) for name, part in self._shared.items()}
        at = self._rows.shape[1]
        for name in metadata:
            size = shared[name].nbytes
            shared[name].copy_(outs[0][0, at : at + size].clone().view(shared[name].dtype).reshape(()))
            at += size
        scaled = unpack(self._packing, outs[0][: self._packing.shape[0]], shared)
        if out is not None:
            getattr(out, "_local_tensor", out).refill_(scaled)
            return None
        own = tuple(getattr(scaled, name) for name, *_ in self._packing.parts)
        return QuantizedWeight(scaled, param_dtype, self._packing.square_blocks), own

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        for name, part in self._shared.items():
            setattr(self, f"_one_{name}", part)
        return ["_rows", *(f"_one_{name}" for name in self._shared)], (self._packing, tuple(self._shared))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], about: Any, size: Any, stride: Any) -> RestingWeight:
        packing, names = about
        return made(inner["_rows"], packing, {name: inner[f"_one_{name}"] for name in names}, tuple(size))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args else None
        if isinstance(source, RestingWeight):
            found = _rows_of(func, source, args[1:], dict(kwargs))
            if found is not None:
                return found
        if func._schema.is_mutable and isinstance(source, RestingWeight):
            raise TypeError(
                f"a parameter with at_rest='codes' cannot be written to but by copy_, got {func}: train at_rest='bf16'"
            )
        args, kwargs = tree_map_only(RestingWeight, _values, (args, kwargs))
        return func(*args, **kwargs)

    def take_(self, rows: torch.Tensor, shared: dict[str, torch.Tensor]) -> None:
        """Take the bytes of as many other rows, and by the names of parts what is one number for all of them."""
        self._rows.copy_(rows)
        for name, part in self._shared.items():
            part.copy_(shared[name])

    def __deepcopy__(self, memo: dict[int, Any]) -> RestingWeight:
        shared = {name: part.clone() for name, part in self._shared.items()}
        copy = made(self._rows.clone(), self._packing, shared, tuple(self.shape))
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        packing = self._packing
        described = (*packing.form, packing.square_blocks, packing.dtype, packing.shape, packing.parts)
        return _rebuilt, (self._rows, described, self._shared, tuple(self.shape))

    def __repr__(self) -> str:
        return f"RestingWeight({_values(self)!r}, recipe={self._packing.form.recipe})"


def made(
    rows: torch.Tensor, packing: Packing, shared: dict[str, Any], shape: tuple[int, ...] | None = None
) -> RestingWeight:
    """The weight of rows of bytes."""
    weight: RestingWeight = torch.Tensor._make_wrapper_subclass(
        RestingWeight,
        (rows.shape[0], packing.shape[1]) if shape is None else shape,
        dtype=packing.dtype,
        device=rows.device,
        pin_memory=rows.is_pinned(),
    )
    weight._rows, weight._packing, weight._shared = rows, packing, shared
    return weight


def _rebuilt(
    rows: torch.Tensor, described: tuple[Any, ...], shared: dict[str, Any], shape: tuple[int, ...]
) -> RestingWeight:
    """Of a file."""
    *form, square_blocks, dtype, whole, parts = described
    return made(rows, Packing(Form(*form), square_blocks, dtype, whole, parts), shared, shape)


torch.serialization.add_safe_globals([_rebuilt])


def _fill(weight: RestingWeight, given: torch.Tensor) -> None:
    """Takes codes of the same recipe as they are, and those of floats."""
    packing = weight._packing
    if given.shape != weight.shape:
        raise ValueError(
            f"a parameter with at_rest='codes' must get shape {tuple(weight.shape)}, got {tuple(given.shape)}"
        )
    if isinstance(given, RestingWeight) and packing.like(given._packing):
        weight.take_(given._rows, given._shared)
        return
    rows, whole = weight.shape[0], packing.shape[0]
    if not (packing.each_row_alone or rows == whole):
        raise ValueError(
            f"a parameter with at_rest='codes' must get floats of all {whole} rows at once, for scales of "
            f"{packing.form.recipe} follow from more than one row, got {rows}: use breccia.distributed.load, or load "
            "them as floats and pass these to load_state_dict of a model of breccia.nn.ScaledLinear"
        )
    if rows:
        values = given.detach().to(weight.device, weight.dtype)
        scaled = verbs.cast(values, packing.form.recipe, square_blocks=packing.square_blocks)
        weight.take_(*packed_rows(scaled)[::2])


def _rows_of(func: Any, source: RestingWeight, rest: Any, options: dict[str, Any]) -> Any:
    """What FSDP2 does with parameters, done with the rows of bytes; None for another operator."""
    rows, shared = source._rows, source._shared
    if func in EQUAL or func is _aten.empty_like.default:
        if options.get("dtype") not in (None, source.dtype):
            return None
        options.pop("dtype", None)
        new = func(rows, **options)
        shared = {name: func(part, **options) for name, part in shared.items()}
    elif func is _aten.split.Tensor:
        if len(rest) > 1 and rest[1] != 0:
            raise ValueError(f"a parameter with at_rest='codes' must be cut along dim 0, got {rest[1]}")
        return [made(part, source._packing, source._shared) for part in rows.split(rest[0])]
    elif func is _aten.slice.Tensor and (not rest or rest[0] == 0):
        new = func(rows, *rest)
    elif func is _aten.new_zeros.default and len(rest[0]) == 2 and options.get("dtype") in (None, source.dtype):
        new = rows.new_zeros(rest[0][0], rows.shape[1])
        shared = {name: part.clone() for name, part in shared.items()}
    elif func is _aten.copy_.default and source.ndim == 2:
        _fill(source, rest[0])
        return source
    elif func is _aten.view.default and list(rest[0]) in ([-1], [source.numel()]):
        return made(rows, source._packing, source._shared, (source.numel(),))
    elif func in (_aten.as_strided.default, _aten.view.default) and tuple(rest[0]) == tuple(source.shape):
        new = rows
    else:
        return None
    return made(new, source._packing, shared, None if source.ndim == 2 else tuple(source.shape))


def _values(weight: RestingWeight) -> Any:
    scaled = unpack(weight._packing, weight._rows, weight._shared, weight._rows.shape[0] == weight._packing.shape[0])
    return verbs.dequantize(scaled, weight.dtype).reshape(weight.shape)


def _quantized(weight: RestingWeight) -> MadeWeight:
    return MadeWeight(unpack(weight._packing, weight._rows, weight._shared), weight._packing.square_blocks)


RestingWeight._quantize = staticmethod(_quantized)
