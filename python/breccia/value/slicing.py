# SPDX-License-Identifier: Apache-2.0
"""Parts and shapes of one ScaledTensor along whole blocks: what its `[]` and `reshape` do.

No value changes: codes and scales are moved together, and what would cut a block is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import frameworks
from breccia.layouts import Layout
from breccia.value.form import Form, axis_of, transposed_layout
from breccia.value.inputs import is_integer

if TYPE_CHECKING:
    from breccia.scaled_tensor import ScaledTensor


def block_along(layout: Layout, packed: bool, axis: int) -> int:
    """Elements along an axis, counted from the end, that a cut must leave together."""
    rows, columns = layout.block
    block = max({-1: columns, -2: rows}.get(axis, 1), 1)
    return math.lcm(block, 2) if packed and axis == -1 else block


def made(like: ScaledTensor, columns: int, parts: Sequence[Any]) -> ScaledTensor:
    """A tensor of other arrays (data, scale, zero_point, global_scale) and rows of so many columns."""
    data, scale, zero_point, global_scale = parts
    return like._with(
        form=like._form.with_columns(columns), data=data, scale=scale, zero_point=zero_point, global_scale=global_scale
    )


def transposed(scaled: ScaledTensor) -> ScaledTensor:
    """The view of two axes or more whose last two are swapped."""
    scaled = scaled._ready if scaled._rests else scaled
    swap = frameworks.of(scaled.data).swap_last_axes
    recipe, layout, packing, original_dtype, parts = scaled._form

    def turn(array: Any) -> Any:
        if array is None or len(array.shape) == 0:
            return array
        if len(array.shape) < scaled.ndim:  # one scale per row, without its constant axis
            array = array[..., None] if axis_of(layout) == -1 else array[..., None, :]
        return swap(array)

    return scaled._with(
        form=Form(recipe, transposed_layout(layout), packing, original_dtype, parts),
        data=swap(scaled.data),
        scale=turn(scaled.scale),
        zero_point=turn(scaled.zero_point),
        core=_turned(scaled),
    )


def _turned(scaled: ScaledTensor) -> Any:
    """The core's view of the same arrays, where it knows them and they stay where they are; else None."""
    core = scaled.__dict__["_made"] if isinstance(scaled.data, np.ndarray) else None
    return None if core is None else core.T


def check_upright(scaled: ScaledTensor, argument: str, verb: str) -> None:
    """Refuses a transposed view, and another library's recipe or layout."""
    scaled._form.check_kernels()
    if scaled.layout.axis != -1:
        raise ValueError(f"{argument} must not be a transposed view: {verb} its .mT, then take .mT of the result")


def index(scaled: ScaledTensor, key: Any) -> ScaledTensor:
    """``scaled[key]``: a view of matrices of a batch, of rows, or of whole blocks of columns. The key has integers,
    slices, ``...``, and at most one array of integers or booleans, as in NumPy."""
    form, shape = scaled._form, scaled.shape
    form.check_kernels()
    picks = _picks(key, shape)
    if form.layout.axis == -2:
        *batch, rows, columns = picks
        return index(scaled.mT, (*batch, columns, rows)).mT
    blocks = form.layout.block
    whole = blocks == (0, 0)  # as `Layout.one_scale` says in a call more
    if not whole:
        for axis in (-2, -1):
            if not isinstance(picks[axis], slice) and np.ndim(picks[axis]) == 0:
                at = operator.index(picks[axis])
                raise ValueError(
                    f"an integer for axis {axis} must be a slice, got {at}: scales need rows and columns "
                    f"(q[{at}:{at + 1}] keeps the axis)"
                )
    row_picks = picks[-2] if len(picks) > 1 else slice(None)
    if scaled._rests:
        held, unit = scaled._held[0], scaled._unit
    else:  # the same, in fewer calls
        held, unit = scaled.data, (1, 1) if form.packing == "one" else (2, 1)
    data_pick, block_pick, columns = _column_picks(picks[-1], shape[-1], blocks.columns, unit)
    row_blocks = _block_pick(row_picks, shape[-2], blocks.rows, -2) if len(picks) > 1 else slice(None)
    batch = picks[:-2]
    data = _take(held, [*batch, *([row_picks] if len(picks) > 1 else []), data_pick])

    scale, zero_point = scaled.scale, scaled.zero_point
    if not whole:
        picks = [*batch, row_blocks, block_pick]
        scale = _take(scale, picks[: len(scale.shape)])
        zero_point = None if zero_point is None else _take(zero_point, picks[: len(zero_point.shape)])
    second = scaled.global_scale
    if second is not None and len(second.shape) > 0:
        second = _take(second, batch) if math.prod(second.shape) != 1 else second.reshape(())
        second = second.reshape(()) if len(second.shape) <= 2 else second
    return type(scaled)._of(form.with_columns(columns), data, scale, zero_point, second)


