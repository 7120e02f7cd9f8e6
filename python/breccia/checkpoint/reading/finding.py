# SPDX-License-Identifier: Apache-2.0
"""Which logical tensors the stored ones are, by asking every bridge: from headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from breccia import bridges
from breccia.bridges.contract import Bridge
from breccia.bridges.parts import Found
from breccia.checkpoint.files.safetensors_file import Entry, SafetensorsFile
from breccia.checkpoint.reading.logical import blocks_of
from breccia.checkpoint.reading.naming import NAMELESS, naming
from breccia.gguf.container import GgufFile
from breccia.layouts import PerTensor

__all__ = ["Finder", "check_shape", "stored_bytes"]


def stored_bytes(found: Found, entries: Mapping[str, Entry]) -> int:
    """Stored bytes of a logical tensor, all parts together."""
    if found.format == "plain" and not found.options:
        return entries[found.parts["weight"]].nbytes
    stored = sum(entries[name].nbytes for name in set(found.parts.values()))
    return stored // int(found.options.get("experts", 1))


def check_shape(found: Found, entries: Mapping[str, Entry]) -> None:
    """Check that a shape fits the stored bytes. No format has more than 8 elements a byte: a header that claims more
    would make the reader reserve memory and disk for nothing.

    Raises:
        ValueError: it does not.
    """
    nbytes = stored_bytes(found, entries)
    for role, name in found.parts.items():
        if entries[name].dtype == "C64":
            raise ValueError(f"{role} must have real numbers, {name[:200]!r} has complex ones")
    if not found.shape and not isinstance(found.layout, (PerTensor, type(None))):
        raise ValueError(f"shape must have axes for a layout of {found.layout}, got ()")
    if found.layout is not None:
        found.layout.scale_shape(found.shape)  # raises where they do not fit
    if math.prod(found.shape) > 8 * nbytes:
        raise ValueError(f"shape must be that of {nbytes} stored bytes, got {found.shape}")


class Finder:
    """Asks the bridges for the tensors of a checkpoint.

    Args:
        entries: stored tensors by name.
        context: what config.json says, see `Bridge.find`; a format of the name of its method is asked first.

    Attributes:
        found: the tensors that a bridge reads.
        taken: names of the stored tensors that they are made of.
        troubles: what is wrong with stored tensors that look quantized, by name.
    """

    def __init__(self, entries: Mapping[str, Entry], context: Mapping[str, Any]) -> None:
        self.entries, self._context = entries, context
        method = (context.get("quantization_config") or {}).get("quant_method")
        self._bridges = sorted(bridges.registry().values(), key=lambda bridge: bridge.name != method)
        self.found: list[Found] = []
        self.taken: set[str] = set()
        self.troubles: dict[str, str] = {}

    def find(self, files: Sequence[SafetensorsFile | GgufFile]) -> None:
        """Find all tensors of the files.

        Raises:
            ValueError: a header's metadata is a format's and does not fit.
        """
        for file in files:
            if isinstance(file, GgufFile):
                for one in blocks_of(file):
                    self._take(one)
            elif file.metadata:
                self._of_metadata(file)
        finders = [bridge for bridge in self._bridges if bridge.anchors]
        anchors = tuple({anchor for bridge in finders for anchor in bridge.anchors})
        for name in self.entries:
            if name.endswith(anchors):
                for bridge in finders:
                    if name not in self.taken and name.endswith(bridge.anchors):
                        self._of_name(bridge, name)

    def _of_metadata(self, file: SafetensorsFile) -> None:
        for bridge in self._bridges:
            with naming(file.path, NAMELESS):
                every = bridge.find_all(self.entries, file.metadata)
            for one in every:
                with naming(file.path, one.name):
                    check_shape(one, self.entries)
                self._take(one)

    def _of_name(self, bridge: Bridge, name: str) -> None:
        try:
            one = bridge.find(name, self.entries, self._context)
            if one is not None:
                check_shape(one, self.entries)
        except ValueError as error:
            self.troubles[name] = f"looks quantized but does not fit: {error}"
            return
        if one is not None:
            self._take(one)

    def _take(self, found: Found) -> None:
        """Add a tensor, unless one of its parts belongs to a tensor found before."""
        names = set(found.parts.values())
        if not names & self.taken:
            self.taken |= names
            self.found.append(found)
