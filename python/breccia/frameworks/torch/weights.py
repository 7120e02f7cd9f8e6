# SPDX-License-Identifier: Apache-2.0
"""Weights that reach a linear layer quantized, and how the products of its passes read them.

forward    x (M, K) · Q(w) (N, K)ᵀ      the codes as they are
backward   dy (M, N) · Q(w)             the same values along N: the codes turned where a scale is for a square of
                                        the weight, or for all of it; values quantized anew elsewhere
"""

from __future__ import annotations

from typing import Any

import torch

from breccia import verbs
from breccia.autograd import block_width
from breccia.frameworks.torch.launches import contiguous
from breccia.frameworks.torch.tensors import raw
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS, Form


class LinearWeight(torch.Tensor):  # type: ignore[misc]
    """A tensor of floats that linear layers multiply by codes, those of ``_quantize(weight)``: a function, for the
    compiler traces no method of a tensor that returns something else."""

    _quantize: Any


class MadeWeight:
    """A quantized weight (N, K) as an operand of products contracted over K."""

    def __init__(self, scaled: ScaledTensor, square_blocks: bool) -> None:
        self.scaled, self.square_blocks = scaled, square_blocks
        self.width = block_width(scaled.recipe)

    def quantized(self, width: int) -> ScaledTensor:
        """See `breccia.autograd.Products`."""
        columns = self.scaled.shape[-1]
        if columns % width:
            raise ValueError(f"w must have columns in multiples of {width}, as the input's recipe wants, got {columns}")
        return self.scaled

    def turned(self) -> TurnedWeight:
        """The transposed weight."""
        return TurnedWeight(self.scaled, self.square_blocks)


class TurnedWeight:
    """The transpose (K, N) of a quantized weight (N, K), as an operand of products contracted over N."""

    def __init__(self, scaled: ScaledTensor, square_blocks: bool) -> None:
        self._scaled, self._square_blocks = scaled, square_blocks
        self.width = block_width(scaled.recipe)

    def quantized(self, width: int) -> ScaledTensor:
        """Padded with zeros along N to a multiple of ``width``; see `breccia.autograd.Products`."""
        scaled = self._scaled
        columns = scaled.shape[0]
        short = -columns % width
        if not turns_alike(scaled.recipe, self._square_blocks):
            values = verbs.dequantize(scaled).mT
            values = torch.nn.functional.pad(values, (0, short)) if short else contiguous(values)
            return verbs.cast(values, scaled.recipe)
        codes = codes_of(scaled).T
        codes = torch.nn.functional.pad(codes, (0, short)) if short else codes
        form = scaled._form.with_columns(columns + short)
        scale = self._turned_scale(columns + short)
        data = packed(codes, form.packing).view(scaled.data.dtype)
        return ScaledTensor._of(form, data, scale, None, scaled.global_scale)

    def _turned_scale(self, columns: int) -> Any:
        scaled = self._scaled
        scale, layout = scaled.scale, scaled.layout
        if layout.one_scale:
            return scale
        block = scaled.recipe.layout.block.columns
        bits = raw(scale)[::block] if self._square_blocks else raw(scale)
        turned = bits.T
        blocks = -(-columns // block)
        if turned.shape[1] < blocks:  # whole blocks of padding, whose codes are zeros
            turned = torch.cat([turned, turned[:, -1:].expand(-1, blocks - turned.shape[1])], 1)
        if self._square_blocks:
            turned = turned.repeat_interleave(block, 0)[: scaled.shape[1]]
        return turned.contiguous().view(scale.dtype)


def turns_alike(recipe: ScalingRecipe, square_blocks: bool) -> bool:
    """Whether a matrix and its transpose have the same codes."""
    return square_blocks or recipe.layout.block.rows == recipe.layout.block.columns


def codes_of(scaled: ScaledTensor) -> Any:
    """One code per byte, as uint8 of the logical shape."""
    data = scaled.data.view(torch.uint8)
    if not scaled.is_packed:
        return data
    pairs = torch.stack([data & 15, data >> 4], -1)
    return pairs.reshape(*data.shape[:-1], -1)[..., : scaled.shape[-1]]


def packed(codes: Any, packing: str) -> Any:
    """The data of a tensor of one code per byte; ``packing``: of its form."""
    codes = contiguous(codes)  # before all else: results of elementwise operators have their operands' strides
    if packing == "one":
        return codes
    if packing == "odd":
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


class QuantizedWeight(LinearWeight):
    """A weight of codes that looks like floats to torch: linear layers multiply by the codes, other operators get the
    values. It cannot be written to; its gradient is one of floats."""

    _form: Form
    _data: Any
    _scale: Any
    _zero_point: Any
    _global_scale: Any
    _square_blocks: bool

    @staticmethod
    def __new__(cls, scaled: ScaledTensor, dtype: torch.dtype, square_blocks: bool = False) -> QuantizedWeight:
        made: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls, scaled.shape, dtype=dtype, device=scaled.data.device
        )
        return made

    def __init__(self, scaled: ScaledTensor, dtype: torch.dtype, square_blocks: bool = False) -> None:
        self._form, self._square_blocks = scaled._form, square_blocks
        for name in PARTS:
            setattr(self, f"_{name}", getattr(scaled, name))

    @property
    def scaled(self) -> ScaledTensor:
        """The codes and scales."""
        return ScaledTensor._of(self._form, self._data, self._scale, self._zero_point, self._global_scale)

    def refill_(self, scaled: ScaledTensor) -> None:
        """Take the codes and scales of another weight of the same form, into the memory of this one's."""
        for name in PARTS:
            new = getattr(scaled, name)
            old = getattr(self, f"_{name}", None)
            if old is not None and old.data_ptr() != new.data_ptr():
                with torch.autograd._unsafe_preserve_version_counter(old):  # no value changes within a step
                    raw(old).copy_(raw(new))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"_{name}" for name in self._form.parts], (self._form, self.dtype, self._square_blocks)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], about: Any, size: Any, stride: Any) -> QuantizedWeight:
        form, dtype, square_blocks = about
        return QuantizedWeight(ScaledTensor._of(form, *form.place(inner.values())), dtype, square_blocks)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME or (func is torch.ops.aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)):
            return QuantizedWeight(args[0].scaled, args[0].dtype, args[0]._square_blocks)
        if func._schema.is_mutable and isinstance(args[0], QuantizedWeight):
            raise TypeError(
                f"a gathered weight of codes cannot be written to, got {func}: change the parameter's shards"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(QuantizedWeight, _values, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.scaled!r}, dtype={self.dtype})"


def _gathered(weight: QuantizedWeight) -> MadeWeight:
    scaled = ScaledTensor._of(weight._form, weight._data, weight._scale, weight._zero_point, weight._global_scale)
    return MadeWeight(scaled, weight._square_blocks)


QuantizedWeight._quantize = staticmethod(_gathered)
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _values(weight: QuantizedWeight) -> Any:
    return verbs.dequantize(weight.scaled, weight.dtype)
