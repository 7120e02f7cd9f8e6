# SPDX-License-Identifier: Apache-2.0
"""Which logical tensors the stored ones are, by asking every bridge: from headers alone."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from typing import Any

from breccia import bridges
from breccia.bridges.contract import LIKELY, NAMED, NO, FileFormat, registered
from breccia.bridges.file_kinds import WeightFile
from breccia.bridges.fp8 import FP8_DTYPES
from breccia.bridges.parts import STORED, Found
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.checkpoint.reading.account import beside_weights
from breccia.checkpoint.reading.naming import NAMELESS, naming

_TEXT = 1 << 16  # bytes of a text, at most


def stored_bytes(found: Found, entries: Mapping[str, Entry]) -> int:
    """Stored bytes of a logical tensor, all parts together."""
    if found.format == "plain" and found.origin is STORED:
        return entries[found.parts["weight"]].nbytes
    stored = sum(entries[name].nbytes for name in set(found.parts.values()))
    return stored // found.origin.experts


def check_shape(found: Found, entries: Mapping[str, Entry]) -> None:
    """Check that a shape fits the stored bytes. No format has more than 8 elements a byte: a header that claims more
    would make the reader reserve memory and disk for nothing. Raises ValueError where it does not."""
    nbytes = stored_bytes(found, entries)
    for role, name in found.parts.items():
        if entries[name].dtype == "C64":
            raise ValueError(f"{role} must have real numbers, {name[:200]!r} has complex ones")
    if not found.shape and found.layout is not None and not found.layout.one_scale:
        raise ValueError(f"shape must have axes for a layout of {found.layout}, got ()")
    if found.layout is not None:
        found.layout.scale_shape(found.shape)  # raises where they do not fit
    if math.prod(found.shape) > 8 * nbytes:
        raise ValueError(f"shape must be that of {nbytes} stored bytes, got {found.shape}")


class Finder:
    """Asks the bridges for the tensors of a checkpoint.

    Args:
        entries: stored tensors by name.
        context: what config.json says, see `FileFormat.find`; a format of the name of its method is asked first.

    Attributes:
        claims: what each bridge claims, by name.
        found: the tensors that a bridge reads.
        taken: names of the stored tensors that they are made of.
        troubles: what is wrong with stored tensors that look quantized, by name.
    """

    def __init__(self, entries: Mapping[str, Entry], context: Mapping[str, Any]) -> None:
        self.entries, self._context = entries, context
        self._bridges = list(bridges.registry().values())
        self.claims: dict[str, int] = {}
        for bridge in self._bridges:
            claim = NAMED if context["quant_method"] in bridge.methods else LIKELY
            self.claims[bridge.name] = claim if bridge.claims is None else bridge.claims(context)
        claims = []
        for bridge in self._bridges:
            claim = self.claims[bridge.name]  # of two that are named the one that was registered is asked first
            claims.append((claim + (claim >= NAMED and registered.get(bridge.name) is bridge), bridge))
        claims.sort(key=operator.itemgetter(0), reverse=True)
        # Those that claim as much: what config.json names comes first, and what it names is read so or not at all.
        self._ranks = [
            (claim, [one for _, one in some if one.anchors])
            for claim, some in itertools.groupby(claims, key=operator.itemgetter(0))
            if claim > NO
        ]
        self.found: list[Found] = []
        self.taken: set[str] = set()
        self.troubles: dict[str, str] = {}

    def find(self, files: Sequence[WeightFile]) -> None:
        """Find all tensors of the files. Raises ValueError where a header's metadata is a format's and does not fit."""
        endings = tuple(bridge.text for bridge in self._bridges if bridge.text)
        for file in files:
            for one in file.described():
                self._take(one)
            texts = {
                name: file.span(name, 0, entry.nbytes, False).tobytes().decode("utf-8", "replace")
                for name, entry in file.entries.items()
                if name.endswith(endings) and entry.dtype == "U8" and entry.nbytes <= _TEXT
            }
            if said := {**file.metadata, **texts}:
                self._of_metadata(file, said)
        anchors = tuple({anchor for _, rank in self._ranks for bridge in rank for anchor in bridge.anchors})
        for name in self.entries:
            if name.endswith(anchors) and name not in self.taken:
                self._of_name(name)
        dtypes = set(map(operator.attrgetter("dtype"), self.entries.values()))
        if files[0].model is None and (self.found or not dtypes.isdisjoint(FP8_DTYPES)):
            self.troubles = {**self._beside_weights(), **self.troubles}

    def _beside_weights(self) -> dict[str, str]:
        formats = {one.format for one in self.found}
        marks = [translate(mark) for name in formats for mark in bridges.bridge(name).marks]
        return beside_weights(self.found, self.entries, self.taken, re.compile("|".join(marks)) if marks else None)

    def _of_metadata(self, file: WeightFile, said: Mapping[str, str]) -> None:
        with naming(file.path, NAMELESS):
            for bridge in self._bridges:
                for one in bridge.find_all(self.entries, said) if bridge.find_all else ():
                    with naming(file.path, one.name):
                        check_shape(one, self.entries)
                    self._take(one)

    def _of_name(self, name: str) -> None:
        """Look for the tensor that a stored one belongs to among those that claim most, then among the others."""
        for claim, rank in self._ranks:
            every = [self._asked(bridge, name) for bridge in rank if name.endswith(bridge.anchors)]
            found = [one for one in every if one is not None]
            if len(found) > 1:
                kinds = " and ".join(f"{one.format}'s {one.kind}" for one in found)
                self.troubles[name] = f"looks quantized, like {kinds}: config.json must name the method"
                return
            if found:
                self._take(found[0])
                return
            if claim >= NAMED and name in self.troubles:
                return

    def _asked(self, bridge: FileFormat, name: str) -> Found | None:
        try:
            one = bridge.find(name, self.entries, self._context)
            if one is not None:
                check_shape(one, self.entries)
        except ValueError as error:
            self.troubles.setdefault(name, f"looks quantized but does not fit: {error}")
            return None
        return one

    def _take(self, found: Found) -> None:
        """Add a tensor, unless one of its parts belongs to a tensor found before."""
        names = set(found.parts.values())
        if not names & self.taken:
            self.taken |= names
            self.found.append(found)
