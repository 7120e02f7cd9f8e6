# SPDX-License-Identifier: Apache-2.0
"""Casts, dequantizations and products whose arrays lie on several devices: each device does its part, as
`sharding` cuts it. Axes of a mesh that the compiler deals with ("auto") follow a partitioning rule; explicit ones
are known while code is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from breccia.frameworks.jax import sharding as cuts
from breccia.frameworks.jax.callbacks import NATIVE, raw
from breccia.frameworks.jax.sharding import Axes
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

Call = Callable[..., Any]
Split = Callable[[Any, list[Axes], list[Axes]], tuple[list[Axes], list[Axes]]]


def cast(
    whole: Call,
    inside: Call,
    given: Call,
    part: Call,
    operands: tuple[Any, ...],
    recipe: ScalingRecipe,
    *,
    rotated: bool,
    square: bool,
) -> tuple[Any, ...]:
    """The parts of a cast of `operands`, the array and perhaps a seed. `whole` makes them, `inside` does in code that
    the compiler splits, `given` of a part and the amax of all, and `part` of a part and a seed, with ``amax`` and
    ``offset``. `rotated`: rows are transformed first."""
    x, stochastic = operands[0], len(operands) > 1

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        axes = cuts.of_cast(x, given[0], mesh, recipe, stochastic=stochastic, rotated=rotated, square=square)
        return [axes, *([((),)] if stochastic else [])], [cuts.of_part(one.shape, axes) for one in made]

    def local(mesh: Any, axes: list[Axes]) -> Call:
        def run(x_here: Any, *seed: Any) -> Any:
            amax = cuts.crossing_amax(x_here, axes[0], recipe)
            if not seed:
                return inside(x_here) if amax is None else given(x_here, amax)
            return part(x_here, *seed, amax=amax, offset=cuts.offset(x.shape, x_here.shape, axes[0], mesh))

        return run

    if _alone(operands):
        return tuple(whole(*operands))
    made = jax.eval_shape(whole, *map(_shape, operands))
    packed = made[0].shape != x.shape
    axes = cuts.axes_of(x.shape, recipe.layout, packed) if not square else []
    inputs = [(x.shape, axes), *([((2,), [])] if stochastic else [])]
    rule = cuts.rule(inputs, [(one.shape, axes) for one in made])
    return tuple(_run(whole, local, split, rule, operands, made))


def _of_parts(call: Call, rebuild: Call) -> Call:
    """``call`` of what ``rebuild`` makes of arrays, as a tuple."""

    def run(*parts: Any) -> tuple[Any, ...]:
        made = call(*rebuild(*parts))
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    return run


def dequantize(whole: Call, inside: Call, scaled: ScaledTensor) -> Any:
    """The values of an upright tensor, by ``whole``, or by ``inside`` in code that the compiler splits."""
    parts, rebuild = _taken(scaled)
    if _alone(parts):
        return whole(scaled)
    shape, layout, packed = scaled.shape, scaled.layout, scaled.is_packed

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        axes = cuts.whole_blocks(shape, given[0], mesh, cuts.blocks_of(layout, packed, len(shape)))
        return [cuts.of_part(one.shape, axes) for one in parts], [axes]

    one, here = (_of_parts(call, lambda *parts: [rebuild(*parts)]) for call in (whole, inside))
    axes = cuts.axes_of(shape, layout, packed)
    made = jax.eval_shape(one, *map(_shape, parts))
    rule = cuts.rule([(part.shape, axes) for part in parts], [(shape, axes)])
    return _run(one, lambda mesh, axes: here, split, rule, parts, made)[0]


def requantize(whole: Call, inside: Call, scaled: ScaledTensor, recipe: ScalingRecipe) -> tuple[Any, ...]:
    """The parts of a tensor in another recipe, by ``whole``, or by ``inside`` in code that the compiler splits. Axes
    stay split where each part has whole blocks of both recipes; others are gathered as codes, for scales of the whole
    are found by a search."""
    parts, rebuild = _taken(scaled)
    if _alone(parts):
        return tuple(whole(scaled))
    turned = scaled.layout.axis == -2
    upright = scaled.mT if turned else scaled
    blocks = cuts.blocks_of(upright.layout, upright.is_packed, scaled.ndim)

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        axes = _swapped(cuts.whole_blocks(upright.shape, given[0], mesh, blocks), turned)
        axes = cuts.of_requantize(scaled.shape, axes, mesh, recipe)
        return [cuts.of_part(one.shape, _swapped(axes, turned)) for one in parts], [
            cuts.of_part(one.shape, axes) for one in made
        ]

    one, here = (_of_parts(call, lambda *parts: [rebuild(*parts)]) for call in (whole, inside))
    made = jax.eval_shape(one, *map(_shape, parts))
    shapes = [_swapped(part.shape, turned) if part.ndim == scaled.ndim else part.shape for part in parts]
    axes = cuts.common_axes(scaled.shape, [*shapes, *(part.shape for part in made)])
    operands = [(part.shape, _swapped(axes, turned)) for part in parts]
    rule = cuts.rule(operands, [(part.shape, axes) for part in made])
    return tuple(_run(one, lambda mesh, axes: here, split, rule, parts, made))


def _swapped(axes: Sequence[Any], turned: bool) -> tuple[Any, ...]:
    """With the last two exchanged where a tensor is stored transposed."""
    return (*axes[:-2], axes[-1], axes[-2]) if turned else tuple(axes)


def matmul(whole: Call, inside: Call, a: Any, b: Any) -> Any:
    """The product of two operands, by ``whole``, or by ``inside`` in code that the compiler splits: members of a batch,
    rows of ``a`` and columns of ``b`` may be split, what is summed over is not, so that every device computes the
    whole's own numbers."""
    if len(b.shape) < 2 or len(a.shape) < min(len(b.shape), 2):
        return gathered(whole, a, b)
    (left, rebuild_a), (right, rebuild_b) = _taken(a), _taken(b)
    if _alone((*left, *right)):
        return whole(a, b)

    def operands_of(*parts: Any) -> list[Any]:
        return [rebuild_a(*parts[: len(left)]), rebuild_b(*parts[len(left) :])]

    one, here = (_of_parts(call, operands_of) for call in (whole, inside))
    (out,) = made = jax.eval_shape(one, *map(_shape, (*left, *right)))
    kept = [_Kept(operand, axes) for operand, axes in zip((a, b), _kept_axes(a, b, out), strict=True)]
    parts = [(part.shape, one) for one, own in zip(kept, (left, right), strict=True) for part in own]
    blocks = [max(one.blocks.get(axis, 1) for one in kept) for axis in range(len(out.shape))]

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        asked = (
            wanted[0] if wanted else _asked(len(out.shape), list(zip(kept, (given[0], given[len(left)]), strict=True)))
        )
        axes = cuts.whole_blocks(out.shape, asked, mesh, blocks)
        return [one.of(shape, axes) for shape, one in parts], [axes]

    operands = [(shape, one.factors_of(shape)) for shape, one in parts]
    axes = [next((one.factors[axis] for one in kept if axis in one.factors), None) for axis in range(len(out.shape))]
    rule = cuts.rule(operands, [(out.shape, axes)])
    return _run(one, lambda mesh, axes: here, split, rule, (*left, *right), made)[0]


