# SPDX-License-Identifier: Apache-2.0
"""Parts of a ScaledTensor and tensors of parts, along whole blocks: indexing, reshaping, joining.

No value changes: codes and scales are moved together, and what would cut a block is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from breccia import frameworks
from breccia.scaled_tensor import A, ScaledTensor
from breccia.value import slicing
from breccia.value.slicing import block_along, index, made

__all__ = ["block_along", "concatenate", "index", "reshape", "stack"]  # as breccia.pieces had them


def reshape(scaled: ScaledTensor, *shape: Any) -> ScaledTensor:
    """The values in another shape: see `ScaledTensor.reshape`."""
    return slicing.reshape(_scaled(scaled, "scaled"), *shape)


def _scaled(scaled: Any, argument: str) -> ScaledTensor:
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"{argument} must be a ScaledTensor, got {type(scaled).__name__}")
    return scaled


def _parts(tensors: Iterable[ScaledTensor], verb: str) -> list[ScaledTensor]:
    if isinstance(tensors, ScaledTensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of ScaledTensors, got {type(tensors).__name__}")
    return [_upright(t, f"tensors[{i}]", verb) for i, t in enumerate(tensors)]


def _upright(scaled: Any, argument: str, verb: str) -> ScaledTensor:
    slicing.check_upright(_scaled(scaled, argument), argument, verb)
    return scaled  # type: ignore[no-any-return]


def concatenate(tensors: Iterable[ScaledTensor[A]], axis: int = 0) -> ScaledTensor[A]:
    """Tensors of one recipe joined along an axis.

    Args:
        tensors: ScaledTensors that are not transposed views, whose shapes differ in ``axis`` alone. Each but the last
            must be whole blocks long there.
        axis: of the logical shape; may be negative.

    Returns:
        A ScaledTensor of the same framework and device.

    Raises:
        TypeError: one is not a ScaledTensor, or they are of different frameworks.
        ValueError: recipes, layouts or shapes differ, a block would be cut, or tensors that would share a scale have
            different ones.

    Examples:
        >>> q, k, v = (breccia.cast(np.ones((n, 256), np.float32), "mxfp8") for n in (64, 32, 32))
        >>> breccia.concatenate([q, k, v]).shape
        (128, 256)
    """
    parts = [part._ready for part in _parts(tensors, "concatenate")]
    if not parts:
        raise ValueError("tensors must have one tensor or more, got none")
    first = parts[0]
    axis = _axis_of(axis, first.ndim)
    for i, t in enumerate(parts):
        _check_like(first, t, i, axis)
    blocks, from_end = first.layout.block, axis - first.ndim
    block = block_along(first.layout, first.is_packed, from_end)
    for i, t in enumerate(parts[:-1]):
        if t.shape[axis] % block:
            raise ValueError(
                f"tensors[{i}] must be whole blocks of {block} long along axis {axis}, got {t.shape[axis]}"
            )
    xp = frameworks.common(*(t.data for t in parts)).namespace
    columns = sum(t.shape[-1] for t in parts) if from_end == -1 else first.shape[-1]

    def join(name: str) -> Any:
        arrays = [getattr(t, name) for t in parts]
        if arrays[0] is None:
            return None
        # A scale of everything along the axis must be one and the same in all of them.
        if len(arrays[0].shape) == 0 or (from_end == -1 and blocks.columns == 0):
            return _shared(arrays, name, axis, xp)
        return xp.concatenate(arrays, axis)

    second = _global_scales(parts, axis, xp)
    return made(
        first, columns, (xp.concatenate([t.data for t in parts], axis), join("scale"), join("zero_point"), second)
    )


def stack(tensors: Iterable[ScaledTensor[A]]) -> ScaledTensor[A]:
    """Tensors of one shape and recipe as a batch, along a new first axis: (E, N, K) of E weights (N, K).

    Args:
        tensors: ScaledTensors that are not transposed views.

    Returns:
        A ScaledTensor with one axis more.

    Raises:
        TypeError, ValueError: see `concatenate`.

    Examples:
        >>> experts = [breccia.cast(np.ones((64, 256), np.float32), "fp8-block") for _ in range(8)]
        >>> breccia.stack(experts).shape
        (8, 64, 256)
    """
    parts = _parts(tensors, "stack")
    return concatenate([reshape(t, 1, *t.shape) for t in parts])


def _axis_of(axis: int, ndim: int) -> int:
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis must be from {-ndim} to {ndim - 1}, got {axis}")
    return axis % ndim


def _check_like(first: ScaledTensor, other: ScaledTensor, i: int, axis: int) -> None:
    for name in ("recipe", "layout", "is_packed"):
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine is not theirs and mine != theirs:
            raise ValueError(
                f"tensors[{i}].{name} must be that of tensors[0], {getattr(first, name)}, got {getattr(other, name)}"
            )
    for name in ("zero_point", "global_scale"):
        if (getattr(first, name) is None) != (getattr(other, name) is None):
            raise ValueError(f"tensors[{i}] must have a {name} where tensors[0] has one, and only there")
    if len(first.scale.shape) != len(other.scale.shape):
        raise ValueError(f"tensors[{i}].scale must have {len(first.scale.shape)} axes, got {len(other.scale.shape)}")
    rest = [(*t.shape[:axis], *t.shape[axis + 1 :]) for t in (first, other)]
    if first.ndim != other.ndim or rest[0] != rest[1]:
        raise ValueError(f"tensors[{i}] must have the shape {first.shape} but for axis {axis}, got {other.shape}")


def _known(arrays: Sequence[Any], xp: Any) -> bool:
    """Whether it can be told if all are the same."""
    return all(array is arrays[0] for array in arrays) or all(map(xp.is_known, arrays))


def _same(arrays: Sequence[Any]) -> bool:
    """Whether all hold the same numbers; NaN, which a scale may be, is one too."""
    first, nan = arrays[0], arrays[0] != arrays[0]
    return all(x is first or bool(((x == first) | (nan & (x != x))).all()) for x in arrays[1:])  # noqa: PLR0124


def _shared(arrays: Sequence[Any], name: str, axis: int, xp: Any) -> Any:
    if not _known(arrays, xp):
        raise ValueError(
            f"tensors must not be traced to be joined along axis {axis}, for they share one {name}, which is compared: "
            f"join them outside of the compiled function"
        )
    if not _same(arrays):
        raise ValueError(
            f"tensors must have one {name} to be joined along axis {axis}, for they would share it: dequantize and "
            "cast the whole, or use a recipe with a scale per row or block"
        )
    return arrays[0]


def _global_scales(parts: Sequence[ScaledTensor], axis: int, xp: Any) -> Any:
    """One for the whole, or one per matrix where matrices are joined to a batch."""
    arrays = [t.global_scale for t in parts]
    if arrays[0] is None:
        return None
    if all(math.prod(array.shape) == 1 for array in arrays):
        one = arrays[0].reshape(())
        arrays = [one if array is arrays[0] else array.reshape(()) for array in arrays]
        if axis >= parts[0].ndim - 2 or (_known(arrays, xp) and _same(arrays)):
            return _shared(arrays, "global_scale", axis, xp)
    if axis >= parts[0].ndim - 2:
        return _shared(arrays, "global_scale", axis, xp)
    zeros = [xp.constant(np.zeros((*t.shape[:-2], 1, 1), np.float32), "float32", t.data) for t in parts]
    return xp.concatenate([zero + array for zero, array in zip(zeros, arrays, strict=True)], axis)
