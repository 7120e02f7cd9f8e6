# SPDX-License-Identifier: Apache-2.0
"""A weight of codes at rest under FSDP2, for layers that pass gradients on and do not learn.

    row n of the weight:   | codes of the row | its scales | its zero points |     bytes

FSDP2 cuts rows wherever it likes: each has the scales of its blocks, those of tiles too, which are joined again after
the gather. What is one number for all rows is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from breccia import layouts, verbs
from breccia.form import Form
from breccia.frameworks._torch_weights import LinearWeight, MadeWeight, QuantizedWeight
from breccia.scaled_tensor import ScaledTensor

_aten = torch.ops.aten
_SAME_SHAPE = (
    _aten.detach.default,
    _aten.clone.default,
    _aten.empty_like.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
)


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
        layout = self.form.layout
        return layout.block_m if isinstance(layout, layouts.PerBlockMN) else 1


def resting_of(scaled: ScaledTensor, dtype: torch.dtype, square_blocks: bool) -> RestingWeight:
    """A weight as rows of bytes that looks like floats of the dtype."""
    rows, kinds, shared = [], [], {}
    for name in scaled._form.parts:
        part = getattr(scaled, name)
        if part.ndim < 2:
            shared[name] = part
            continue
        bits = part.contiguous().view(torch.uint8)
        per = -(-scaled.shape[0] // bits.shape[0])
        if per > 1:
            per = scaled.layout.block_m
            bits = bits.repeat_interleave(per, 0)[: scaled.shape[0]]
        rows.append(bits)
        kinds.append((name, bits.shape[1], part.dtype))
    packing = Packing(scaled._form, square_blocks, dtype, scaled.shape, tuple(kinds))
    return made(torch.cat(rows, 1), packing, shared)


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
        short = rows - self._rows.shape[0]
        return (torch.nn.functional.pad(self._rows, (0, 0, 0, short)) if short else self._rows.contiguous(),), None

    def fsdp_post_all_gather(
        self, outs: tuple[Any, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """See `breccia.distributed.ScaledParameter`."""
        shared = {name: part.to(outs[0].device) for name, part in self._shared.items()}
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
            raise TypeError(f"a parameter with at_rest='codes' cannot be written to, got {func}: train at_rest='bf16'")
        args, kwargs = tree_map_only(RestingWeight, _values, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RestingWeight:
        copy = made(self._rows.clone(), self._packing, dict(self._shared), tuple(self.shape))
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _values(self).__reduce_ex__(protocol)

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


def _rows_of(func: Any, source: RestingWeight, rest: Any, options: dict[str, Any]) -> Any:
    """What FSDP2 does with parameters, done with the rows of bytes; None for another operator."""
    rows = source._rows
    if func in _SAME_SHAPE:
        if options.get("dtype") not in (None, source.dtype):
            return None
        options.pop("dtype", None)
        new = func(rows, **options)
    elif func is _aten.split.Tensor:
        if len(rest) > 1 and rest[1] != 0:
            raise ValueError(f"a parameter with at_rest='codes' must be cut along dim 0, got {rest[1]}")
        return [made(part, source._packing, source._shared) for part in rows.split(rest[0])]
    elif func is _aten.slice.Tensor and (not rest or rest[0] == 0):
        new = func(rows, *rest)
    elif func is _aten.new_zeros.default and len(rest[0]) == 2 and options.get("dtype") in (None, source.dtype):
        new = rows.new_zeros(rest[0][0], rows.shape[1])
    elif func is _aten.copy_.default and isinstance(rest[0], RestingWeight):
        rows.copy_(rest[0]._rows)
        return source
    elif func is _aten.view.default and list(rest[0]) in ([-1], [source.numel()]):
        return made(rows, source._packing, source._shared, (source.numel(),))
    elif func in (_aten.as_strided.default, _aten.view.default) and tuple(rest[0]) == tuple(source.shape):
        new = rows
    else:
        return None
    return made(new, source._packing, source._shared, None if source.ndim == 2 else tuple(source.shape))


def _values(weight: RestingWeight) -> Any:
    scaled = unpack(weight._packing, weight._rows, weight._shared, weight._rows.shape[0] == weight._packing.shape[0])
    return verbs.dequantize(scaled, dtype=weight.dtype).reshape(weight.shape)


def _quantized(weight: RestingWeight) -> MadeWeight:
    return MadeWeight(unpack(weight._packing, weight._rows, weight._shared), weight._packing.square_blocks)


RestingWeight._quantize = staticmethod(_quantized)
