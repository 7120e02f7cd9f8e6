# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that hold tensors. `Container` is the contract, and its answers are those of safetensors; a format
whose files are of another kind gives a bridge a container of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from breccia.bridges.common import Array
from breccia.bridges.parts import Found

if TYPE_CHECKING:
    from breccia.checkpoint.files.input_file import InputFile
    from breccia.checkpoint.files.planned_file import PlannedWriter
    from breccia.checkpoint.files.safetensors_header import Entry

Spec: TypeAlias = "tuple[str, tuple[int, ...]]"  # dtype and shape


class WeightFile(Protocol):
    """An open file of tensors.

    Attributes:
        path: of the file.
        file: what tells whether it is still the same.
        entries: its stored tensors by name.
        metadata: strings of the header.
        model: how the file spells the names of a model's tensors; None where they are the model's own.
    """

    path: Path
    file: InputFile
    entries: dict[str, Entry]
    metadata: dict[str, str]
    model: Any

    @property
    def left_out(self) -> Collection[str]:
        """Names of the source's tensors that the file had no place for."""

    def described(self) -> list[Found]:
        """The logical tensors that the file itself tells of, by the model's own names: no bridge looks for them."""

    def span(self, name: str, start: int, stop: int, mapped: bool) -> Array:
        """Some of a tensor's bytes.

        Args:
            name: of the stored tensor.
            start: the first byte, from the tensor's own.
            stop: the byte after the last.
            mapped: whether the result may view the mapped file; else it has memory of its own.

        Returns:
            uint8 ``(stop - start,)``.
        """

    def release(self, name: str) -> None:
        """Tell the system that a tensor's bytes are not needed any more.

        Args:
            name: of the stored tensor.
        """

    def close(self) -> None:
        """Let go of the file."""


@dataclass(frozen=True)
class Output:
    """What a container is told of a file to write.

    Attributes:
        source: the open checkpoint that is converted.
        tensors: the logical tensors in order, each with dtype and shape of what is stored of it, by name.
        metadata: strings that bridges say of them.
        names: how the model's names are spelled, as `Container.names` gave it.
        left_out: names of the source's tensors that are not written.
    """

    source: Any
    tensors: Sequence[tuple[Found, Mapping[str, Spec]]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Any = None
    left_out: Sequence[str] = ()

    @property
    def plan(self) -> dict[str, Spec]:
        """Dtype and shape of every stored tensor, by name."""
        return {name: spec for _, stored in self.tensors for name, spec in stored.items()}


class Container:
    """A kind of file.

    Args:
        header_of_all: see there.

    Attributes:
        title: its name, for messages.
        peer: the module that `open` and `writer` import; None where there is none.
        whole: whether one file holds a whole model, with no config.json beside it.
        types_alone: whether a file has no types but `types`.
        header_of_all: whether the header of every shard tells of the tensors of all.
    """

    title = "safetensors"
    whole = False
    types_alone = False
    peer: str | None = None

    def __init__(self, header_of_all: bool = False) -> None:
        self.header_of_all = header_of_all

    @property
    def said_by_config(self) -> frozenset[str]:
        """Names of stored tensors whose numbers a config.json says, which files of other kinds do without."""
        return frozenset()

    @property
    def types(self) -> Mapping[str, tuple[int, int]]:
        """Types of stored tensors beside those of safetensors: elements and bytes of a block."""
        return {}

    def holds(self, path: Path, start: bytes) -> bool:
        """Whether a file is of this kind.

        Args:
            path: of the file.
            start: its first 16 bytes, or fewer where it has no more.

        Returns:
            True where `open` is to read it.
        """
        return False  # what no other container holds is safetensors

    def open(self, path: Path) -> WeightFile:
        """Open a file.

        Args:
            path: of the file.

        Returns:
            The file, of which the header is read.

        Raises:
            ValueError: it is not valid.
        """
        from breccia.checkpoint.files.safetensors_file import SafetensorsFile

        return SafetensorsFile(path)

    def names(self, source: Any, left_out: Collection[str]) -> tuple[Any, list[str], list[str]]:
        """How files of this kind spell the names of a checkpoint's model.

        Args:
            source: the open checkpoint.
            left_out: names of tensors that are not written.

        Returns:
            What spells a name, None where names stay; names that there is no place for; notes for the report.
        """
        return None, [], []

    def made_anew(self, source: Any, names: Any) -> dict[str, Array]:
        """Tensors that files of this kind have beside those of the source, float32 by name.

        Args:
            source: the open checkpoint.
            names: as `names` gave it.

        Returns:
            The tensors; none where there are no such.
        """
        return {}

    def products(self, files: Sequence[Any]) -> Mapping[str, str]:
        """How the graph in files of this kind multiplies by its weights.

        Args:
            files: of the source, as `open` returns them.

        Returns:
            `breccia.bridges.contract.Place.product` by the names of logical tensors; none where there is no graph.
        """
        return {}

    def writer(self, path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
        """What writes a file, and what is to be noted of it.

        Args:
            path: where the complete file appears.
            output: what is written.

        Returns:
            A writer whose spans are the stored tensors; it goes on where an earlier one of the same plan was killed.

        Raises:
            ValueError: the kind of file has no place for a tensor.
        """
        from breccia.checkpoint.files.safetensors_file import SafetensorsWriter

        return SafetensorsWriter(path, output.plan, {"format": "pt"} | dict(output.metadata), resume=True), []

    def config_of(self, file: Any) -> dict[str, Any]:
        """config.json of the model in a file of this kind.

        Args:
            file: an open one.

        Returns:
            What transformers reads; empty where the files say nothing of it.

        Raises:
            ImportError: what knows it is not installed.
            ValueError: it is not known.
        """
        return {}

    @property
    def merging(self) -> Any:
        """The class of what merges an adapter into a file of this kind, which stays as it is but for the tensors that
        change; None: the merge is a conversion."""
        return None

    @property
    def adapter(self) -> Any:
        """What reads a LoRA adapter in a file of this kind, of a path and the checkpoint that it changes; None: such
        files hold none."""
        return None

    def scales_of_blocks(self, raw: Any, kind: str) -> Any:
        """What codes of blocks are multiplied by, where no ScaledTensor can hold them.

        Args:
            raw: bytes of whole blocks, uint8.
            kind: of them, a `Found`'s.

        Returns:
            float32, flat; None where that is not known.
        """
        return None

    def left_behind(self, files: Sequence[Any], destination: Path, folder: bool) -> str:
        """What of files of this kind has no place in safetensors files.

        Args:
            files: of the source, as `open` returns them.
            destination: what is written.
            folder: whether that is a directory, for which `config_of` and `write_companions` are asked.

        Returns:
            A note for the report, "" where nothing is lost.
        """
        return ""

    def write_companions(self, path: Path, folder: Path) -> str:
        """Write what a directory has beside weights and config.json, such as the tokenizer, of a file of this kind.

        Args:
            path: the file.
            folder: where to write.

        Returns:
            A note on what is missing, "" where nothing is.
        """
        return ""


SAFETENSORS = Container()
