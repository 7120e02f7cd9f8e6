# SPDX-License-Identifier: Apache-2.0
"""Tensors that some files keep as one and others as several: experts, as Hugging Face's checkpoints have them one
by one and MLX's all of a layer together, and what GGUF, or mlx-lm, keeps as two."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from breccia.bridges.parts import Found, Origin
from breccia.gguf.models import All, Alternate, Cut, keeps_codes
from breccia.scaled_tensor import ScaledTensor
from breccia.value import joining

if TYPE_CHECKING:
    from breccia.checkpoint.planning.targets import Target

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


class Names(Protocol):
    """Which of a model's tensors a format keeps as two."""

    def cuts(self, name: str) -> list[tuple[str, Cut]]:
        """The tensors that the format keeps one of the model's as, and what each is of it; none where it is one."""

    def whole(self, name: str) -> str:
        """The model's own name of what a tensor is one of two of; "" where it is of none."""


class ExpertsApart:
    """Experts of gpt-oss as mlx-lm has them: gates and others apart, each a module with a weight and a bias."""

    _WHOLE = re.compile(r"(?P<at>(?:.*\.)?experts\.)(?P<part>gate_up|down)_proj(?P<bias>_bias)?")
    _PART = re.compile(r"(?P<at>(?:.*\.)?experts\.)(?P<part>gate|up|down)_proj\.(?P<end>weight|bias)")

    def cuts(self, name: str) -> list[tuple[str, Cut]]:
        """See `Names`."""
        match = self._WHOLE.fullmatch(name)
        if match is None:
            return []
        end = "bias" if match["bias"] else "weight"
        parts: dict[str, Cut] = {"gate": Alternate(0), "up": Alternate(1)}
        if match["part"] == "down":
            parts = {"down": All()}
        return [(f"{match['at']}{part}_proj.{end}", cut) for part, cut in parts.items()]

    def whole(self, name: str) -> str:
        """See `Names`."""
        match = self._PART.fullmatch(name)
        if match is None:
            return ""
        part = "down" if match["part"] == "down" else "gate_up"
        return f"{match['at']}{part}_proj{'_bias' if match['end'] == 'bias' else ''}"


def halves(found: Iterable[Found], names: Names) -> list[Found]:
    """Tensors as the format has them. Raises ValueError where a shape does not fit config.json."""
    result: list[Found] = []
    for one in found:
        cuts = names.cuts(one.name)
        members = one.origin.members
        if cuts and members:  # of a file that has them so
            result += [replace(member, name=name) for member, (name, _) in zip(members, cuts, strict=True)]
        else:
            result += [_half(one, name, cut) for name, cut in cuts] or [one]
    return result


def _half(whole: Found, name: str, cut: Cut) -> Found:
    try:
        shape = cut.shape(whole.shape)
    except ValueError as error:
        raise ValueError(f"tensor {whole.name!r}: {error}") from None
    kept = _keeps(cut, whole)
    return replace(
        whole,
        name=name,
        shape=shape,
        recipe=whole.recipe if kept else None,
        layout=whole.layout if kept else None,
        origin=Origin(whole=whole, cut=cut),
    )


def _keeps(cut: Cut, found: Found) -> bool:
    """Whether a tensor and its half have the same recipe."""
    return isinstance(cut, All) or (isinstance(cut, Alternate) and keeps_codes(found.layout))


def wholes(found: Iterable[Found], names: Names) -> list[Found]:
    """Tensors of a file as the model has them, each in the place of its first half; halves of nothing as they
    are."""
    listed = list(found)
    at = {one.name: one for one in listed}
    result: list[Found] = []
    gone: set[str] = set()
    for one in listed:
        if one.name in gone:
            continue
        name = names.whole(one.name)
        cuts = names.cuts(name)
        if cuts and all(half in at for half, _ in cuts):
            result.append(_whole(name, cuts[0][1], [at[half] for half, _ in cuts]))
            gone |= {half for half, _ in cuts}
        else:
            result.append(one)
    return result


def _whole(name: str, cut: Cut, members: list[Found]) -> Found:
    first = next((one for one in members if one.format != "plain"), members[0])
    alike = all((one.format, one.recipe, one.layout) == (first.format, first.recipe, first.layout) for one in members)
    kept = alike and _keeps(cut, first)
    dtypes = {one.dtype for one in members}
    parts = {"weight" if i == 0 else f"weight {i}": part for i, part in enumerate(_parts(members))}
    return replace(
        first,
        name=name,
        parts=parts if first.format == "plain" else {**parts, **first.parts},
        shape=cut.whole_shape(members[0].shape),
        dtype=first.dtype if len(dtypes) == 1 else "F32",
        recipe=first.recipe if kept else None,
        layout=first.layout if kept else None,
        origin=Origin(members=tuple(members), cut=cut),
        findings=tuple(text for one in members for text in one.findings),
    )


def _parts(members: list[Found]) -> list[str]:
    return [part for one in members for part in one.parts.values()]