def _kept_axes(a: Any, b: Any, out: Any) -> tuple[dict[int, int], dict[int, int]]:
    """Of the operands of a product, the axes that the result has too, and which of its axes they are; those of one
    element are repeated along it."""
    ndim = len(out.shape)
    if len(b.shape) == 2:
        return {axis: axis for axis in range(len(a.shape) - 1)}, {1: ndim - 1}
    found = []
    for operand, own in ((a, -2), (b, -1)):
        shape = operand.shape
        first = ndim - len(shape)
        batch = {axis: first + axis for axis in range(len(shape) - 2) if shape[axis] == out.shape[first + axis]}
        found.append({**batch, len(shape) + own: ndim + own})
    return found[0], found[1]


def _asked(ndim: int, given: list[tuple[_Kept, Axes]]) -> Axes:
    """How operands that are split so split the result: by the first that splits an axis, over each axis of the mesh
    once."""
    axes: list[tuple[str, ...]] = []
    for axis in range(ndim):
        used = {name for names in axes for name in names}
        found = (names for one, split in given for names in [one.names(split, axis)] if names and not used & {*names})
        axes.append(next(found, ()))
    return tuple(axes)


def gathered(whole: Call, *operands: Any) -> Any:
    """``whole`` of arrays or ScaledTensors, which explicit axes do not split any more: every device computes all."""

    def all_of(x: Any) -> Any:
        axes = cuts.split_over(x)
        if not any(axes):
            return x
        mesh = jax.typeof(x).sharding.mesh
        moved = jax.sharding.reshard(raw(x), NamedSharding(mesh, cuts.spec_of(((),) * len(axes))))
        return jax.lax.bitcast_convert_type(moved, x.dtype) if x.dtype.name in NATIVE else moved

    return whole(*jax.tree.map(all_of, operands))