def _picks(key: Any, shape: tuple[int, ...]) -> list[Any]:
    """One index per axis."""
    given = list(key) if isinstance(key, tuple) else [key]
    ellipses = [i for i, pick in enumerate(given) if pick is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index may have one ellipsis, got more")
    at = ellipses[0] if ellipses else len(given)
    missing = len(shape) - len(given) + len(ellipses)
    if missing < 0:
        raise IndexError(f"an index of shape {shape} may have {len(shape)} parts, got {len(given)}")
    picks = given[:at] + [slice(None)] * missing + given[at + 1 :]
    for pick in picks:
        if not isinstance(pick, (slice, list)) and not is_integer(pick) and not hasattr(pick, "shape"):
            raise TypeError(f"an index must be of integers, slices and one array, got {type(pick).__name__}")
    chosen = [axis for axis, pick in enumerate(picks) if not isinstance(pick, slice)]
    arrays = 0
    for axis in chosen:
        picks[axis] = _numbers(picks[axis], axis, shape[axis])
        arrays += np.ndim(picks[axis]) > 0
    if arrays > 1:
        raise TypeError("an index may have one array, got more")
    for axis in chosen:
        if is_integer(picks[axis]):
            at, extent = operator.index(picks[axis]), shape[axis]
            if not -extent <= at < extent:
                raise IndexError(f"index {at} must be within axis {axis} of {extent}")
            picks[axis] = at % extent
    return picks


def _numbers(pick: Any, axis: int, extent: int) -> Any:
    """A list, or a mask of NumPy's, as the integers that it stands for."""
    pick = np.asarray(pick) if isinstance(pick, list) else pick
    if not isinstance(pick, np.ndarray):
        return pick
    if pick.dtype == bool and pick.shape == (extent,):
        return np.flatnonzero(pick)
    if pick.ndim != 1 or pick.dtype == bool or (pick.size and pick.dtype.kind not in "iu"):
        raise IndexError(f"an index of axis {axis} must be a list of integers or {extent} booleans, got {pick}")
    if pick.size and not (-extent <= pick.min() and pick.max() < extent):
        raise IndexError(f"indices {pick.min()} to {pick.max()} must be within axis {axis} of {extent}")
    return pick.astype(np.int64)


def _spelled(pick: Any) -> str:
    """As it stands between brackets: ``:16``."""
    if not isinstance(pick, slice):
        return str(pick)
    parts = [pick.start, pick.stop] if pick.step is None else [pick.start, pick.stop, pick.step]
    return ":".join("" if part is None else str(part) for part in parts)


def _block_pick(pick: Any, extent: int, block: int, axis: int) -> Any:
    """The index into an axis of scales; 0 is a block of the whole axis."""
    if block == 0:
        return slice(None)
    if block == 1:
        return pick
    start, stop, step = pick.indices(extent) if isinstance(pick, slice) else (0, 0, 0)
    if step != 1 or (start % block and start != extent) or (stop % block and stop != extent):
        raise ValueError(
            f"an index of axis {axis} must be a slice of whole blocks of {block}, or end with the axis, "
            f"got {_spelled(pick)}"
        )
    return slice(-(-start // block), -(-stop // block))


def _column_picks(pick: Any, extent: int, block: int, unit: tuple[int, int]) -> tuple[Any, Any, int]:
    """Indices into the last axes of data and scales, and the number of columns that are left. ``unit``: how many codes
    share how many bytes."""
    together, size = unit
    if not isinstance(pick, slice) and (together > 1 or block != 0):
        raise ValueError(f"an index of axis -1 must be a slice of whole blocks, got {_spelled(pick)}")
    blocks = _block_pick(pick, extent, block, -1)
    if not isinstance(pick, slice):
        return pick, blocks, 1
    start, stop, step = pick.indices(extent)
    left = len(range(start, stop, step))
    if together == 1:
        return pick, blocks, left
    if step != 1 or (start % together and start != extent) or (stop % together and stop != extent):
        raise ValueError(f"an index of axis -1 must be a slice of whole bytes of two codes, got {_spelled(pick)}")
    return slice(size * -(-start // together), size * -(-max(stop, start) // together)), blocks, left


def _take(array: Any, picks: Sequence[Any]) -> Any:
    for axis in reversed(range(len(picks))):
        pick = picks[axis]
        if isinstance(pick, slice) and pick == slice(None):
            continue
        at = (slice(None),) * axis + (pick,)
        array = array[at] if isinstance(pick, (slice, int)) else _gather(array, at)
    return array


def _gather(array: Any, at: Any) -> Any:
    if type(array).__module__.startswith("mlx") and isinstance(at[-1], np.ndarray):
        import mlx.core

        return array[(*at[:-1], mlx.core.array(at[-1]))]  # MLX takes no arrays but its own
    if not hasattr(array, "is_cpu") or array.itemsize != 1:
        return array[at]
    import torch

    return array.view(torch.uint8)[at].view(array.dtype)  # torch gathers bytes, but not codes of every format


def reshape(scaled: ScaledTensor, *shape: Any) -> ScaledTensor:
    """The values in another shape, given as numbers or one tuple with at most one -1, in the order of rows. Rows must
    stay whole numbers of blocks; where a block has several rows, the last two axes stay as they are."""
    check_upright(scaled, "scaled", "reshape")
    wanted = _extents(shape, scaled)
    if wanted == scaled.shape:
        return scaled
    blocks, columns = scaled.layout.block, scaled.shape[-1]
    if not scaled.layout.one_scale:
        if len(wanted) < 2:
            raise ValueError(f"shape must have two axes or more for {scaled.layout}, got {wanted}")
        if blocks.rows > 1 and wanted[-2:] != scaled.shape[-2:]:
            raise ValueError(f"shape must end in {scaled.shape[-2:]}, for a block has {blocks.rows} rows, got {wanted}")
        if wanted[-1] != columns and (blocks.columns == 0 or columns % blocks.columns or wanted[-1] % blocks.columns):
            rule = f"end in {columns}" + (f" or be of whole blocks of {blocks.columns}" if blocks.columns else "")
            raise ValueError(f"shape must {rule}, got {wanted}")
    if scaled.is_packed and wanted[-1] != columns and (wanted[-1] % 2 or columns % 2):
        raise ValueError(f"shape must end in an even number, two codes being in a byte, got {wanted}")
    data = scaled.data.reshape((*wanted[:-1], -(-wanted[-1] // 2) if scaled.is_packed else wanted[-1]))

    def of_scales(part: Any) -> Any:
        if part is None or len(part.shape) == 0:
            return part
        if blocks.columns == 0:  # one scale per row, with or without its axis of 1
            return part.reshape((*wanted[:-1], *part.shape[scaled.ndim - 1 :]))
        return part.reshape((*wanted[:-2], -(-wanted[-2] // blocks.rows), -(-wanted[-1] // blocks.columns)))

    second = scaled.global_scale
    if second is not None and math.prod(second.shape) > 1:
        if wanted[-2:] != scaled.shape[-2:]:
            raise ValueError(f"shape must end in {scaled.shape[-2:]}, each having its global scale, got {wanted}")
        second = second.reshape((*wanted[:-2], 1, 1))
    elif second is not None:
        second = second.reshape(())
    return made(scaled, wanted[-1], (data, of_scales(scaled.scale), of_scales(scaled.zero_point), second))


def _extents(shape: tuple[Any, ...], scaled: ScaledTensor) -> tuple[int, ...]:
    given = shape[0] if len(shape) == 1 and not is_integer(shape[0]) else shape
    if not isinstance(given, Iterable) or not all(map(is_integer, given)):
        raise TypeError(f"shape must be integers or a tuple of them, got {given!r}")
    wanted = [operator.index(extent) for extent in given]
    size = math.prod(scaled.shape)
    if wanted.count(-1) == 1:
        rest = math.prod(extent for extent in wanted if extent != -1)
        wanted[wanted.index(-1)] = size // rest if rest else 0
    if not wanted or min(wanted) < 0 or math.prod(wanted) != size:
        raise ValueError(f"shape must be of {size} values, got {tuple(given)}")
    return tuple(wanted)
