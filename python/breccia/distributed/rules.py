# SPDX-License-Identifier: Apache-2.0
"""``DTensor``: how the operators of ``torch.ops.breccia`` act on tensors that are dealt out along the axes of a mesh.

A ScaledTensor of DTensors has parts that are cut at the same places. Its products are local: rows of the weight give
columns of the result, columns of both operands give sums that are still to be added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from breccia import verbs
from breccia.distributed.gather import collectives, statistics
from breccia.distributed.sharding import plan
from breccia.frameworks import torch as verbs_of_torch
from breccia.frameworks.torch import tensors
from breccia.frameworks.torch.meta import recipe_key
from breccia.frameworks.torch.weights import LinearWeight, MadeWeight
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import cast_form
from breccia.value.slicing import block_along
from breccia.verbs.cast_options import CastOptions

_ops = torch.ops.breccia
_Rule = tuple[list[Any], list[Any]]


@register_sharding(_ops.dequantize.default)  # type: ignore[untyped-decorator]
def _dequantize(parts: Any, key: str, dtype: Any) -> list[_Rule]:
    whole: list[_Rule] = [([Replicate()], [*_whole(parts), None, None])]
    axes = range(-len(parts[0].shape), 0)
    return whole + [([Shard(axis + len(axes))], [*_along(parts, key, axis), None, None]) for axis in axes]


@register_sharding(_ops.matmul.default)  # type: ignore[untyped-decorator]
def _matmul(a: Any, a_key: str, b: Any, b_key: str, out_dtype: Any, precision: str) -> list[_Rule]:
    def rule(out: Any, left: list[Any], right: list[Any]) -> _Rule:
        return [out], [*left, None, *right, None, None, None]

    axes, weight_axes = len(a[0].shape), len(b[0].shape)
    rules = [
        rule(Replicate(), _whole(a), _whole(b)),
        rule(Partial(), _along(a, a_key, -1), _along(b, b_key, -2)),
        rule(Shard(max(axes, weight_axes) - 1), _whole(a), _along(b, b_key, -1)),
    ]
    if weight_axes == 2:
        rules += [rule(Shard(axis), _along(a, a_key, axis - axes), _whole(b)) for axis in range(axes - 1)]
    return rules


def _whole(parts: Any) -> list[Any]:
    return [Replicate() for _ in parts]


def _along(parts: Any, key: str, axis: int) -> list[Any]:
    """Where the parts of an operand lie that is cut along an axis, counted from the end; what has one entry for all of
    the axis is on every rank."""
    placed = []
    for part in parts:
        ndim = len(part.shape)
        one = ndim < 2 or (part is not parts[0] and part.shape[axis] == 1 != parts[0].shape[axis])
        placed.append(Shard(ndim + axis) if not key or not one else Replicate())
    return placed


def cast(x: DTensor, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    """`breccia.cast` of a DTensor: parts that are dealt out as it is, with the bytes that the whole has there. Raises
    ValueError where a block would be cut, an option draws on positions, or more than one axis of the mesh cuts x."""
    if any(placement.is_partial() for placement in x.placements):
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    others = (options.hadamard, options.amax, options.importance)
    if options.rounding != "nearest" or any(other is not None for other in others):
        raise ValueError("x must be a plain tensor for rounding=, hadamard=, amax= or importance=, got a DTensor")
    mesh, cut, local, amax = x.device_mesh, _cut(x.placements, "x"), x.to_local(), None
    if cut is not None:
        dim = x.placements[cut].dim
        check_cut(tuple(x.shape), recipe.layout, recipe, dim, mesh.size(cut), "x", options.square_blocks)
        amax = statistics.amax([local], recipe, mesh.get_group(cut), dim)[0]
    made = verbs.cast(local, recipe, amax=amax, square_blocks=options.square_blocks)
    return _wrapped(made, tuple(x.shape), mesh, x.placements)


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """`breccia.requantize` of a tensor of DTensors, with the bytes of the whole: where it lies, or of the gathered
    codes where a scale follows from more than one rank holds. Then ranks keep their parts if these are whole blocks.
    Raises ValueError where more than one axis of the mesh cuts the tensor."""
    shape, mesh, placements = tuple(scaled.shape), scaled.data.device_mesh, list(scaled.data.placements)
    cut = _cut(placements, "scaled")
    form = scaled._form
    parts = [getattr(scaled, name).to_local() for name in form.parts]
    local = ScaledTensor._of(form, *form.place(parts))
    if cut is None:
        return _wrapped(verbs.requantize(local, recipe), shape, mesh, placements)
    dim, group, world = placements[cut].dim, mesh.get_group(cut), mesh.size(cut)
    whole_blocks = True
    try:
        check_cut(shape, recipe.layout, recipe, dim, world, "scaled")
    except ValueError:
        whole_blocks, placements[cut] = False, Replicate()
    if whole_blocks and not statistics.crossing(recipe, dim, len(shape)):
        made = verbs.requantize(local, recipe)
    else:
        made = verbs.requantize(collectives.all_gather(local, group, dim), recipe)
        made = plan(shape, recipe, world, dim).cut(made, mesh.get_local_rank(cut)) if whole_blocks else made
    return _wrapped(made, shape, mesh, placements)


def weight(w: DTensor) -> MadeWeight | None:
    """The codes of a weight whose local part is a `LinearWeight`, dealt out as it is; None for one of floats."""
    local = w._local_tensor
    if not isinstance(local, LinearWeight):
        return None
    made = type(local)._quantize(local)
    return MadeWeight(_wrapped(made.scaled, tuple(w.shape), w.device_mesh, w.placements), made.square_blocks)


def _cut(placements: Sequence[Any], argument: str) -> int | None:
    """The axis of the mesh that cuts a tensor; None where none does."""
    cuts = [i for i, placement in enumerate(placements) if placement.is_shard()]
    if len(cuts) > 1:
        raise ValueError(f"{argument} must be cut along one axis of its mesh, got the placements {tuple(placements)}")
    return cuts[0] if cuts else None


def _wrapped(made: ScaledTensor, shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> ScaledTensor:
    """The ScaledTensor of a DTensor's shape whose local parts are those of ``made``."""
    form, wrapped = cast_form(made.recipe, shape, made.original_dtype), []
    outputs = [part for part in tensors.output_parts(list(shape), recipe_key(made.recipe)) if part is not None]
    for name, (size, stride, _) in zip(form.parts, outputs, strict=True):
        dealt: list[Any] = [Replicate()] * mesh.ndim
        for i, one in enumerate(placements):
            if one.is_shard() and len(size) > 1 and not (size[one.dim] == 1 != shape[one.dim]):
                dealt[i] = Shard(one.dim)
        like = {"shape": torch.Size(size), "stride": tuple(stride)}
        wrapped.append(DTensor.from_local(getattr(made, name), mesh, dealt, run_check=False, **like))
    return ScaledTensor._of(form, *form.place(wrapped))


def check_cut(
    shape: tuple[int, ...], layout: Any, recipe: Any, dim: int, world: int, name: str, square_blocks: bool = False
) -> None:
    """Refuses a tensor that DTensor would cut through a block; the message has the legal cuts."""
    axis, extent = dim - len(shape), shape[dim]
    packed = tensors.data_dtype(recipe.element) is torch.float4_e2m1fn_x2 or "int4" in recipe.element
    block = block_along(layout, packed, axis)
    if square_blocks and axis == -2:
        block = block_along(layout, packed, -1)
    each = -(-extent // world)
    even = axis != -1 or block == 1 or extent % (block * world) == 0
    if world > 1 and (each % block or not even):
        ranks = [n for n in range(1, extent // block + 1) if extent % (block * n) == 0]
        raise ValueError(
            f"{name} must be cut between blocks of {block} along axis {dim}, got {extent} for {world} ranks: legal "
            f"cuts are the multiples of {block}, even ones for {', '.join(map(str, ranks[:8])) or 'no number of'} ranks"
        )


verbs_of_torch.casts_of_subclasses[DTensor] = cast
verbs_of_torch.conversions_of_subclasses[DTensor] = requantize
verbs_of_torch.weights_of_subclasses[DTensor] = weight
