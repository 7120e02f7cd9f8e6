# SPDX-License-Identifier: Apache-2.0
"""Weights whose 6-bit codes rest four in three bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

from breccia import _core, formats
from breccia.scaled_tensor import A, ScaledTensor, fill
from breccia.value import sixes
from breccia.value.arrays import check_arrays, from_pickle, to_pickle
from breccia.value.slicing import check_upright

_CODES, _BYTES = 4, 3  # codes that share bytes


class PackedWeight(ScaledTensor[A]):
    """A `ScaledTensor` of 6-bit codes (MXFP6) that takes 0.75 bytes a code of memory.

    It is accepted wherever a ScaledTensor is, and has the same values. ``packed_data`` is what it holds: four codes in
    three bytes, the first from the lowest bit on, as compressed-tensors and Quark store them. ``data``, a byte a code,
    is made of it each time it is read, on the device where it lies; a verb makes it once, for as long as it runs. Rows
    and whole blocks of columns (``w[:8]``), moves (`to`), copies and pickles are packed; other views, joined tensors
    and files of `breccia.save` have a byte a code.

    Args:
        data: codes of a byte each, or ``packed_data``: which of the two follows from ``shape``, else from the scale.
        scale, recipe, layout, zero_point, global_scale, shape, original_dtype: see `ScaledTensor`.

    Raises:
        TypeError, ValueError: as `ScaledTensor` and `pack`.
    """

    _rests = True
    _held_as = "packed_data"
    packed_data: Any

    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: Any,
        layout: Any,
        zero_point: Any = None,
        *,
        global_scale: Any = None,
        shape: tuple[int, ...] | None = None,
        original_dtype: str = "float32",
    ) -> None:
        is_packed = _is_packed(data, scale, layout, shape)
        meant = {"global_scale": global_scale, "shape": shape, "original_dtype": original_dtype}
        plain = ScaledTensor(sixes.unpack(data) if is_packed else data, scale, recipe, layout, zero_point, **meant)
        _check(plain, "data")
        held = (data if is_packed else sixes.pack(data), scale, zero_point, global_scale)
        fill(self, plain._form, held, None)

    @property
    def data(self) -> Any:
        """Codes of a byte each, made of ``packed_data``."""
        return sixes.unpack(self.packed_data)

    def unpacked(self) -> ScaledTensor[A]:
        """The ScaledTensor of the same values with a byte a code."""
        return self._with()

    @property
    def _ready(self) -> ScaledTensor[A]:
        return self.unpacked()

    @property
    def _held(self) -> tuple[Any, Any, Any, Any]:
        return self.packed_data, self.scale, self.zero_point, self.global_scale

    @property
    def _unit(self) -> tuple[int, int]:
        return _CODES, _BYTES

    @property
    def _core(self) -> _core.ScaledTensor:
        """The core's form, for whoever did not ask for `ready`: of codes that this tensor keeps from then on, for the
        core owns no memory of torch's."""
        kept: ScaledTensor[A] | None = self.__dict__["_made"]
        if kept is None:
            kept = self.__dict__["_made"] = self.unpacked()
        return kept._core

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: counts values, not bytes."""
        stored = tuple(self.packed_data.shape)
        return (*stored[:-1], stored[-1] // _BYTES * _CODES)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.packed_data.shape)

    @property
    def data_dtype(self) -> Any:
        """dtype of ``data`` and of ``packed_data``."""
        return self.packed_data.dtype

    @property
    def device(self) -> Any:
        """Device of ``packed_data``, where its framework has devices."""
        return getattr(self.packed_data, "device", "cpu")

    def map(self, function: Callable[[Any], Any]) -> PackedWeight[A]:
        """The tensor with ``function(array)`` in place of each array that it holds, unchecked.

        Args:
            function: moves or views an array; its result has the shape and the bytes of what it was given.

        Returns:
            A PackedWeight of the same recipe and layout.
        """
        return type(self)._of(self._form, *[None if part is None else function(part) for part in self._held])

    def view(self) -> PackedWeight[A]:
        """The same memory, scales in the framework's own dtype for them."""
        scale = ScaledTensor._of(self._form, self.packed_data, self.scale).view().scale
        return type(self)._of(self._form, self.packed_data, scale, self.zero_point, self.global_scale)

    def reshape(self, *shape: Any) -> PackedWeight[A]:
        """The values in another shape: see `breccia.value.joining.reshape`."""
        return pack(self.unpacked().reshape(*shape))

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")  # the base class says so of its own fields alone

    def __copy__(self) -> PackedWeight[A]:
        return self.map(lambda part: part)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = to_pickle(self._held)
        return _unpickle, (arrays, self.recipe, self.layout, self.original_dtype)


def _unpickle(arrays: Any, recipe: Any, layout: Any, original_dtype: str) -> PackedWeight:
    data, scale, zero_point, global_scale = from_pickle(arrays, layout)
    meant = {"global_scale": global_scale, "original_dtype": original_dtype}
    return PackedWeight(data, scale, recipe, layout, zero_point, **meant)


def _is_packed(data: Any, scale: Any, layout: Any, shape: tuple[int, ...] | None) -> bool:
    """Whether data has three quarters as many columns as there are codes."""
    check_arrays(data, scale, None)
    block = getattr(layout, "block", None)
    if len(data.shape) == 0 or shape == () or (shape is None and (block is None or len(scale.shape) == 0)):
        return False
    columns = shape[-1] if shape is not None else scale.shape[-1] * block.columns  # type: ignore[union-attr]
    packed = bool(_CODES * data.shape[-1] == _BYTES * columns)
    if packed and columns and str(data.dtype).rpartition(".")[2] != "uint8":
        raise TypeError(f"data must be uint8 where four codes share three bytes, got {data.dtype}")
    return packed


def _check(scaled: ScaledTensor, argument: str) -> None:
    """Whether four codes of a row can share three bytes, wherever a block begins."""
    check_upright(scaled, argument, "pack")
    bits = formats.finfo(scaled.recipe.element).bits
    if bits != 6:
        raise ValueError(f"{argument} must have codes of 6 bits (MXFP6) to be packed, got {scaled.recipe} of {bits}")
    if scaled.shape[-1] % _CODES or scaled.layout.block.columns % _CODES:
        got = f"{scaled.shape[-1]} columns in blocks of {scaled.layout.block.columns}"
        raise ValueError(f"{argument} must have rows and blocks of multiples of {_CODES} codes to be packed, got {got}")


def pack(w: ScaledTensor[A]) -> PackedWeight[A]:
    """A weight of 6-bit codes in three quarters of the memory.

    Args:
        w: a ScaledTensor of `MXFP6BlockScaling`, in any framework and on any device, that is not a transposed view.

    Returns:
        A tensor of the same values. Packed already: ``w`` itself.

    Raises:
        TypeError: ``w`` is not a ScaledTensor.
        ValueError: its codes have not 6 bits, or its rows or blocks are no multiples of 4 codes.

    Examples:
        >>> w = breccia.cast(np.ones((64, 256), np.float32), "mxfp6")
        >>> packed = breccia.pack(w)
        >>> packed.shape, w.nbytes, packed.nbytes
        ((64, 256), 16896, 12800)
    """
    if not isinstance(w, ScaledTensor):
        raise TypeError(f"w must be a ScaledTensor, got {type(w).__name__}")
    if isinstance(w, PackedWeight):
        return w
    _check(w, "w")
    return PackedWeight._of(w._form, sixes.pack(w.data), w.scale, w.zero_point, w.global_scale)
