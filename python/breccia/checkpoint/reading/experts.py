# SPDX-License-Identifier: Apache-2.0
"""Experts in tensors of their own, as Hugging Face's checkpoints have them, and all of a layer in one, as MLX's do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia.bridges.parts import Found, Origin
from breccia.checkpoint.reading.halves import ExpertsApart, halves
from breccia.scaled_tensor import ScaledTensor
from breccia.value import joining

if TYPE_CHECKING:
    from breccia.checkpoint.planning.targets import Target

__all__ = ["apart", "gathered", "stack", "together"]

_ONE = re.compile(r"(?P<block>.*)\.experts\.(?P<number>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_ALL = re.compile(r"(?P<block>.*)\.switch_mlp\.(?P<kind>gate_proj|up_proj|down_proj)\.weight")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MAX_EXPERTS = 1 << 17  # matrices of all layers: the largest models have half of that
_PROJECTIONS = {short: long for long, short in _MIXTRAL.items()}


def gathered(found: list[Found], target: Target) -> list[Found]:
    """Experts of a layer as the format's readers want them: in one tensor, gates apart from others, or as those of a
    GGUF file's model. Raises ValueError where some of a layer stay apart, for which GGUF has no name."""
    names, readers = target.names, target.bridge.readers
    if names is None:
        apart = readers.gates_apart and target.model.get("model_type") == "gpt_oss"
        found = halves(found, ExpertsApart()) if apart else found
        return together(found) if readers.experts_together else found
    found = together(halves(found, names)) if names.experts or names.has_cuts else found
    alone = next((one.name for one in found if names.apart(one.name)), None)
    if alone is not None:
        raise ValueError(
            f"tensor {alone!r} must have the form of the other experts' of its layer, with which it becomes one tensor "
            f"in GGUF: it is in another format, or some are missing"
        )
    return found


def together(found: list[Found]) -> list[Found]:
    """Experts of a layer, where all are alike, as one tensor under MLX's name, in the place of the first."""
    groups: dict[tuple[str, str], dict[int, int]] = {}
    for i, one in enumerate(found):
        match = _ONE.fullmatch(one.name)
        if match is None or len(one.shape) != 2:
            continue
        if match["block"].endswith("block_sparse_moe") == (match["kind"] in _PROJECTIONS):
            kind = _PROJECTIONS.get(match["kind"], match["kind"])
            groups.setdefault((match["block"], kind), {})[int(match["number"])] = i
    at: dict[int, Found] = {}
    gone: set[int] = set()
    for (block, kind), numbers in groups.items():
        members = [found[i] for _, i in sorted(numbers.items())]
        if sorted(numbers) == list(range(len(numbers))) and _alike(members):
            at[min(numbers.values())] = _together(f"{block}.switch_mlp.{kind}.weight", members)
            gone |= set(numbers.values())
    return [at.get(i, one) for i, one in enumerate(found) if i in at or i not in gone]


def _alike(members: list[Found]) -> bool:
    first = members[0]
    same = ("format", "kind", "shape", "recipe", "layout", "scale_dtype", "zero_dtype", "dtype")
    return all(getattr(one, field) == getattr(first, field) for one in members for field in same)


def _together(name: str, members: list[Found]) -> Found:
    first = members[0]
    parts = {f"{role} {i}": part for i, one in enumerate(members) for role, part in one.parts.items()}
    if "global_scale" in first.parts:
        parts["global_scale"] = first.parts["global_scale"]
    findings = tuple(text for one in members for text in one.findings)
    shape = (len(members), *first.shape)
    # Matrices with one scale each make no batch with one scale: their values are stacked.
    recipe = None if first.layout is not None and first.layout.one_scale else first.recipe
    origin = Origin(members=tuple(members))
    return replace(first, name=name, parts=parts, shape=shape, recipe=recipe, origin=origin, findings=findings)


def stack(tensors: list[Any]) -> Any:
    """One batch of tensors that are alike."""
    if all(isinstance(one, ScaledTensor) and not one.layout.one_scale for one in tensors):
        batch = joining.stack(tensors)
        second = [one.global_scale for one in tensors if one.global_scale is not None]
        return batch._with(global_scale=np.reshape(second, (-1, 1, 1))) if second else batch
    return np.stack([one if isinstance(one, np.ndarray) else one.dequantize() for one in tensors])


def apart(found: list[Found]) -> list[Found]:
    """All experts of a layer one by one, under the names of Hugging Face's checkpoints."""
    result: list[Found] = []
    count = sum(one.shape[0] for one in found if len(one.shape) == 3 and _ALL.fullmatch(one.name))
    if count > MAX_EXPERTS:
        raise ValueError(f"experts must be at most {MAX_EXPERTS}, all layers together, there are {count}")
    for one in found:
        match = _ALL.fullmatch(one.name)
        if match is None or len(one.shape) != 3:
            result.append(one)
            continue
        kind = _MIXTRAL[match["kind"]] if match["block"].endswith("block_sparse_moe") else match["kind"]
        for i in range(one.shape[0]):
            name = f"{match['block']}.experts.{i}.{kind}.weight"
            origin = replace(one.origin, expert=i, experts=one.shape[0])
            result.append(replace(one, name=name, shape=one.shape[1:], origin=origin))
    return result
