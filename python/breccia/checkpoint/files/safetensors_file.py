# SPDX-License-Identifier: Apache-2.0
"""safetensors files: JSON and raw bytes, nothing else.

The reader maps the file and hands out views: opening a checkpoint of any size reads its header only.
Every number of the header is checked against the file before it is used. The writer lays the file out
from a plan, takes tensors in any order and any number of pieces, and the file appears under its name
only when it is complete and on disk.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.dtypes import DTYPES, little_endian, nbytes_of, stored_name, typed
from breccia.checkpoint.files.input_file import InputFile
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.safetensors_header import MAX_HEADER, Entry, parse_header
from breccia.scaled_tensor import ScaledTensor
from breccia.value.inputs import refuse_mask

__all__ = ["Entry", "SafetensorsFile", "SafetensorsWriter", "TensorFile", "parse_header", "save_arrays"]

_ALIGN = 8


def _other_format(start: bytes) -> str:
    """What a file that is not safetensors looks like by its first bytes, as the end of a message."""
    if start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1] <= 5):
        return ": it is a pickle, as torch.save writes; write it with safetensors.torch.save_file instead"
    return ""


class TensorFile:
    """An open file of named tensors.

    Attributes:
        path: of the file.
        file: its bytes.
        entries: what its header says of each tensor.
    """

    path: Path
    file: InputFile
    entries: dict[str, Entry]

    def entry(self, name: str) -> Entry:
        """What the header says of a tensor.

        Args:
            name: of the tensor.

        Returns:
            Its dtype, shape and place.

        Raises:
            KeyError: there is none of that name.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise KeyError(f"{self.path} has no tensor {name!r}") from None

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's bytes, flat: a view of the mapped file.

        Args:
            name: of the tensor.

        Returns:
            uint8.
        """
        entry = self.entry(name)
        return self.file.view(entry.start, entry.stop)

    def span(self, name: str, start: int, stop: int, mapped: bool = True) -> np.ndarray[Any, Any]:
        """Some of a tensor's bytes.

        Args:
            name: of the tensor.
            start: the first byte, from the tensor's own.
            stop: the byte after the last.
            mapped: whether the result may view the mapped file.

        Returns:
            uint8, flat.
        """
        begin = self.entry(name).start
        return (self.file.view if mapped else self.file.array)(begin + start, begin + stop)

    def release(self, name: str) -> None:
        """Tell the system that a tensor's pages are not needed any more, so that reading a checkpoint
        from end to end keeps the memory of one tensor.

        Args:
            name: of the tensor.
        """
        entry = self.entry(name)
        self.file.release(entry.start, entry.stop)

    def close(self) -> None:
        """Let go of the file; a mapping stays until the last array that views it is gone."""
        self.file.close()


class SafetensorsFile(TensorFile, Mapping[str, "np.ndarray[Any, Any]"]):
    """A mapping from names to read-only arrays that view the mapped file.

    Args:
        path: the file.

    Raises:
        ValueError: the file is not valid; see `parse_header`.
    """

    model: Any = None  # names are the model's own

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path, "path")
        self.file = InputFile(self.path)
        try:
            self.entries, self.metadata = self._read_header(self.file.size)
        except BaseException:
            self.file.close()
            raise

    def _read_header(self, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
        if size < 8:
            raise ValueError(f"{self.path}: file must have at least 8 bytes, it has {size}")
        (length,) = struct.unpack("<Q", self.file.read(0, 8))
        if length > min(MAX_HEADER, size - 8):
            if other := _other_format(self.file.read(0, 4)):
                raise ValueError(f"{self.path}: file must be in the format of safetensors or GGUF{other}")
            if length > MAX_HEADER:
                start = f"its first 8 bytes say that the header has {length} bytes"
                raise ValueError(f"{self.path}: file must be in the format of safetensors or GGUF: {start}")
            short = f"the file is truncated, it needs {8 + length} bytes or more and has {size}"
            raise ValueError(f"{self.path}: header must have {length} bytes, as the first 8 say: {short}")
        with self.file.scratch(8, length) as header:
            return parse_header(header if length else b"", 8 + length, size, str(self.path))

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        entry = self.entry(name)
        return typed(self.raw(name), entry.dtype, entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def left_out(self) -> frozenset[str]:
        """Names of tensors that a conversion to the file had no place for: there are none."""
        return frozenset()

    def described(self) -> list[Any]:
        """Logical tensors that the file itself tells of: none, bridges look for them."""
        return []

    def load(self, name: str, framework: str = "numpy") -> Any:
        """A tensor as an array of a framework.

        NumPy's and torch's share the file's pages (torch's are private: writing to one changes no file).

        Args:
            name: of the tensor.
            framework: "numpy", "torch", "jax" or "mlx".

        Returns:
            An array of the header's shape and dtype.

        Raises:
            ImportError: the framework is not installed.
            ValueError: there is no such framework.
        """
        match framework:
            case "numpy":
                return self[name]
            case "torch":
                return self._torch(name)
            case "jax":
                import jax.numpy as jnp

                return jnp.asarray(self[name])
            case "mlx":
                return self._mlx(name)
            case _:
                raise ValueError(f"framework must be 'numpy', 'torch', 'jax' or 'mlx', got {framework!r}")

    def _torch(self, name: str) -> Any:
        import torch

        entry = self.entry(name)
        row = DTYPES[entry.dtype]
        array = self.private(name)
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        if not row.torch:
            return flat.reshape(array.shape)
        itemsize = max(row.bits // 8, 1)
        if entry.start % itemsize:
            flat = flat.clone()  # torch views need aligned memory
        return flat.view(getattr(torch, row.torch)).reshape(array.shape)

    def private(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as an array that shares the file's pages until it is written to; writing changes no file.

        Args:
            name: of the tensor.

        Returns:
            An array of the header's shape and dtype.
        """
        entry = self.entry(name)
        return typed(self.file.private(entry.start, entry.stop), entry.dtype, entry.shape)

    def _mlx(self, name: str) -> Any:
        import mlx.core as mx

        array, entry = self[name], self.entry(name)
        if entry.dtype == "BF16":
            return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
        if array.dtype.kind == "V" or entry.dtype.startswith(("F8", "F6", "F4")):
            return mx.array(np.ascontiguousarray(array).view(np.uint8))  # MLX has no 8-bit floats
        return mx.array(array)


