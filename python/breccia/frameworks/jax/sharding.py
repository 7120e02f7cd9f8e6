# SPDX-License-Identifier: Apache-2.0
"""How casts, dequantizations and products of arrays on several devices are split among them.

A cut never goes through a block. What a tensor's scales need from other devices is one amax; codes are moved as uint8,
which no backend widens on the way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import NamedSharding, PartitionSpec

from breccia.formats import finfo
from breccia.kernels.whole_array.spec import Spec
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe, crosses
from breccia.value.slicing import block_along

Axes: TypeAlias = tuple[tuple[str, ...], ...]  # names of the mesh's axes over which each axis is split


def axes_of(shape: Sequence[int], layout: Layout, packed: bool) -> list[Factors]:
    """The axes of an upright tensor."""
    ndim = len(shape)
    return [
        factors(chr(ord("a") + i), extent, block_along(layout, packed, i - ndim), 2 if packed and i == ndim - 1 else 1)
        for i, extent in enumerate(shape)
    ]


def blocks_of(layout: Layout, packed: bool, ndim: int) -> list[int]:
    """Elements of each axis of an upright tensor that stay together."""
    return [block_along(layout, packed, axis - ndim) for axis in range(ndim)]


def split_over(x: Any) -> Axes:
    """Over which axes of an explicit mesh a traced or placed array is split; of no names where that is not known."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return names_of(sharding, len(x.shape))


def names_of(sharding: Any, ndim: int) -> Axes:
    """The names in a NamedSharding, for each axis; of no names where it is another."""
    spec = getattr(sharding, "spec", None) or ()
    names = [() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in spec]
    return (*names, *[()] * (ndim - len(names)))


def names_on(mesh: Any, sharding: Any, ndim: int) -> Axes:
    """The names of a mesh's axes over which compiled code splits each axis of an array: none where it does so over a
    part of one, which has no name."""
    if mesh.empty:
        return ((),) * ndim
    places = sharding.devices_indices_map((mesh.size,) * ndim)  # of an array that any number of devices splits
    first = [[index.start or 0 for index in places[device]] for device in mesh.devices.flat]
    starts = np.array(first, int).reshape(*mesh.devices.shape, ndim)
    found = []
    for axis in range(ndim):
        steps = [np.diff(starts[..., axis], axis=i).max(initial=0) for i in range(mesh.devices.ndim)]
        named = sorted(((step, name) for step, name in zip(steps, mesh.axis_names, strict=True) if step), reverse=True)
        regular = np.array_equal(starts[..., axis], np.tensordot(steps, np.indices(mesh.devices.shape), 1))
        found.append(tuple(name for _, name in named) if regular else ())
    return tuple(found)


