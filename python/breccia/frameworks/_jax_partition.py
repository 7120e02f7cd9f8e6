# SPDX-License-Identifier: Apache-2.0
"""Casts, dequantizations and products whose arrays lie on several devices: each device does its part, as
`_jax_sharding` cuts it. Axes of a mesh that the compiler deals with ("auto") follow a partitioning rule; explicit ones
are known while code is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from breccia.frameworks import _jax_sharding as cuts
from breccia.frameworks._jax_callbacks import NATIVE, raw
from breccia.frameworks._jax_sharding import Axes
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["cast", "dequantize", "gathered", "matmul"]

Call = Callable[..., Any]
Split = Callable[[Any, list[Axes], list[Axes]], tuple[list[Axes], list[Axes]]]


def cast(
    whole: Call,
    inside: Call,
    part: Call,
    operands: tuple[Any, ...],
    recipe: ScalingRecipe,
    *,
    rotated: bool,
    square: bool,
) -> tuple[Any, ...]:
    """The parts of a cast.

    Args:
        whole: makes them of ``operands``: the array, and the seed where there is one.
        inside: the same in code that the compiler splits.
        part: the same of one device's part, with ``amax`` and ``offset``.
        operands: see ``whole``.
        recipe: what to quantize to.
        rotated: whether rows are transformed first.
        square: whether blocks are square.
    """
    x, stochastic = operands[0], len(operands) > 1

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        axes = cuts.of_cast(x, given[0], mesh, recipe, stochastic=stochastic, rotated=rotated, square=square)
        return [axes, *([((),)] if stochastic else [])], [cuts.of_part(one.shape, axes) for one in made]

    def local(mesh: Any, axes: list[Axes]) -> Call:
        def run(x_here: Any, *seed: Any) -> Any:
            amax = cuts.crossing_amax(x_here, axes[0], recipe)
            if amax is None and not seed:
                return inside(x_here)
            at = cuts.offset(x.shape, x_here.shape, axes[0], mesh) if seed else 0
            return part(x_here, *seed, amax=amax, offset=at)

        return run

    if _alone(operands):
        return tuple(whole(*operands))
    made = jax.eval_shape(whole, *map(_shape, operands))
    packed = made[0].shape != x.shape
    axes = cuts.axes_of(x.shape, recipe.layout, packed) if not square else []
    inputs = [(x.shape, axes), *([((2,), [])] if stochastic else [])]
    rule = cuts.rule(inputs, [(one.shape, axes) for one in made])
    return tuple(_run(whole, local, split, rule, operands, made))


def dequantize(whole: Call, inside: Call, scaled: ScaledTensor) -> Any:
    """The values of an upright tensor.

    Args:
        whole: makes them of a ScaledTensor.
        inside: the same in code that the compiler splits.
        scaled: the tensor.
    """
    parts, rebuild = _taken(scaled)
    if _alone(parts):
        return whole(scaled)
    shape, layout, packed = scaled.shape, scaled.layout, scaled.is_packed

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        axes = cuts.whole_blocks(shape, given[0], mesh, cuts.blocks_of(layout, packed, len(shape)))
        return [cuts.of_part(one.shape, axes) for one in parts], [axes]

    def one(*parts: Any) -> tuple[Any]:
        return (whole(rebuild(*parts)),)

    def here(*parts: Any) -> tuple[Any]:
        return (inside(rebuild(*parts)),)

    axes = cuts.axes_of(shape, layout, packed)
    made = jax.eval_shape(one, *map(_shape, parts))
    rule = cuts.rule([(part.shape, axes) for part in parts], [(shape, axes)])
    return _run(one, lambda mesh, axes: here, split, rule, parts, made)[0]


def matmul(whole: Call, inside: Call, a: Any, b: Any) -> Any:
    """The product of two operands of which ``b`` has two axes: rows of ``a`` and columns of ``b`` may be split, what
    is summed over is not, so that every device computes the whole's own numbers.

    Args:
        whole: multiplies arrays or ScaledTensors.
        inside: the same in code that the compiler splits.
        a: an array or a ScaledTensor.
        b: the same.
    """
    if len(b.shape) != 2:
        return gathered(whole, a, b)
    (left, rebuild_a), (right, rebuild_b) = _taken(a), _taken(b)
    if _alone((*left, *right)):
        return whole(a, b)
    rows = _Kept(a, "m", lead=True)
    columns = _Kept(b, "n", lead=False)

    def one(*parts: Any) -> tuple[Any]:
        return (whole(rebuild_a(*parts[: len(left)]), rebuild_b(*parts[len(left) :])),)

    def here(*parts: Any) -> tuple[Any]:
        return (inside(rebuild_a(*parts[: len(left)]), rebuild_b(*parts[len(left) :])),)

    (out,) = made = jax.eval_shape(one, *map(_shape, (*left, *right)))

    def split(mesh: Any, given: list[Axes], wanted: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        if wanted:  # what the compiler has chosen
            *lead, last = wanted[0]
        else:
            lead = [given[0][axis] for axis in rows.places]
            last = given[len(left)][columns.places[0]]
            last = () if set(last) & {name for names in lead for name in names} else last
        lead = list(cuts.whole_blocks(out.shape[:-1], tuple(lead), mesh, rows.blocks))
        (last,) = cuts.whole_blocks(out.shape[-1:], (last,), mesh, columns.blocks)
        inputs = [rows.of(part.shape, lead) for part in left] + [columns.of(part.shape, [last]) for part in right]
        return inputs, [(*lead, last)]

    operands = [(part.shape, rows.factors_of(part.shape)) for part in left]
    operands += [(part.shape, columns.factors_of(part.shape)) for part in right]
    axes = [*rows.factors, *columns.factors]
    rule = cuts.rule(operands, [(out.shape, axes)])
    return _run(one, lambda mesh, axes: here, split, rule, (*left, *right), made)[0]


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


class _Kept:
    """The axes of an operand that a product keeps: all but the last of the first, the last of the second.

    Attributes:
        places: where they are in the stored arrays.
        blocks: elements of each that stay together.
        factors: of each, for the rule.
    """

    def __init__(self, operand: Any, letter: str, *, lead: bool) -> None:
        ndim = len(operand.shape)
        scaled = operand if isinstance(operand, ScaledTensor) else None
        turned = scaled is not None and scaled.layout.axis == -2
        axes = list(range(ndim - 1)) if lead else [ndim - 1]
        swapped = {ndim - 1: ndim - 2, ndim - 2: ndim - 1} if turned else {}
        self.places = [swapped.get(axis, axis) for axis in axes]
        blocks, packed = [1] * ndim, 1
        if scaled is not None:
            upright = scaled.mT if turned else scaled
            blocks, packed = cuts.blocks_of(upright.layout, upright.is_packed, ndim), 1 + upright.is_packed
        self.blocks = [blocks[place] for place in self.places]
        self.factors = [
            cuts.factors(f"{letter}{i}x", operand.shape[axis], blocks[place], packed if place == ndim - 1 else 1)
            for i, (axis, place) in enumerate(zip(axes, self.places, strict=True))
        ]

    def of(self, shape: Sequence[int], split: Sequence[tuple[str, ...]]) -> Axes:
        """How a stored array is split where the kept axes are split so."""
        by_place = dict(zip(self.places, split, strict=True))
        return tuple(by_place.get(i, ()) if extent > 1 else () for i, extent in enumerate(shape))

    def factors_of(self, shape: Sequence[int]) -> list[Any]:
        """Of each axis of a stored array; None of one that is never split."""
        by_place = dict(zip(self.places, self.factors, strict=True))
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
    """``whole`` of ``operands``, each device doing ``local`` of its part.

    Args:
        whole: what to compute.
        local: called with the mesh and the operands' axes: what one device computes.
        split: called with the mesh, and the axes of operands and, where they are known, of results: those to use.
        rule: for the compiler.
        operands: arrays.
        made: shapes of the results.
    """
    given = [cuts.split_over(x) for x in operands]
    if any(names for axes in given for names in axes):
        return _explicitly(local, split, operands, given)
    split_call = custom_partitioning(jax.jit(lambda *operands: tuple(whole(*operands))))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        shapes = [len(one.shape) for one in operands], [len(one.shape) for one in made]
        known = [
            [cuts.names_of(one.sharding, ndim) for one, ndim in zip(some, ndims, strict=True)]
            for some, ndims in zip((arguments, results), shapes, strict=True)
        ]
        inputs, outputs = split(mesh, *known)
        placed = [tuple(NamedSharding(mesh, cuts.spec_of(axes)) for axes in some) for some in (outputs, inputs)]
        run = local(mesh, inputs)
        return mesh, lambda *parts: tuple(run(*parts)), *placed

    split_call.def_partition(partition=partition, sharding_rule=rule)
    batched = custom_vmap(split_call)

    def member_by_member(size: int, in_batched: Any, *operands: Any) -> Any:
        results = jax.vmap(whole, [0 if one else None for one in in_batched])(*operands)
        return tuple(results), (True,) * len(made)

    batched.def_vmap(member_by_member)
    return batched(*operands)


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
