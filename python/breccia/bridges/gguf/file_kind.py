# SPDX-License-Identifier: Apache-2.0
"""GGUF files as a container of tensors. What reads and writes them lies above the bridges, and is loaded by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from breccia.bridges.file_kinds import Container
from breccia.bridges.gguf.blocks import TYPES

_IMATRIX = "quantize.imatrix.file"  # metadata: what llama-quantize weighed errors by


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"breccia.gguf.{module}"), name)


def _by(module: str, name: str) -> Any:
    """A method that is a function of a module."""
    return lambda _, *arguments: _of(module, name)(*arguments)


class _Gguf(Container):
    title = "GGUF"
    whole = True
    types_alone = True
    types = MappingProxyType({kind: (block, nbytes) for kind, (_, block, nbytes) in TYPES.items()})
    open = _by("container", "GgufFile")
    names = _by("files", "names_for")
    made_anew = _by("files", "made_anew")
    writer = _by("files", "writer")
    config_of = _by("files", "config_of")
    write_companions = _by("files", "write_tokenizer")
    said_by_config = property(lambda self: _of("rope", "ROPE_TENSORS"))
    merging = property(lambda self: _of("merging", "MergeInPlace"))
    adapter = property(lambda self: _of("merging", "read_adapter"))

    def holds(self, path: Path, start: bytes) -> bool:
        return start.startswith(b"GGUF") or path.suffix == ".gguf"

    def scales_of_blocks(self, raw: Any, kind: str) -> Any:
        return importlib.import_module("breccia.bridges.gguf").scales_of_blocks(raw, kind)

    def left_behind(self, files: Sequence[Any], destination: Path, folder: bool) -> str:
        lost = [] if folder else [f"there is no config.json: {destination}/ instead makes a directory that has one"]
        by = next((file.fields[_IMATRIX][1] for file in files if _IMATRIX in file.fields), None)
        if by is not None:
            lost.append(f"that importance {str(by)[:100]!r} chose the values has no place in the output")
        return "; ".join(lost)


GGUF = _Gguf()
