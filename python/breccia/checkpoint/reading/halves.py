# SPDX-License-Identifier: Apache-2.0
"""Logical tensors that GGUF, or mlx-lm, keeps as two: cut where such files are written, put together where they are
read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from breccia.bridges.parts import Found, Origin
from breccia.gguf.cuts import All, Alternate, Cut, keeps_codes

__all__ = ["ExpertsApart", "Names", "halves", "wholes"]


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
