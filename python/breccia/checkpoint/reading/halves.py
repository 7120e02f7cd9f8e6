# SPDX-License-Identifier: Apache-2.0
"""Logical tensors that GGUF keeps as two: cut where a GGUF file is written, put together where one is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from breccia.bridges.parts import Found
from breccia.gguf.cuts import Alternate, Cut, keeps_codes
from breccia.gguf.models import ModelMap

__all__ = ["halves", "wholes"]


def halves(found: Iterable[Found], names: ModelMap) -> list[Found]:
    """Tensors as GGUF has them.

    Raises:
        ValueError: a shape does not fit config.json.
    """
    result: list[Found] = []
    for one in found:
        cuts = names.cuts(one.name)
        if cuts and "cut" in one.options:  # of a GGUF file
            result += one.options["members"]
        else:
            result += [_half(one, name, cut) for name, cut in cuts] or [one]
    return result


def _half(whole: Found, name: str, cut: Cut) -> Found:
    try:
        shape = cut.shape(whole.shape)
    except ValueError as error:
        raise ValueError(f"tensor {whole.name!r}: {error}") from None
    kept = isinstance(cut, Alternate) and keeps_codes(whole.layout)
    return replace(
        whole,
        name=name,
        shape=shape,
        recipe=whole.recipe if kept else None,
        layout=whole.layout if kept else None,
        options={"whole": whole, "cut": cut},
    )


def wholes(found: Iterable[Found], names: ModelMap) -> list[Found]:
    """Tensors of a GGUF file as the model has them, each in the place of its first half; halves of nothing as they
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
    kept = alike and isinstance(cut, Alternate) and keeps_codes(first.layout)
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
        options={"members": members, "cut": cut},
        findings=tuple(text for one in members for text in one.findings),
    )


def _parts(members: list[Found]) -> list[str]:
    return [part for one in members for part in one.parts.values()]