class SafetensorsWriter(PlannedWriter):
    """Writes a safetensors file from a plan.

    Args:
        path: where the complete file appears.
        plan: name → (dtype, shape) as in the header.
        metadata: the header's ``__metadata__``.
        resume: keep what an earlier, killed writer of the same plan left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        header, self.entries, size = _layout(plan, metadata or {})
        spans = {name: (entry.start, entry.stop) for name, entry in self.entries.items()}
        super().__init__(path, header, spans, size, resume=resume)


def _layout(
    plan: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry], int]:
    """Header bytes, entries, file size. Wide types come first, so that everything is aligned."""
    order = sorted([(-DTYPES[dtype].bits, name) for name, (dtype, _) in plan.items()])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for _, name in order:
        dtype, shape = plan[name]
        end = at + nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise ValueError(f"header must be at most {MAX_HEADER} bytes, got {len(text)}: write several files")
    base, entries = 8 + len(text), {}
    for _, name in order:
        begin, end = header[name]["data_offsets"]
        entries[name] = Entry(name, *plan[name], base + begin, base + end)
    return struct.pack("<Q", len(text)) + text, entries, base + at


def save_arrays(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write NumPy arrays to a safetensors file, which appears only when it is complete. `breccia.save` writes
    ScaledTensors, and arrays of every framework beside them.

    Args:
        arrays: name → array of any shape.
        path: the file; replaced if it is there.
        metadata: strings of the header.
        dtypes: name → the header's type where an array's own does not say it (codes in uint8); types below 8 bits take
            packed bytes.

    Raises:
        TypeError: ``arrays`` does not map names to NumPy arrays.

    Examples:
        >>> from breccia import checkpoint
        >>> checkpoint.save_arrays({"up_proj": np.ones((64, 256), np.float16)}, "model.safetensors")
        >>> breccia.load("model.safetensors")["up_proj"].dtype
        dtype('float16')
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must map names to arrays, got {type(arrays).__name__}")
    plan = {}
    for name, array in arrays.items():
        if not isinstance(name, str) or not hasattr(array, "dtype"):
            raise TypeError(f"arrays must map names to arrays, got {name!r}: {type(array).__name__}")
        if isinstance(array, ScaledTensor) or not isinstance(array.dtype, np.dtype):
            raise TypeError(
                f"arrays must map names to NumPy arrays, got {name!r}: {type(array).__name__}; breccia.save writes "
                f"ScaledTensors as they are, and arrays of every framework"
            )
        refuse_mask(array, f"arrays[{name!r}]")
        dtype = (dtypes or {}).get(name) or stored_name(array)
        shape = tuple(array.shape)
        if DTYPES[dtype].bits < 8:
            shape = (*shape[:-1], shape[-1] * 8 // DTYPES[dtype].bits)
        plan[name] = (dtype, shape)
    with SafetensorsWriter(path, plan, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, little_endian(np.asarray(array)))
