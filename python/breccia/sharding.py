# SPDX-License-Identifier: Apache-2.0
"""ScaledTensors over the devices of a JAX mesh.

Under ``jit``, `breccia.cast`, `breccia.dequantize` and products keep their arrays where they lie. This module says
where the parts of a tensor lie (`shardings`, `specs`) and has what ``jax.shard_map`` wants: `cast` of a part,
`all_gather`. Importing it imports jax.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from breccia import verbs
from breccia.frameworks.jax import sharding as cuts
from breccia.frameworks.jax.callbacks import raw
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.slicing import block_along

__all__ = ["all_gather", "cast", "shardings", "specs"]


def shardings(scaled: ScaledTensor, sharding: NamedSharding) -> ScaledTensor:
    """Where the parts of a tensor lie when its values lie so: a tree for ``jax.device_put`` and ``jax.jit``.

    Args:
        scaled: a ScaledTensor of JAX arrays, of shapes (``jax.eval_shape``) or traced ones.
        sharding: of an array of its logical shape.

    Returns:
        A ScaledTensor with a NamedSharding in the place of each array.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or ``sharding`` not a NamedSharding.
        ValueError: it cuts a block; the message says what cuts are legal.
    """
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"sharding must be a jax.sharding.NamedSharding, got {type(sharding).__name__}")
    return _tree(scaled, sharding.spec, sharding.mesh).map(lambda spec: NamedSharding(sharding.mesh, spec))


def specs(scaled: ScaledTensor, spec: PartitionSpec, mesh: Any = None) -> ScaledTensor:
    """The same as PartitionSpecs, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

    Args:
        scaled: see `shardings`.
        spec: of an array of its logical shape.
        mesh: that of ``jax.set_mesh`` where it is None.

    Returns:
        A ScaledTensor with a PartitionSpec in the place of each array.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or ``spec`` not a PartitionSpec.
        ValueError: it cuts a block; the message says what cuts are legal.
    """
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"spec must be a jax.sharding.PartitionSpec, got {type(spec).__name__}")
    return _tree(scaled, spec, jax.sharding.get_abstract_mesh() if mesh is None else mesh)


def cast(
    x: Any, recipe: ScalingRecipe | str, axis_name: str | tuple[str, ...], dim: int = 0, **options: Any
) -> ScaledTensor:
    """Inside of ``jax.shard_map``: quantize this device's part to the bytes that the whole tensor has there.

    Args:
        x: the part; whole blocks of the tensor.
        recipe: what to quantize to, or its name.
        axis_name: of the mesh, over which the tensor is split.
        dim: the axis of the tensor that is split.
        options: as of `breccia.cast`, but for ``amax``.

    Returns:
        The part, with the scales of the whole tensor.
    """
    recipe = resolve(recipe)
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    axes = tuple(names if axis == dim % x.ndim else () for axis in range(x.ndim))
    return verbs.cast(x, recipe, amax=cuts.crossing_amax(x, axes, recipe), **options)


def all_gather(scaled: ScaledTensor, axis_name: str | tuple[str, ...], dim: int = 0) -> ScaledTensor:
    """Inside of ``jax.shard_map``: the whole tensor of all devices' parts. Codes and scales of one byte travel as
    uint8, which no backend widens.

    Args:
        scaled: this device's part, with the scales of the whole (see `cast`).
        axis_name: of the mesh.
        dim: the axis of the tensor that is split.

    Returns:
        A ScaledTensor of the whole shape.

    Raises:
        ValueError: ``scaled`` is a transposed view.
    """
    if scaled.layout.axis != -1:
        raise ValueError("scaled must not be a transposed view: gather its .mT")
    axis, ndim = dim % scaled.ndim, scaled.ndim
    whole_axis = block_along(scaled.layout, False, axis - ndim) == 1 and scaled.shape[axis] > 1

    def gather(array: Any) -> Any:
        if array is None or array.ndim <= axis or (whole_axis and array.shape[axis] == 1):
            return array  # one scale for all along the axis
        codes = raw(array)
        whole = jax.lax.all_gather(codes, axis_name, axis=axis, tiled=True)
        return whole if codes is array else jax.lax.bitcast_convert_type(whole, array.dtype)

    parts = [gather(getattr(scaled, name)) for name in ("data", "scale", "zero_point", "global_scale")]
    columns = scaled.shape[-1]
    if axis == ndim - 1:
        columns *= parts[0].shape[-1] // scaled.data.shape[-1]
    return ScaledTensor._of(scaled._form.with_columns(columns), *parts)


def _tree(scaled: Any, spec: PartitionSpec, mesh: Any) -> ScaledTensor:
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"scaled must be a ScaledTensor, got {type(scaled).__name__}")
    if scaled.layout.axis != -1:
        raise ValueError("scaled must not be a transposed view: shard its .mT")
    if len(spec) > scaled.ndim:
        raise ValueError(f"spec must have at most {scaled.ndim} axes for shape {scaled.shape}, got {spec}")
    names = cuts.names_of(NamedSharding(mesh, spec), scaled.ndim)
    blocks = cuts.blocks_of(scaled.layout, scaled.is_packed, scaled.ndim)
    whole = cuts.whole_blocks(scaled.shape, names, mesh, blocks)
    for axis, (asked, legal) in enumerate(zip(names, whole, strict=True)):
        if asked != legal:
            count = math.prod(mesh.shape[name] for name in asked)
            raise ValueError(
                f"spec must cut axis {axis} of {scaled.shape} into equal parts of whole blocks of {blocks[axis]}, "
                f"got {count} parts: legal cuts are the multiples of {blocks[axis]}"
            )
    return scaled.map(lambda array: cuts.spec_of(cuts.of_part(array.shape, names)))
