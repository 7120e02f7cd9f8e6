# SPDX-License-Identifier: Apache-2.0
"""The logical tensors of a checkpoint in the order of its files. Those that are stored as they are, which are nearly
all of some checkpoints, are described when they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

from breccia.bridges.common import Array, turned_shape
from breccia.bridges.file_kinds import WeightFile
from breccia.bridges.fp8 import FP8_DTYPES
from breccia.bridges.parts import STORED, Found, Origin
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.checkpoint.reading.account import scales_beside
from breccia.checkpoint.reading.experts import MAX_EXPERTS, ExpertsApart, Names, apart, wholes
from breccia.checkpoint.reading.models import is_stored_turned, models_name, turns

AS_NUMBERS = "FP8 without a scale: the numbers themselves"
_ALIKE = 4096  # kinds of tensors that are looked at once
_BATCH = 4096  # tensors


@dataclass(eq=False, slots=True)
class Said:
    """What a header says of a tensor that a bridge found, or of a plain one: see `Found`. Plain tensors that differ by
    their name alone share one, whose ``name`` is None."""

    name: str | None
    kind: str
    shape: tuple[int, ...]
    findings: tuple[str, ...]
    found: Found | None = None


class Batch(NamedTuple):
    """Tensors that follow one another: their names, what is said of each, and the names that plain ones are stored
    under."""

    names: list[str]
    said: list[Said]
    stored: list[str]


class Plain:
    """Describes tensors that no bridge reads, of their entries, the file of each, config.json, and what is wrong with
    some."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        home: Mapping[str, WeightFile],
        config: Mapping[str, Any],
        troubles: Mapping[str, str],
    ) -> None:
        self.entries, self.home, self.config, self.troubles = entries, home, config, troubles
        self.cast: frozenset[str] = frozenset()  # names of FP8 tensors that are the numbers themselves
        self._alike: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[str, ...]]] = {}  # kind and findings
        self._turns = turns(config)
        files = {id(file): file for file in home.values()}.values()
        self.names_stay = all(file.model is None for file in files)  # every tensor has the name it is stored under

    def __call__(self, entry: Entry) -> Found:
        name, kind, shape, findings, origin = self._of(entry)
        dtype, parts = "F32" if origin.offset else entry.dtype, {"weight": entry.name}
        return Found(name, "plain", kind, parts, shape, dtype=dtype, origin=origin, findings=findings)

    def said(self, entries: list[Entry]) -> list[Said]:
        """What is said of each of some stored tensors: no `Found` is made, which takes most of the time."""
        if not self.names_stay or self._turns or self.troubles or self.cast:
            return [Said(*self._of(entry)[:4]) for entry in entries]
        forms = [entry[1:3] for entry in entries]  # dtype and shape, which say all but the name
        firsts = dict(zip(forms, entries, strict=True))
        alike = {form: Said(None, *self._of(entry)[1:4]) for form, entry in firsts.items()}
        return [alike[form] for form in forms]

    def _of(self, entry: Entry) -> tuple[str, str, tuple[int, ...], tuple[str, ...], Origin]:
        """The model's own name of a stored tensor, its kind, shape, findings and origin."""
        name, shape = entry.name, entry.shape
        home = self.home[name]
        told = self._alike.get((entry.dtype, shape))
        if told is None:
            kind = "fp8" if entry.dtype in ("F8_E4M3", "F8_E5M2") else entry.dtype.lower()
            told = kind, _suspicious(entry)
            if len(self._alike) < _ALIKE:
                self._alike[entry.dtype, shape] = told
        kind, findings = told
        if self.troubles and name in self.troubles:
            findings = (self.troubles[name],)
        origin, outside = STORED, name
        if name in self.cast:
            origin = Origin(numbers=FP8_DTYPES[entry.dtype])
            findings = (AS_NUMBERS,) if len(shape) > 1 else ()
        if home.model is not None:
            outside, order = spelled(name, home, shape)
            offset = home.model.offset(outside) if outside != name else 0.0
            if order is not None or offset:
                origin = Origin(row_order=order, offset=offset)
        if self._turns and is_stored_turned(name, shape, self.config):
            shape, origin = turned_shape(shape), replace(origin, turned=True)
        return outside, kind, shape, findings, origin


