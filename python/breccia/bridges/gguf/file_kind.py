# SPDX-License-Identifier: Apache-2.0
"""GGUF files as a container of tensors. What reads and writes them lies above the bridges, and is loaded by name."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breccia.bridges.common import Array
from breccia.bridges.file_kinds import Container, Output, WeightFile

if TYPE_CHECKING:
    from breccia.checkpoint.files.planned_file import PlannedWriter

__all__ = ["GGUF"]

_IMATRIX = "quantize.imatrix.file"  # metadata: what llama-quantize weighed errors by


def _files() -> Any:
    return importlib.import_module("breccia.gguf.files")


class _Gguf(Container):
    title = "GGUF"
    whole = True
    types_alone = True

    @property
    def said_by_config(self) -> frozenset[str]:
        tensors: frozenset[str] = _files().ROPE_TENSORS
        return tensors

    @property
    def types(self) -> Mapping[str, tuple[int, int]]:
        return {kind: (block, nbytes) for kind, (_, block, nbytes) in _files().TYPES.items()}

    def holds(self, path: Path, start: bytes) -> bool:
        return start.startswith(b"GGUF") or path.suffix == ".gguf"

    def open(self, path: Path) -> WeightFile:
        file: WeightFile = _files().GgufFile(path)
        return file

    def names(self, source: Any, left_out: Collection[str]) -> tuple[Any, list[str], list[str]]:
        names: tuple[Any, list[str], list[str]] = _files().names_for(source, left_out)
        return names

    def made_anew(self, source: Any, names: Any) -> dict[str, Array]:
        made: dict[str, Array] = _files().made_anew(source, names)
        return made

    def writer(self, path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
        writer: tuple[PlannedWriter, list[str]] = _files().writer(path, output)
        return writer

    def config_of(self, file: Any) -> dict[str, Any]:
        config: dict[str, Any] = _files().config_of(file)
        return config

    @property
    def merging(self) -> Any:
        return importlib.import_module("breccia.gguf.merging").MergeInPlace

    @property
    def adapter(self) -> Any:
        return importlib.import_module("breccia.gguf.merging").read_adapter

    def scales_of_blocks(self, raw: Any, kind: str) -> Any:
        return importlib.import_module("breccia.bridges.gguf").scales_of_blocks(raw, kind)

    def left_behind(self, files: Sequence[Any], destination: Path, folder: bool) -> str:
        lost = [] if folder else [f"there is no config.json: {destination}/ instead makes a directory that has one"]
        by = next((file.fields[_IMATRIX][1] for file in files if _IMATRIX in file.fields), None)
        if by is not None:
            lost.append(f"that importance {str(by)[:100]!r} chose the values has no place in the output")
        return "; ".join(lost)

    def write_companions(self, path: Path, folder: Path) -> str:
        trouble: str = _files().write_tokenizer(path, folder)
        return trouble


GGUF = _Gguf()
