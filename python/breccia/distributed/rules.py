# SPDX-License-Identifier: Apache-2.0
"""``DTensor``: how the operators of ``torch.ops.breccia`` act on tensors that are dealt out along the axes of a mesh.

A ScaledTensor of DTensors has parts that are cut at the same places. Its products are local: rows of the weight give
columns of the result, columns of both operands give sums that are still to be added up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    cuts = [i for i, placement in enumerate(x.placements) if placement.is_shard()]
    if len(cuts) > 1:
        raise ValueError(f"x must be cut along one axis of its mesh, got the placements {x.placements}")
    local = x.to_local()
    amax = None
    if cuts:
        dim = x.placements[cuts[0]].dim
        check_cut(tuple(x.shape), recipe.layout, recipe, dim, x.device_mesh.size(cuts[0]), "x", options.square_blocks)
        amax = statistics.amax([local], recipe, x.device_mesh.get_group(cuts[0]), dim)[0]
    made = verbs.cast(local, recipe, amax=amax, square_blocks=options.square_blocks)
    return _wrapped(made, x)


class _Whole(NamedTuple):
    """What `_wrapped` asks of a DTensor."""

    shape: tuple[int, ...]
    device_mesh: Any
    placements: tuple[Any, ...]


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """`breccia.requantize` of a tensor of DTensors, with the bytes of the whole: where it lies, or of the gathered
    codes where a scale follows from more than one rank holds. Then ranks keep their parts if these are whole blocks.
    Raises ValueError where more than one axis of the mesh cuts the tensor."""
    shape, mesh, placements = tuple(scaled.shape), scaled.data.device_mesh, list(scaled.data.placements)
    cuts = [i for i, placement in enumerate(placements) if placement.is_shard()]
    if len(cuts) > 1:
        raise ValueError(f"scaled must be cut along one axis of its mesh, got the placements {tuple(placements)}")
    form = scaled._form
    parts = [getattr(scaled, name).to_local() for name in form.parts]
    local = ScaledTensor._of(form, *form.place(parts))
    if not cuts:
        return _wrapped(verbs.requantize(local, recipe), _Whole(shape, mesh, tuple(placements)))
    dim, group, world = placements[cuts[0]].dim, mesh.get_group(cuts[0]), mesh.size(cuts[0])
    whole_blocks = True
    try:
        check_cut(shape, recipe.layout, recipe, dim, world, "scaled")
    except ValueError:
        whole_blocks, placements[cuts[0]] = False, Replicate()
    if whole_blocks and not statistics.crossing(recipe, dim, len(shape)):
        made = verbs.requantize(local, recipe)
    else:
        made = verbs.requantize(collectives.all_gather(local, group, dim), recipe)
        made = plan(shape, recipe, world, dim).cut(made, mesh.get_local_rank(cuts[0])) if whole_blocks else made
    return _wrapped(made, _Whole(shape, mesh, tuple(placements)))


def weight(w: DTensor) -> MadeWeight | None:
    """The codes of a weight whose local part is a `LinearWeight`, dealt out as it is; None for one of floats."""
    local = w._local_tensor
    if not isinstance(local, LinearWeight):
        return None
    made = type(local)._quantize(local)
    return MadeWeight(_wrapped(made.scaled, w), made.square_blocks)


def _wrapped(made: ScaledTensor, x: DTensor | _Whole) -> ScaledTensor:
    """The ScaledTensor of a DTensor's shape whose local parts are those of ``made``."""
    cuts = [i for i, placement in enumerate(x.placements) if placement.is_shard()]
    key = recipe_key(made.recipe)
    shapes = [part for part in tensors.output_parts(list(x.shape), key) if part is not None]
    form = cast_form(made.recipe, tuple(x.shape), made.original_dtype)
    parts = [getattr(made, name) for name in form.parts]
    wrapped = [_dealt(part, x, shape, stride, cuts) for part, (shape, stride, _) in zip(parts, shapes, strict=True)]
    return ScaledTensor._of(form, *form.place(wrapped))


def _dealt(part: Any, x: DTensor | _Whole, shape: Any, stride: Any, cuts: list[int]) -> DTensor:
    placements: list[Any] = [Replicate()] * x.device_mesh.ndim
    for cut in cuts:
        dim = x.placements[cut].dim
        if len(shape) > 1 and not (shape[dim] == 1 != x.shape[dim]):
            placements[cut] = Shard(dim)
    return DTensor.from_local(
        part, x.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


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
