# SPDX-License-Identifier: Apache-2.0
"""Which format each layer of a model gets so that outputs are least wrong at so many bits a weight."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from breccia import verbs
from breccia.bridges.outside import comparable, values
from breccia.bridges.parts import Found
from breccia.bridges.written import fused_layer
from breccia.checkpoint.arguments import count_of
from breccia.checkpoint.files.dtypes import nbytes_of
from breccia.checkpoint.planning.choices import QUANTIZED, choose, wanted
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.layer_moments import energy, experts_of
from breccia.checkpoint.planning.targets import Target, parse_target
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.source import Checkpoint, is_float
from breccia.checkpoint.workers import runs
from breccia.recipe_names import recipe_of
from breccia.recipes import has_exponents
from breccia.schemes.toml import table_of

_ENTRY = 1024  # bytes that the header of a file takes at most for the parts of a tensor


@dataclass(frozen=True)
class Option:
    """What a format would do to a group: the bits of all its weights, scales included, and Σ of the squares of relative
    output errors."""

    name: str
    bits: float
    error: float


@dataclass(frozen=True)
class Group:
    """Layers that get one format: those that servers fuse, all experts of a layer, or one alone. They have ``weights``
    numbers; ``patterns`` are their names, or one that matches them all; ``options`` the formats that have a place for
    all of them."""

    patterns: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


class Rest(NamedTuple):
    """What is not planned: numbers and bytes; and how many tensors there are at all."""

    weights: int
    nbytes: int
    tensors: int


def plan_bits(
    source: str | os.PathLike[str],
    moments: str | os.PathLike[str],
    bits: float | None = None,
    formats: Sequence[str] = ("nvfp4", "fp8", "bf16"),
    *,
    size: int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Choose a format for each layer by what it would do to the layer's output.

    The error of a format is the sum over weights of tr RHRᵀ / tr WHWᵀ, with R what rounding to nearest, by importance
    where the recipe takes it, changes in W, and H the moments; experts of a layer count as one weight. Layers that
    servers fuse, and all experts of a layer, get one format. From the formats of fewest bits, steps that save most
    error for a bit are taken until the bits are used up (the convex hull of each group's errors over bits).

    Args:
        source: as for `convert`; weights that `convert` would quantize are planned.
        moments: a file that `breccia.calibrate` wrote.
        bits: the most that a weight may take, on average over the planned ones, scales included. Others, such as
            embeddings, are not counted.
        formats: recipes, and "bf16", "fp16" or "fp32": layers that stay as they are, whose error is none.
        size: in the place of ``bits`` the most bytes that all of the model may take, what is not planned included.
        include: as for `convert`.
        exclude: as for `convert`.
        progress: draw a line on a terminal.

    Returns:
        JSON types: "groups" with "layers", "weights", "format", "bits" and "errors" by format; "rules", format →
        patterns of its layers; "bits" a planned weight, "bits_of_all" a weight of the whole model and "bytes" of its
        tensors; "error", and "errors" with one format for all; "notes".

    Raises:
        TypeError: ``formats`` are no list of strings, ``bits`` is no number, ``size`` no whole one, or both or neither
            are given.
        ValueError: there is no such format, nothing to plan, or too few ``bits`` or bytes for the least formats.

    Examples:
        >>> from breccia import checkpoint, moments
        >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> breccia.save({f"layers.{i}.up_proj.weight": w for i in range(4)}, "model.safetensors")
        >>> seen = moments.Moments(diag=np.ones(256, np.float32), count=np.asarray(1))
        >>> moments.save_moments({f"layers.{i}.up_proj": seen for i in range(4)}, "moments.safetensors")
        >>> plan = checkpoint.plan_bits("model.safetensors", "moments.safetensors", bits=7)
        >>> sorted(group["format"] for group in plan["groups"]), plan["bits"] <= 7
        (['fp8', 'fp8', 'nvfp4', 'nvfp4'], True)
    """
    targets = _targets(formats, include, exclude)
    if (bits is None) == (size is None):
        raise TypeError(f"one of bits and size must be given, got bits={bits!r} and size={size!r}")
    if isinstance(bits, bool) or not isinstance(bits, (int, float, NoneType)):
        raise TypeError(f"bits must be a number, got {bits!r}")
    most = None if size is None else count_of(size, "size")
    with (
        Checkpoint(source, mapped=False) as checkpoint,
        contextlib.closing(Importance(moments, None, "moments")) as data,
    ):
        groups, notes, rest = _measured(checkpoint, data, targets, progress)
    if most is not None:
        bits = _left(groups, most, rest)
    return _report(groups, spread(groups, float(bits or 0)), notes, rest)


def _left(groups: Sequence[Group], size: int, rest: Rest) -> float:
    """The bits a planned weight that a model of so many bytes leaves. Raises ValueError where they are too few."""
    others = rest.nbytes + _ENTRY * rest.tensors
    least = sum(min(option.bits for option in group.options) for group in groups)
    if 8 * (size - others) < least:
        raise ValueError(f"size must be at least {math.ceil(least / 8) + others:,} bytes, got {size:,}")
    return 8 * (size - others) / sum(group.weights for group in groups)