def split_as(like: Any, x: Any) -> Any:
    """An array, which explicit axes split as they do another of its shape: what a gradient's type must be."""
    axes = cuts.split_over(like)
    if axes == cuts.split_over(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(like).sharding.mesh, cuts.spec_of(axes)))


class _Kept:
    """The axes of an operand that a product keeps, by the axes of the result: ``places``, where they are in the stored
    arrays, ``blocks``, the elements of each that stay together, and ``factors`` of each, for the rule."""

    def __init__(self, operand: Any, axes: dict[int, int]) -> None:
        """``axes``: of the operand, and those of the result that they are."""
        ndim = len(operand.shape)
        scaled = operand if isinstance(operand, ScaledTensor) else None
        turned = scaled is not None and scaled.layout.axis == -2
        swapped = {ndim - 1: ndim - 2, ndim - 2: ndim - 1} if turned else {}
        blocks, packed = [1] * ndim, 1
        if scaled is not None:
            upright = scaled.mT if turned else scaled
            blocks, packed = cuts.blocks_of(upright.layout, upright.is_packed, ndim), 1 + upright.is_packed
        self.places = {out: swapped.get(axis, axis) for axis, out in axes.items()}
        self.blocks = {out: blocks[place] for out, place in self.places.items()}
        self.factors = {
            out: cuts.factors(f"m{out}x", operand.shape[axis], self.blocks[out], packed if place == ndim - 1 else 1)
            for (axis, out), place in zip(axes.items(), self.places.values(), strict=True)
        }

    def names(self, split: Axes, out: int) -> tuple[str, ...]:
        """Over what an axis of the result is split where the stored arrays are split so."""
        return split[self.places[out]] if out in self.places else ()

    def of(self, shape: Sequence[int], split: Sequence[tuple[str, ...]]) -> Axes:
        """How a stored array is split where the result is split so."""
        by_place = {place: split[out] for out, place in self.places.items()}
        return tuple(by_place.get(i, ()) if extent > 1 else () for i, extent in enumerate(shape))

    def factors_of(self, shape: Sequence[int]) -> list[Any]:
        """Of each axis of a stored array; None of one that is never split."""
        by_place = {place: self.factors[out] for out, place in self.places.items()}
        return [by_place.get(i) for i in range(len(shape))]