class Logical(Sequence[Found]):
    """Logical tensors; an entry stands for the plain tensor that is stored there."""

    def __init__(self, items: list[Found | Entry], plain: Plain) -> None:
        self._items, self._plain = items, plain

    def __len__(self) -> int:
        return len(self._items)

    def batches(self) -> Iterator[Batch]:
        """What is said of all tensors, some thousands at a time."""
        for at in range(0, len(self._items), _BATCH):
            items = self._items[at : at + _BATCH]
            plain = iter(self._plain.said([item for item in items if isinstance(item, Entry)]))
            said = [
                next(plain) if isinstance(one, Entry) else Said(one.name, one.kind, one.shape, one.findings, one)
                for one in items
            ]
            stored = [item.name if isinstance(item, Entry) else "" for item in items]
            names = [name if one.name is None else one.name for one, name in zip(said, stored, strict=True)]
            yield Batch(names, said, stored)

    def names(self) -> list[str]:
        """The model's own names of all tensors."""
        stay = self._plain.names_stay
        return [one.name if stay else self._made(one).name for one in self._items]

    @functools.cached_property
    def formats(self) -> frozenset[str]:
        """Those of tensors that bridges found."""
        return frozenset({one.format for one in self._items if isinstance(one, Found)} - {"plain"})

    def by_name(self) -> ByName:
        """The tensors by the model's own names."""
        return ByName(dict(zip(self.names(), self._items, strict=True)), self._made)

    def __iter__(self) -> Iterator[Found]:
        return map(self._made, self._items)

    def _made(self, item: Found | Entry) -> Found:
        return self._plain(item) if isinstance(item, Entry) else item

    @overload
    def __getitem__(self, index: int) -> Found: ...
    @overload
    def __getitem__(self, index: slice) -> Logical: ...
    def __getitem__(self, index: int | slice) -> Found | Logical:
        if isinstance(index, slice):
            return Logical(self._items[index], self._plain)
        return self._made(self._items[index])


class ByName(Mapping[str, Found]):
    """Logical tensors by name, each made when it is asked for."""

    def __init__(self, items: dict[str, Found | Entry], made: Callable[[Found | Entry], Found]) -> None:
        self._items, self._made = items, made

    def __getitem__(self, name: str) -> Found:
        return self._made(self._items[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items


def in_order(found: Iterable[Found], taken: set[str], plain: Plain) -> Logical:
    """What bridges found, and every stored tensor that is not taken, each in the place of its first part."""
    listed = apart([_named(one) for one in found])
    owners: dict[str, list[int]] = {}
    for i, one in enumerate(listed):
        for part in dict.fromkeys(one.parts.values()):
            owners.setdefault(part, []).append(i)
    items: list[Found | Entry] = []
    placed: set[int] = set()
    experts = 0
    for name, entry in plain.entries.items():
        if name in taken:
            new = [i for i in owners.get(name, ()) if i not in placed]
            placed.update(new)
            items += [listed[i] for i in new]
        elif len(entry.shape) == 3:  # experts, maybe
            new_ones = apart([_named(plain(entry))])
            experts += len(new_ones) - 1
            if experts > MAX_EXPERTS:
                raise ValueError(f"experts must be at most {MAX_EXPERTS}, all layers together, there are more")
            items += new_ones
        else:
            items.append(entry)
    return Logical(_of_halves(items, plain), plain)


def _of_halves(items: list[Found | Entry], plain: Plain) -> list[Found | Entry]:
    """Tensors that a file keeps as two, put together; others as they are."""
    home = next(iter(plain.home.values()), None)  # a file that spells names is a checkpoint of its own
    if home is not None and home.model is not None:
        names: Names | None = home.model if home.model.has_cuts else None
    else:
        known = plain.config.get("model_type") == "gpt_oss" and any(ExpertsApart().whole(item.name) for item in items)
        names = ExpertsApart() if known else None
    if names is None:
        return items
    return list(wholes((plain(item) if isinstance(item, Entry) else item for item in items), names))


def _named(found: Found) -> Found:
    name = models_name(found.name, found.shape)
    return found if name == found.name else replace(found, name=name)


def spelled(name: str, home: WeightFile, shape: tuple[int, ...]) -> tuple[str, Array | None]:
    """The model's own name of a stored tensor, and the order of its rows where the file has another."""
    outside = home.model.outside(name)
    return outside, home.model.row_order(outside, shape[0] if shape else 0)


def casts(entries: Mapping[str, Entry]) -> frozenset[str]:
    """FP8 tensors that were cast without a scale, as files of diffusion models have them: nothing beside one is called
    a scale."""
    fp8 = {entry.name for entry in entries.values() if entry.dtype in FP8_DTYPES}
    if not fp8:
        return frozenset()
    scaled = scales_beside({name: one for name, one in entries.items() if name not in fp8})
    none = not any(name in scaled or name.rpartition(".")[0] in scaled for name in fp8)
    return frozenset(fp8) if none else frozenset()


def _suspicious(entry: Entry) -> tuple[str, ...]:
    if len(entry.shape) < 2:
        return ()
    if entry.dtype.endswith("FNUZ"):
        return (f"{entry.dtype} codes, AMD's fnuz, without a scale as compressed-tensors and Quark store it",)
    if entry.dtype.startswith("F8") and entry.dtype != "F8_E8M0":
        return ("FP8 without a scale",)
    if entry.dtype in ("U8", "I8") and entry.nbytes > 4096:
        return (f"{entry.dtype} bytes whose meaning nothing says",)
    return ()