def spread(groups: Sequence[Group], bits: float) -> list[Option]:
    """Choose an option of each group, for the least sum of errors that the bits allow, but for what the last step that
    does not fit would have saved. Raises ValueError where the least options take more."""
    hulls = [_hull(group.options) for group in groups]
    weights = sum(group.weights for group in groups)
    used = sum(hull[0].bits for hull in hulls)
    if used > bits * weights * (1 + 1e-9):
        raise ValueError(
            f"bits must be at least {math.ceil(100 * used / weights) / 100:.2f}, the least of formats, got {bits:g}"
        )
    steps = [
        ((a.error - b.error) / (b.bits - a.bits), i, place + 1)
        for i, hull in enumerate(hulls)
        for place, (a, b) in enumerate(itertools.pairwise(hull))
    ]
    at, ended = [0] * len(groups), set[int]()
    for _, i, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        more = hulls[i][place].bits - hulls[i][at[i]].bits
        if i in ended or used + more > bits * weights * (1 + 1e-9):
            ended.add(i)
            continue
        at[i], used = place, used + more
    return [hull[place] for hull, place in zip(hulls, at, strict=True)]


def _hull(options: Iterable[Option]) -> list[Option]:
    """Options on the lower convex hull of errors over bits, from the fewest bits to the least error."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda one: (one.bits, one.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.error - a.error) / (b.bits - a.bits)


def _targets(formats: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> dict[str, Target]:
    if isinstance(formats, str) or not all(isinstance(name, str) for name in formats):
        raise TypeError(f"formats must be a list of recipes and float dtypes, got {formats!r}")
    if not formats:
        raise ValueError("formats must have at least one, got none")
    names = dict.fromkeys(name.strip().lower() for name in formats)
    targets = {name: parse_target(name, include=include, exclude=exclude, argument="formats") for name in names}
    if others := [name for name, one in targets.items() if not _in_schemes(name, one)]:
        raise ValueError(f"formats must be recipes or float dtypes, got {others[0]!r}: a scheme names no bridge")
    if all(target.float_dtype for target in targets.values()):
        raise ValueError(f"formats must have a recipe to quantize to, got {', '.join(formats)}")
    return targets


def _in_schemes(name: str, target: Target) -> bool:
    """Whether a scheme can say it: floats, or the name of a recipe."""
    try:
        return bool(target.float_dtype) or bool(recipe_of(name))
    except ValueError:
        return False


class _Sum:
    """What a group would lose, by format, and what it puts out, by kind of weight."""

    def __init__(self, names: Iterable[str]) -> None:
        self.wrong: dict[str, dict[str, float]] = {name: {} for name in names}
        self.right: dict[str, float] = {}
        self.bits: dict[str, float] = dict.fromkeys(names, 0.0)

    def errors(self) -> dict[str, float]:
        def share(wrong: float, right: float) -> float:
            return wrong / right if right > 0 and math.isfinite(wrong / right) else 0.0

        return {
            name: sum(share(lost, self.right[kind]) for kind, lost in wrong.items())
            for name, wrong in self.wrong.items()
        }


def _measured(
    checkpoint: Checkpoint, data: Importance, targets: Mapping[str, Target], show: bool
) -> tuple[list[Group], list[str], Rest]:
    """The groups, notes, and what is not planned."""
    recipe = next(target for target in targets.values() if not target.float_dtype)
    found = [checkpoint.refined(one) for one in checkpoint.found]
    planned = [
        one for one in found if is_float(one) and wanted(one, recipe) and choose(one, recipe).action in QUANTIZED
    ]
    if not planned:
        raise ValueError(
            f"{checkpoint.path}: there must be a weight to plan, there is none that convert would quantize"
        )
    chosen = {one.name for one in planned}
    rest = [one for one in found if one.name not in chosen]
    left = Rest(sum(math.prod(one.shape) for one in rest), sum(checkpoint.nbytes(one) for one in rest), len(found))
    line = Progress(sum(checkpoint.nbytes(one) for one in planned), show)
    groups, without = [], list[str]()
    for members in _grouped(planned):
        sums = _Sum(_for_all(members, targets))
        unknown = [one.name for one in members if not _add(checkpoint, data, one, targets, sums, line)]
        errors = sums.errors()
        options = [Option(name, sums.bits[name], errors[name]) for name in sums.wrong]
        if unknown:
            options = [max(options, key=lambda one: one.bits)]
            without.append(unknown[0])
        groups.append(Group(_patterns(members), sum(math.prod(one.shape) for one in members), tuple(options)))
    line.finish()
    if len(without) == len(groups):
        raise ValueError(f"moments must be of the source's layers: {data.path} has none of any, such as {without[0]}")
    said = f"{len(without)} of {len(groups)} groups of layers get the widest format"
    return groups, [f"{said}: {data.path} has no moments of {without[0]}"] if without else [], left


def _grouped(planned: Sequence[Found]) -> list[list[Found]]:
    groups: dict[Any, list[Found]] = {}
    for one in planned:
        groups.setdefault(experts_of(one.name, one.shape) or fused_layer(one.name) or (one.name,), []).append(one)
    return list(groups.values())


def _patterns(members: Sequence[Found]) -> tuple[str, ...]:
    block = experts_of(members[0].name, members[0].shape)
    if block is not None and members[0].name.startswith(f"{block}.experts."):
        return (f"{block}.experts.*" if len(members[0].shape) == 2 else f"{block}.experts*",)
    return tuple(one.name.removesuffix(".weight") for one in members)


def _for_all(members: Sequence[Found], targets: Mapping[str, Target]) -> list[str]:
    """Formats that have a place for each tensor of a group."""
    return [
        name
        for name, target in targets.items()
        if target.float_dtype or all(choose(one, target).action in QUANTIZED for one in members)
    ]


def _add(
    checkpoint: Checkpoint, data: Importance, found: Found, targets: Mapping[str, Target], sums: _Sum, line: Progress
) -> bool:
    """Add what formats do to a tensor; whether there are moments of it."""
    for name in sums.wrong:
        if targets[name].float_dtype:  # a scheme leaves it as it is
            size = checkpoint.nbytes(found) if found.format == "plain" else 2 * math.prod(found.shape)
        else:
            size = sum(nbytes_of(dtype, shape) for dtype, shape in choose(found, targets[name]).outputs.values())
        sums.bits[name] += 8 * size
    line.add(checkpoint.nbytes(found))
    count = found.shape[0] if len(found.shape) == 3 else None
    if data.moments(found, None if count is None else 0) is None:
        return False
    loaded = comparable(checkpoint.load(found))
    importance, kind = data.of_found(found), found.name
    if experts_of(found.name, found.shape) is not None:
        kind = found.name.removesuffix(".weight").rpartition(".")[2]
    for expert in range(count) if count is not None else (None,):
        matrix = loaded if expert is None else loaded[expert]
        weights = importance if importance is None or importance.ndim == 1 else importance[expert]
        _compare(np.asarray(values(matrix), np.float32), weights, data.moments(found, expert), targets, sums, kind)
    checkpoint.release(found)
    data.release()
    return True


def _compare(matrix: Any, importance: Any, moments: Any, targets: Mapping[str, Target], sums: _Sum, kind: str) -> None:
    every = list(runs(matrix.shape[0]))
    right = sum(energy(matrix[rows], moments) for rows in every)
    sums.right[kind] = sums.right.get(kind, 0.0) + right
    for name, wrong in sums.wrong.items():
        recipe = targets[name].recipe
        lost = 0.0
        if not targets[name].float_dtype and recipe is not None:
            by = None if has_exponents(recipe) else importance  # which groups with exponents do not take
            made = verbs.dequantize(verbs.cast(matrix, recipe, importance=by))
            lost = sum(energy(matrix[rows] - made[rows], moments) for rows in every)
        wrong[kind] = wrong.get(kind, 0.0) + lost


def _report(groups: Sequence[Group], chosen: Sequence[Option], notes: list[str], rest: Rest) -> dict[str, Any]:
    rules: dict[str, list[str]] = {}
    for group, option in zip(groups, chosen, strict=True):
        rules.setdefault(option.name, []).extend(group.patterns)
    weights, bits = sum(group.weights for group in groups), sum(option.bits for option in chosen)
    names = dict.fromkeys(one.name for group in groups for one in group.options)
    every = {name: [one.error for group in groups for one in group.options if one.name == name] for name in names}
    return {
        "bits": bits / weights,
        "bits_of_all": (bits + 8 * rest.nbytes) / (weights + rest.weights),
        "bytes": rest.nbytes + math.ceil(bits / 8),
        "error": sum(option.error for option in chosen),
        "errors": {name: sum(some) for name, some in every.items() if len(some) == len(groups)},
        "rules": rules,
        "groups": [
            {
                "layers": list(group.patterns),
                "weights": group.weights,
                "format": option.name,
                "bits": option.bits / group.weights,
                "errors": {one.name: one.error for one in group.options},
            }
            for group, option in zip(groups, chosen, strict=True)
        ],
        "notes": notes,
    }


def to_toml(report: Mapping[str, Any]) -> str:
    """A scheme's file of what `plan_bits` reports, in TOML: a table for each format, with the layers that it is for;
    "none" is high precision."""
    weights = {name: "none" if name in ("bf16", "fp16", "fp32") else name for name in report["rules"]}
    return "\n".join(
        table_of("rule", {"match": list(patterns), "weights": weights[name]})
        for name, patterns in report["rules"].items()
    )