def _taken(operand: Any) -> tuple[tuple[Any, ...], Call]:
    """The arrays of an operand, codes as uint8 and upright, and what makes it of them, or of parts of them."""
    if not isinstance(operand, ScaledTensor):
        return (operand,), lambda array: array
    turned = operand.layout.axis == -2
    upright = operand.mT if turned else operand
    form = upright._form
    names = form.parts
    arrays = tuple(getattr(upright, name) for name in names)
    dtypes = [array.dtype for array in arrays]

    def rebuild(*parts: Any) -> ScaledTensor:
        typed = [
            jax.lax.bitcast_convert_type(part, dtype) if dtype.name in NATIVE else part
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        columns = parts[0].shape[-1] * (2 if upright.is_packed else 1)
        here = form if parts[0].shape[-1] == arrays[0].shape[-1] else form.with_columns(columns)
        made = ScaledTensor._of(here, **dict(zip(names, typed, strict=True)))
        return made.mT if turned else made

    return tuple(map(raw, arrays)), rebuild


def _alone(operands: Sequence[Any]) -> bool:
    """Whether there is nothing to split: one device, and no explicit axis even of one."""
    return jax.device_count() == 1 and not any(names for x in operands for names in cuts.split_over(x))


def _shape(x: Any) -> Any:
    """Of an array, without where it lies."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _run(whole: Call, local: Call, split: Split, rule: Any, operands: Sequence[Any], made: Sequence[Any]) -> Any:
    """``whole`` of ``operands``, each device doing ``local(mesh, axes of the operands)`` of its part. ``split`` gives
    the axes to use of operands and results, from the mesh, the operands' and, where they are known, the results';
    ``rule`` is for the compiler, ``made`` the shapes of the results."""
    given = [cuts.split_over(x) for x in operands]
    if any(names for axes in given for names in axes):
        alone = local(None, [((),) * len(axes) for axes in given])
        return _by_members(lambda *operands: _explicitly(local, split, operands, given), alone)(*operands)
    split_call = custom_partitioning(jax.jit(lambda *operands: tuple(whole(*operands))))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        shapes = [len(one.shape) for one in operands], [len(one.shape) for one in made]
        known = [
            [cuts.names_on(mesh, one.sharding, ndim) for one, ndim in zip(some, ndims, strict=True)]
            for some, ndims in zip((arguments, results), shapes, strict=True)
        ]
        inputs, outputs = split(mesh, *known)
        placed = [tuple(NamedSharding(mesh, cuts.spec_of(axes)) for axes in some) for some in (outputs, inputs)]
        run = local(mesh, inputs)
        return mesh, lambda *parts: tuple(run(*parts)), *placed

    split_call.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
    return _by_members(split_call, whole)(*operands)


def _by_members(split_call: Call, whole: Call) -> Call:
    """``split_call``, but ``whole`` of each member of a batch, which is not split."""
    batched: Call = custom_vmap(split_call)

    def member_by_member(size: int, in_batched: Any, *operands: Any) -> Any:
        results = gathered(jax.vmap(whole, [0 if one else None for one in in_batched]), *operands)
        return tuple(results), (True,) * len(results)

    batched.def_vmap(member_by_member)  # type: ignore[attr-defined]
    return batched


def _explicitly(local: Call, split: Split, operands: Sequence[Any], given: list[Axes]) -> Any:
    mesh = next(sharding.mesh for x in operands if not (sharding := jax.typeof(x).sharding).mesh.empty)
    inputs, outputs = split(mesh, given, [])
    placed = [
        x if axes == had else jax.sharding.reshard(x, NamedSharding(mesh, cuts.spec_of(axes)))
        for x, axes, had in zip(operands, inputs, given, strict=True)
    ]
    run = local(mesh, inputs)
    return jax.shard_map(
        lambda *parts: tuple(run(*parts)),
        mesh=mesh,
        in_specs=tuple(cuts.spec_of(axes) for axes in inputs),
        out_specs=tuple(cuts.spec_of(axes) for axes in outputs),
        check_vma=False,
    )(*placed)