def spec_of(axes: Axes) -> PartitionSpec:
    """As jax spells it."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


def whole_blocks(shape: Sequence[int], axes: Axes, mesh: Any, blocks: Sequence[int]) -> Axes:
    """The same without the axes whose parts are no whole blocks: those are gathered."""
    return tuple(
        names if extent % (size := math.prod(mesh.shape[n] for n in names)) == 0 and extent // size % block == 0 else ()
        for extent, names, block in zip(shape, axes, blocks, strict=True)
    )


def dividing(shape: Sequence[int], sharding: NamedSharding) -> NamedSharding:
    """The same without the axes that it does not cut into equal parts: those are gathered."""
    axes = names_of(sharding, len(shape))[: len(shape)]
    return NamedSharding(sharding.mesh, spec_of(whole_blocks(shape, axes, sharding.mesh, [1] * len(shape))))


def of_part(shape: Sequence[int], axes: Axes) -> Axes:
    """How a part of a tensor is split that is split so itself; axes that it does not have, or of one scale, are not."""
    return tuple(axes[i] if extent > 1 else () for i, extent in enumerate(shape))


def of_cast(
    x: Any, axes: Axes, mesh: Any, recipe: ScalingRecipe, *, stochastic: bool, rotated: bool, square: bool
) -> Axes:
    """Over which axes a cast may leave its input split."""
    ndim = len(x.shape)
    blocks = blocks_of(recipe.layout, finfo(recipe.element).bits == 4, ndim)
    axes = whole_blocks(x.shape, axes, mesh, blocks)
    first = next((i for i, extent in enumerate(x.shape) if extent > 1), 0)
    spec = Spec.of(recipe)
    takes_amax = spec.two_level or (not spec.search and spec.rule != "asymmetric")
    kept = []
    for axis, names in enumerate(axes):
        crossing = crosses(recipe, axis - ndim)
        refused = (
            square
            or (rotated and (axis == ndim - 1 or crossing))
            or (crossing and not takes_amax)
            or (stochastic and axis not in (first, ndim - 1))
        )
        kept.append(() if refused else names)
    return tuple(kept)


def of_requantize(shape: Sequence[int], axes: Axes, mesh: Any, recipe: ScalingRecipe) -> Axes:
    """Over which axes a conversion to a recipe may leave its input split, of those that cut no block of the input."""
    ndim = len(shape)
    axes = whole_blocks(shape, axes, mesh, blocks_of(recipe.layout, finfo(recipe.element).bits == 4, ndim))
    return tuple(() if crosses(recipe, axis - ndim) else names for axis, names in enumerate(axes))


def crossing_amax(x: Any, axes: Axes, recipe: ScalingRecipe) -> Any:
    """``amax=`` for one device's part of a tensor that is split over the axes; None where no scale follows from both
    sides of a cut."""
    ndim = len(axes)
    names = [name for axis, some in enumerate(axes) for name in some if crosses(recipe, axis - ndim)]
    if not names:
        return None
    by_rows = recipe.layout.block == (1, 0)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFF_FFFF
    magnitude = jnp.where(bits < 0x7F80_0000, bits, 0)  # integers, whose order subnormal numbers keep
    most = jnp.max(magnitude, -1 if by_rows else None, initial=0)
    found = jax.lax.bitcast_convert_type(jax.lax.pmax(most, tuple(names)), jnp.float32)
    if by_rows and not finfo(recipe.element).has_nan:  # one NaN makes the scale of the whole row NaN
        nan = jax.lax.pmax(jnp.any(bits > 0x7F80_0000, -1).astype(jnp.int32), tuple(names))
        found = jnp.where(nan > 0, jnp.nan, found)
    return found


def offset(shape: Sequence[int], local: Sequence[int], axes: Axes, mesh: Any) -> tuple[Any, int]:
    """``offset=`` for this device's part: the place of its first element in the whole tensor, and a row's length."""
    at: Any = 0
    for axis, names in enumerate(axes):
        index: Any = 0
        for name in names:
            index = index * mesh.shape[name] + jax.lax.axis_index(name)
        at = at + index * (local[axis] * math.prod(shape[axis + 1 :]))
    return at, shape[-1]


# --- what the compiler is told ----------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """An axis as a product: numbers of blocks, of bytes in a block and of codes in a byte."""

    extent: int
    named: tuple[tuple[str, int], ...]

    def of(self, extent: int) -> tuple[str, ...]:
        """Those whose product is the extent of a part's axis, from the first; none where there are no such."""
        size, names = 1, []
        for name, count in self.named:
            if size == extent:
                break
            size *= count
            names.append(name)
        return tuple(names) if size == extent and extent > 1 else ()


def factors(letter: str, extent: int, block: int, packed: int = 1) -> Factors:
    """Of an axis whose blocks are so long; no factors where the last block is short, for it is never split."""
    if extent % block or extent < 2:
        return Factors(extent, ())
    pairs = ((letter, extent // block), (letter + "u", block // packed), (letter + "p", packed))
    return Factors(extent, tuple((name, size) for name, size in pairs if size > 1))


def common_axes(shape: Sequence[int], parts: Sequence[Sequence[int]]) -> list[Factors]:
    """The axes of a tensor whose parts, of several recipes, have these shapes; no factors where one's blocks are no
    whole number of another's."""
    found = []
    for i, extent in enumerate(shape):
        sizes = sorted({part[i] for part in parts if len(part) == len(shape) and part[i] > 1} | {extent})
        steps = [after // before for before, after in itertools.pairwise([1, *sizes])]
        whole = all(after % before == 0 for before, after in itertools.pairwise(sizes))
        named = tuple((f"{chr(ord('a') + i)}{'u' * n}", step) for n, step in enumerate(steps) if step > 1)
        found.append(Factors(extent, named if whole and sizes[-1] == extent else ()))
    return found


def rule(operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """A rule for Shardy, of the shape of each array and the `Factors` of its axes: fewer where it has fewer axes, None
    where an axis is never split."""
    sizes: dict[str, int] = {}
    alone: set[str] = set()
    kept: list[str] = []

    def mapping(shape: Sequence[int], axes: Sequence[Factors | None]) -> ArrayMapping:
        dims: list[Any] = []
        for extent, axis in zip(shape, (*axes, *[None] * len(shape)), strict=False):
            names = () if axis is None else axis.of(extent)
            if axis is not None:
                sizes.update(axis.named)
            if len(names) > 1:
                dims.append(CompoundFactor(*names))
            elif names:
                alone.add(names[0])
                dims.append(names[0])
            else:
                kept.append(f"z{len(kept)}")
                dims.append(kept[-1])
        return ArrayMapping(*dims)

    mappings = [tuple(mapping(*one) for one in some) for some in (operands, results)]
    used = {
        name for some in mappings for one in some for dim in one for name in ([dim] if isinstance(dim, str) else dim)
    }
    inferred = {name: size for name, size in sizes.items() if name in used and name not in alone}
    return SdyShardingRule(*mappings, need_replication_factors=tuple(kept), **inferred)
