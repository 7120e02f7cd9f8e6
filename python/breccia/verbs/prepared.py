# SPDX-License-Identifier: Apache-2.0
"""Weights laid out once for the many products they will take part in."""

from __future__ import annotations

from typing import Any

from breccia import _core
from breccia.scaled_tensor import A, ScaledTensor

__all__ = ["PreparedWeight", "prepare"]


class PreparedWeight(ScaledTensor[A]):
    """A `ScaledTensor` whose values the CPU core also holds in the form its matmul kernels read in place.

    It is accepted wherever a ScaledTensor is, and has the very arrays of the tensor it was made from.
    For few activations the kernels read a copy of ``packed_nbytes`` instead, 16 rows side by side;
    without such a kernel there is a copy only where the arrays are strided, unaligned, scaled along
    another axis than they are contiguous in, hold one 4-bit code per byte, or have 16-bit scales.
    """

    @property
    def _core(self) -> _core.ScaledTensor:
        """The core's form, made when first asked for: a tree's node is put together without it."""
        core: _core.ScaledTensor | None = self.__dict__["_made"]
        if core is None:
            turned: PreparedWeight[A] | None = self.__dict__.get("_turned")
            core = _core.prepare(self.original._core) if turned is None else turned._core.T
            self.__dict__["_made"] = core
        return core

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the copy for few activations: those of the tensor, rows padded to 16 and their codes
        to whole quads; 0 where this machine or the recipe has no kernel for it."""
        return self._core.packed_nbytes

    @property
    def original(self) -> ScaledTensor[A]:
        """The tensor this was made from: the same arrays and metadata, without the copy."""
        return self._with()

    @property
    def mT(self) -> ScaledTensor[A]:  # noqa: N802 (NumPy's name)
        """The last two axes swapped: a view, prepared as well."""
        if self.ndim < 2:
            return self
        view = _prepared(self.original.mT)
        object.__setattr__(view, "_turned", self)
        return view

    def __copy__(self) -> PreparedWeight[A]:
        """Of the same arrays and the same copy of them."""
        made = _prepared(self)
        made.__dict__["_made"] = self._core
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return _prepare_rebuilt, (rebuild, arguments)


def _prepared(w: ScaledTensor[A]) -> PreparedWeight[A]:
    made: Any = PreparedWeight._of(w._form, w.data, w.scale, w.zero_point, w.global_scale)
    return made  # type: ignore[no-any-return]


def _prepare_rebuilt(rebuild: Any, arguments: tuple[Any, ...]) -> PreparedWeight:
    return prepare(rebuild(*arguments))


def prepare(w: ScaledTensor[A]) -> PreparedWeight[A]:
    """Prepare a weight that will be multiplied many times.

    Args:
        w: a ScaledTensor on the CPU, ``(N, K)`` or the view ``w.T``.

    Returns:
        A tensor of the same values for `matmul` and `linear`. Preparing it again returns it as it is.

    Raises:
        TypeError: ``w`` is not a ScaledTensor.
        ValueError: it is on another device, on several, or traced.

    Examples:
        >>> w = breccia.cast(np.ones((64, 256), np.float32), "nvfp4")
        >>> x = np.ones((4, 256), np.float32)
        >>> np.array_equal(breccia.linear(x, breccia.prepare(w)), breccia.linear(x, w))
        True
    """
    if not isinstance(w, ScaledTensor):
        raise TypeError(f"w must be a ScaledTensor, got {type(w).__name__}")
    if isinstance(w, PreparedWeight):
        return w
    made = _prepared(w)
    try:
        made._core  # noqa: B018 (the copy is made now, not in the first product)
    except ValueError:
        raise ValueError(
            "w must be in the memory of one CPU, whose kernels read it: it is traced, on another device or on several"
        ) from None
    return made
