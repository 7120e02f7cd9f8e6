# SPDX-License-Identifier: Apache-2.0
"""The logical tensors of a checkpoint in the order of its files. Those that are stored as they are, which are nearly
all of some checkpoints, are described when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from breccia.bridges._parts import Found
from breccia.checkpoint.experts import apart
from breccia.checkpoint.files.gguf_file import GgufFile
from breccia.checkpoint.files.safetensors_file import Entry, SafetensorsFile
from breccia.checkpoint.halves import wholes
from breccia.checkpoint.models import is_stored_turned, models_name

__all__ = ["Logical", "Plain", "blocks_of", "in_order", "spelled"]


_ALIKE = 4096  # kinds of tensors that are looked at once


class PlainSaid(NamedTuple):
    """What a header says of a plain tensor: see `Found`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    findings: tuple[str, ...]


class Plain:
    """Describes tensors that no bridge reads.

    Args:
        entries: stored tensors by name.
        home: the file of each.
        config: config.json.
        troubles: what is wrong with some, by name.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        home: Mapping[str, SafetensorsFile | GgufFile],
        config: Mapping[str, Any],
        troubles: Mapping[str, str],
    ) -> None:
        self.entries, self.home, self.config, self.troubles = entries, home, config, troubles
        self._alike: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[str, ...]]] = {}  # kind and findings

    def __call__(self, name: str) -> Found:
        (outside, kind, shape, findings), options = self.said(name)
        dtype = "F32" if "offset" in options else self.entries[name].dtype
        return Found(outside, "plain", kind, {"weight": name}, shape, dtype=dtype, options=options, findings=findings)

    def said(self, name: str) -> tuple[PlainSaid, dict[str, Any]]:
        """The same without a `Found`, which takes most of the time, and that one's options."""
        entry = self.entries[name]
        shape, home = entry.shape, self.home[name]
        told = self._alike.get((entry.dtype, shape))
        if told is None:
            kind = "fp8" if entry.dtype in ("F8_E4M3", "F8_E5M2") else entry.dtype.lower()
            told = kind, _suspicious(entry)
            if len(self._alike) < _ALIKE:
                self._alike[entry.dtype, shape] = told
        kind, findings = told
        if self.troubles and name in self.troubles:
            findings = (self.troubles[name],)
        options: dict[str, Any] = {}
        outside = name
        if isinstance(home, GgufFile):
            outside, options = spelled(name, home, shape)
            if home.model is not None and outside != name and home.model.offset(outside):
                options = {**options, "offset": home.model.offset(outside)}
        if self.config and is_stored_turned(name, shape, self.config):
            shape, options = (*shape[:-2], shape[-1], shape[-2]), {**options, "turned": True}
        return PlainSaid(outside, kind, shape, findings), options


class Logical(Sequence[Found]):
    """Logical tensors; a name stands for the plain tensor that is stored under it."""

    def __init__(self, items: list[Found | str], plain: Plain) -> None:
        self._items, self._plain = items, plain

    def __len__(self) -> int:
        return len(self._items)

    def said(self) -> Iterator[tuple[Found | PlainSaid, str]]:
        """Each tensor, or what is said of a plain one, and the name that a plain one is stored under."""
        for item in self._items:
            yield (item, "") if isinstance(item, Found) else (self._plain.said(item)[0], item)

    def __iter__(self) -> Iterator[Found]:
        for item in self._items:
            yield item if isinstance(item, Found) else self._plain(item)

    @overload
    def __getitem__(self, index: int) -> Found: ...
    @overload
    def __getitem__(self, index: slice) -> Logical: ...
    def __getitem__(self, index: int | slice) -> Found | Logical:
        if isinstance(index, slice):
            return Logical(self._items[index], self._plain)
        item = self._items[index]
        return item if isinstance(item, Found) else self._plain(item)


def in_order(found: Iterable[Found], taken: set[str], plain: Plain) -> Logical:
    """What bridges found, and every stored tensor that is not taken, each in the place of its first part."""
    listed = apart([_named(one) for one in found])
    owners: dict[str, list[int]] = {}
    for i, one in enumerate(listed):
        for part in dict.fromkeys(one.parts.values()):
            owners.setdefault(part, []).append(i)
    items: list[Found | str] = []
    placed: set[int] = set()
    for name, entry in plain.entries.items():
        if name in taken:
            new = [i for i in owners.get(name, ()) if i not in placed]
            placed.update(new)
            items += [listed[i] for i in new]
        elif len(entry.shape) == 3:  # experts, maybe
            items += apart([_named(plain(name))])
        else:
            items.append(name)
    return Logical(_of_halves(items, plain), plain)


def _of_halves(items: list[Found | str], plain: Plain) -> list[Found | str]:
    """Tensors that a GGUF file keeps as two, put together; others as they are."""
    home = next(iter(plain.home.values()), None)  # a GGUF file is a checkpoint of its own
    known = home.model if isinstance(home, GgufFile) else None
    if known is None or not known.has_cuts:
        return items
    return list(wholes((plain(item) if isinstance(item, str) else item for item in items), known))


def _named(found: Found) -> Found:
    name = models_name(found.name, found.shape)
    return found if name == found.name else replace(found, name=name)


def spelled(name: str, home: SafetensorsFile | GgufFile, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """The model's own name of a stored tensor, and the order of its rows where GGUF has another."""
    if not isinstance(home, GgufFile) or home.model is None:
        return name, {}
    outside = home.model.outside(name)
    order = home.model.row_order(outside, shape[0] if shape else 0)
    return outside, {} if order is None else {"row_order": order}


def blocks_of(file: GgufFile) -> list[Found]:
    """The tensors of a GGUF file that are stored in blocks, by the model's own names."""
    result = []
    for one in file.blocks():
        name, options = spelled(one.name, file, one.shape)
        result.append(replace(one, name=name, options={**one.options, **options}))
    return result


def _suspicious(entry: Entry) -> tuple[str, ...]:
    if len(entry.shape) < 2:
        return ()
    if entry.dtype.endswith("FNUZ"):
        return (f"{entry.dtype} codes, AMD's fnuz: no format that is read here has them",)
    if entry.dtype.startswith("F8") and entry.dtype != "F8_E8M0":
        return ("FP8 without a scale",)
    if entry.dtype in ("U8", "I8") and entry.nbytes > 4096:
        return (f"{entry.dtype} bytes whose meaning nothing says",)
    return ()
