# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: a safetensors file, a directory of shards with an index, or a GGUF file, and the
logical tensors in it, found from headers alone."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from breccia import bridges
from breccia.bridges import outside
from breccia.bridges.common import float32
from breccia.bridges.file_kinds import SAFETENSORS, Container, WeightFile
from breccia.bridges.fp8 import fp8_values
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Cut, Found, Origin, low_rank_of
from breccia.checkpoint.arguments import existing
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.bounded_json import loads
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.checkpoint.files.sums import Sums
from breccia.checkpoint.reading.account import unread_modules
from breccia.checkpoint.reading.experts import stack
from breccia.checkpoint.reading.finding import Finder, check_shape, stored_bytes
from breccia.checkpoint.reading.folder import Folder
from breccia.checkpoint.reading.logical import Logical, Plain, casts, in_order
from breccia.checkpoint.reading.naming import NAMELESS, naming
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes import Match, ModelScheme, Rule, of_checkpoint

Unmarked: TypeAlias = Literal["comfyui", "modelopt"]  # whose block scales have one shape and two orders
UNMARKED = get_args(Unmarked)
FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """An open checkpoint.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.
        unmarked: the quant_method, as config.json has it, of a file that says none: "comfyui" or "modelopt" of block
            scales that may be in either's order. Files that say one are read as they say.
        mapped: whether arrays view the mapped files. A process that reads a mapped file which another one cuts
            meanwhile is killed; where arrays are read into memory of their own that is an error.

    Attributes:
        path: what was opened.
        files: its weight files, in order.
        container: the kind of file that they are.
        entries: stored tensors by name.
        config: config.json, empty where there is none.
        found: logical tensors, in the order of the files.
        stamps: what tells whether a file that was read is still the same.
        sums: takes checksums of what is read, by the names of stored tensors; None where nobody wants them.

    Raises:
        ValueError: a file is not valid, or index and files disagree.
        FileNotFoundError: there is no such file.
    """

    container: Container = SAFETENSORS

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool = True, unmarked: Unmarked | None = None) -> None:
        if unmarked not in (None, *UNMARKED):
            raise ValueError(f"unmarked must be one of {', '.join(UNMARKED)}, or None, got {unmarked!r}")
        self.path, self.mapped, self.unmarked = existing(path, "path"), mapped, unmarked
        self.files: list[WeightFile] = []
        self.entries: dict[str, Entry] = {}
        self.home: dict[str, WeightFile] = {}
        self.sums: Sums | None = None
        try:
            with without_collection():
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.folder = Folder(self.path)
        self.config, self.index, self.stamps = self.folder.config, self.folder.index, self.folder.stamps
        for path in self.folder.paths:
            self.container = container_of(path)
            self.files.append(self.container.open(path))
        for file in self.files:
            if len(self.files) == 1:  # one mapping of all names is enough
                self.entries, self.home = file.entries, dict.fromkeys(file.entries, file)
                break
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise ValueError(f"{file.path}: tensor {name!r} must be in one file, {self.home[name].path} has it")
                self.entries[name], self.home[name] = entry, file
        self.folder.check_index(self.home)
        with naming(self.path, NAMELESS):
            self.found = self._find()

    def check_unchanged(self) -> None:
        """Raise ValueError where a file is not any more what was read.

        Raises:
            ValueError: the message names the file.
        """
        for file in self.files:
            file.file.check_unchanged()
        for path, stamp in self.stamps.items():
            if disk.stamp_of(path.stat()) != stamp:
                raise ValueError(f"{path}: must not change while it is read, it did")

    @functools.cached_property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of quantization.

        Raises:
            ValueError: it is not an object.
        """
        if said := self.folder.quantization():
            return said
        for file in self.files:
            try:
                said = loads(file.metadata.get("quantization_config", "{}"))
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict) and said:
                return said
        return {} if self.unmarked is None else {"quant_method": self.unmarked}

    @property
    def context(self) -> dict[str, Any]:
        """What bridges are told of config.json, see `FileFormat.find`."""
        return {
            "quantization_config": self.quantization,
            "quant_method": str(self.quantization.get("quant_method") or ""),
            "quantization": self.config.get("quantization"),
            "config": self.config,
        }

    @functools.cached_property
    def scheme(self) -> ModelScheme:
        """What the model is stored and computed in, see `breccia.load_scheme`.

        Raises:
            ValueError: its configuration is not of its method's form.
        """
        with naming(self.path, NAMELESS):
            scheme, unread = of_checkpoint(self), unread_modules(self)
            if not unread:
                return scheme
            label = f"{self.quantization.get('quant_method') or 'codes'}, not read here"
            rule = Rule(tuple(Match("name", module) for module in unread), label, None)
            return replace(scheme, rules=(rule, *scheme.rules))

    @property
    def scheme_or_none(self) -> ModelScheme | None:
        """`scheme`; None where what the checkpoint says is of no known form."""
        try:
            return self.scheme
        except ValueError:
            return None

    def _find(self) -> Logical:
        context = self.context
        finder = Finder(self.entries, context)
        finder.find(self.files)
        plain = Plain(self.entries, self.home, self.config, finder.troubles)
        if not finder.found and not finder.troubles and not context["quant_method"]:
            plain.cast = casts(self.entries)
        return in_order(finder.found, finder.taken, plain)

    def nbytes(self, found: Found) -> int:
        """Stored bytes of a logical tensor.

        Args:
            found: one of ``found``.

        Returns:
            Their number, all parts together.
        """
        return stored_bytes(found, self.entries)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A stored tensor: a view of its file where that is mapped.

        Args:
            name: of the stored tensor.

        Returns:
            An array of the header's shape and dtype.
        """
        entry = self.entries[name]
        return typed(self.span(name, 0, entry.nbytes), entry.dtype, entry.shape)

    def span(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Some of a stored tensor's bytes.

        Args:
            name: of the stored tensor.
            start: the first byte, from the tensor's own.
            stop: the byte after the last.

        Returns:
            uint8, flat.
        """
        found = self.home[name].span(name, start, stop, self.mapped)
        if self.sums is not None:
            self.sums.add(name, start, found)
        return found

    def load(self, found: Found) -> ScaledTensor | OutsideTensor | np.ndarray[Any, Any]:
        """A logical tensor: a ScaledTensor that views the files where they are mapped and its format allows.

        Args:
            found: one of ``found``.

        Returns:
            A ScaledTensor; an OutsideTensor or a float array where the values have no such form; an array of the
            header's dtype where the tensor is plain.

        Raises:
            ValueError: its bytes do not fit; the message names the tensor.
        """
        origin = found.origin
        if origin.cut is not None:
            return self._of_two(found, origin.cut)
        if origin.members:
            batch: ScaledTensor | np.ndarray[Any, Any] = stack([self.load(one) for one in origin.members])
            return batch
        with naming(self.path, found.name), np.errstate(over="ignore", invalid="ignore"):
            if found.format == "plain":
                array = self._in_order(found, self._one(found, found.parts["weight"]))
                if origin.numbers:
                    array = fp8_values(array, origin.numbers)
                if origin.offset:
                    array = float32(array) - np.float32(origin.offset)
                tensor: Any = np.swapaxes(array, -1, -2) if origin.turned else array
            else:
                tensor = assemble(found, {role: self._one(found, name) for role, name in found.parts.items()})
                if origin.turned:
                    assert not isinstance(tensor, OutsideTensor)
                    tensor = tensor.mT if isinstance(tensor, ScaledTensor) else np.swapaxes(tensor, -1, -2)
            if origin.factor or origin.low_rank:
                tensor = self._with_branches(tensor, origin)
            for one in origin.rotations:
                tensor = one.undone(outside.values(tensor), self.array)
            loaded: ScaledTensor | OutsideTensor | np.ndarray[Any, Any] = tensor
            return loaded

    def _of_two(self, found: Found, cut: Cut) -> ScaledTensor | np.ndarray[Any, Any]:
        """A half of a tensor that GGUF keeps as two, or the whole of both halves."""
        with naming(self.path, found.name), np.errstate(over="ignore", invalid="ignore"):
            if found.origin.whole is not None:
                half: ScaledTensor | np.ndarray[Any, Any] = cut.of(self.load(found.origin.whole))
                return half
            whole: ScaledTensor | np.ndarray[Any, Any] = cut.together([self.load(one) for one in found.origin.members])
            return whole

    def folded(self, found: Found, factors: bool = True) -> Found:
        """The weight of a layer beside which a low-rank branch runs, with that added; and of one whose inputs are
        scaled first, with that scale in its columns; others as they are.

        Args:
            found: one of ``found``.
            factors: whether scales of inputs are to be put into weights, too.

        Returns:
            The tensor to convert.
        """
        if found.format == "plain" or len(found.shape) != 2:
            return found
        module = found.name.removesuffix("weight")
        name = module + "pre_quant_scale" if factors and module + "pre_quant_scale" in self.entries else ""
        branch = low_rank_of(module, self.entries)
        if not name and not branch:
            return found
        return replace(found, recipe=None, layout=None, origin=replace(found.origin, factor=name, low_rank=branch))

    def _with_branches(self, tensor: Any, origin: Origin) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = tensor.dequantize() if hasattr(tensor, "dequantize") else float32(tensor)
        if origin.low_rank:
            down, up = (float32(self.array(name)) for name in origin.low_rank)
            if down.ndim != 2 or up.ndim != 2 or (len(up), down.shape[-1]) != values.shape or len(down) != up.shape[-1]:
                raise ValueError(
                    f"{origin.low_rank[0]!r} and {origin.low_rank[1]!r} must be (rank, {values.shape[1]}) and "
                    f"({values.shape[0]}, rank), got shapes {down.shape} and {up.shape}"
                )
            values = values + up @ down
        if not origin.factor:
            return values
        factor = self.array(origin.factor)
        if factor.size != values.shape[-1]:
            raise ValueError(f"pre_quant_scale must have {values.shape[-1]} entries, got shape {factor.shape}")
        return values * float32(factor).reshape(-1)

    def raw(self, found: Found) -> np.ndarray[Any, Any]:
        """A plain tensor's bytes, flat.

        Args:
            found: one of ``found``.

        Returns:
            uint8, flat.
        """
        if found.origin.is_made:
            return np.ascontiguousarray(self.load(found)).reshape(-1).view(np.uint8)
        name = found.parts["weight"]
        if found.origin.row_order is None:
            return self.span(name, 0, self.entries[name].nbytes)
        return np.ascontiguousarray(self._in_order(found, self.array(name))).reshape(-1).view(np.uint8)

    def blocks(self, found: Found) -> np.ndarray[Any, Any]:
        """The bytes of a tensor of blocks, flat, rows in the order of the model's own tensor.

        Args:
            found: one of ``found``, of a format that has blocks.

        Returns:
            uint8, flat.
        """
        if found.origin.members:
            return np.concatenate([self.blocks(one) for one in found.origin.members])
        array = self._in_order(found, self._one(found, found.parts["blocks"]))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _one(self, found: Found, name: str) -> np.ndarray[Any, Any]:
        """A stored tensor, or what is one expert's of it."""
        array, expert = self.array(name), found.origin.expert
        return array if expert is None or array.size == 1 else array[expert]  # one global scale is that of all

    def _in_order(self, found: Found, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        order = found.origin.row_order
        return array if order is None else array[np.argsort(order)]

    @property
    def left_out(self) -> set[str]:
        """Tensors that a conversion to these files had no place for."""
        return {name for file in self.files for name in file.left_out}

    def refined(self, found: Found) -> Found:
        """What only small tensors tell, such as whether zero points are all the same, looked at.

        Args:
            found: one of ``found``.

        Returns:
            The tensor with all that is known.
        """
        if found.format == "plain" or found.origin.members or found.origin.expert is not None:
            return found
        with naming(self.path, found.name), np.errstate(over="ignore", invalid="ignore"):
            one = bridges.bridge(found.format).refine(found, self.array)
            if one is not found:
                check_shape(one, self.entries)
        return one

    def release(self, found: Found) -> None:
        """Let go of a tensor's pages.

        Args:
            found: one of ``found``.
        """
        for name in set(found.parts.values()) if self.mapped else ():
            self.home[name].release(name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            file.close()


def assemble(
    found: Found, parts: dict[str, np.ndarray[Any, Any]]
) -> ScaledTensor | OutsideTensor | np.ndarray[Any, Any]:
    """A logical tensor of its stored ones, by role. Raises ValueError where they do not fit."""
    if list(found.parts.values()).count(found.parts.get("global_scale", "")) > 1:
        del parts["global_scale"]  # a second name for a role of the format's own
    return bridges.bridge(found.format).open(parts, found)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """While many objects are made that all stay, looking through them for garbage is half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def container_of(path: Path) -> Container:
    """The kind that a file is of."""
    with disk.open_regular(path) as fd, disk.reading(path):
        start = os.pread(fd, 16, 0)
    return next((one for one in bridges.containers() if one.holds(path, start)), SAFETENSORS)


def is_float(found: Found) -> bool:
    """Whether a plain tensor holds numbers: of high precision, or FP8 that was cast without a scale."""
    return found.format == "plain" and (found.dtype in FLOATS or bool(found.origin.numbers))
