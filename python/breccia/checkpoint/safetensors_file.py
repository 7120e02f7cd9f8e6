# SPDX-License-Identifier: Apache-2.0
"""safetensors files: JSON and raw bytes, nothing else.

The reader maps the file and hands out views: opening a checkpoint of any size reads its header only.
Every number of the header is checked against the file before it is used. The writer lays the file out
from a plan, takes tensors in any order and any number of pieces, and the file appears under its name
only when it is complete and on disk.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from breccia.checkpoint.dtypes import DTYPES, nbytes_of, stored_name, typed
from breccia.checkpoint.planned_file import PlannedWriter

__all__ = ["Entry", "SafetensorsFile", "SafetensorsWriter", "parse_header", "save_arrays"]

MAX_HEADER = 100_000_000  # bytes; the format's own limit
_ALIGN = 8


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor. ``start`` and ``stop`` are file offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} must appear once, it appears twice")
        result[key] = value
    return result


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"the header must be JSON, it has {text}")


def parse_header(raw: bytes, data_start: int, file_size: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a header; its numbers checked against the size of the file.

    Raises:
        ValueError: anything is not as the format demands; the message names the file and the tensor.
    """
    try:
        text = raw.decode("utf-8")
        header = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: header must be a JSON object in UTF-8: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{where}: header must be a JSON object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{where}: __metadata__ must map strings to strings")
    size = file_size - data_start
    entries = {name: _entry(name, fields, data_start, size, where) for name, fields in header.items()}
    end = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            problem = "overlaps another tensor" if entry.start < end else "leaves a hole before it"
            raise ValueError(
                f"{where}: tensor {entry.name!r}: data_offsets must start at {end - data_start}, "
                f"got {entry.start - data_start}, which {problem}"
            )
        end = entry.stop
    if end != file_size:
        raise ValueError(f"{where}: file must have {end} bytes, as its header says, it has {file_size}")
    return entries, metadata


def _entry(name: str, fields: Any, data_start: int, size: int, where: str) -> Entry:
    def fail(what: str) -> NoReturn:
        raise ValueError(f"{where}: tensor {name!r}: {what}")

    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        fail("must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not _naturals(shape) or len(shape) > 64:
        fail(f"shape must be a list of at most 64 numbers from 0 to 2^63 - 1, got {str(shape)[:80]}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1] or offsets[1] > size:
        fail(f"data_offsets must be [begin, end] with begin <= end <= {size}, got {str(offsets)[:80]}")
    try:
        nbytes = nbytes_of(dtype, tuple(shape))
    except ValueError as error:
        fail(str(error))
    if nbytes != offsets[1] - offsets[0]:
        fail(f"data_offsets must span {nbytes} bytes for shape {shape} of {dtype}, they span {offsets[1] - offsets[0]}")
    return Entry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


class SafetensorsFile(Mapping[str, "np.ndarray[Any, Any]"]):
    """A mapping from names to read-only arrays that view the mapped file.

    Args:
        path: the file.

    Raises:
        ValueError: the file is not valid; see `parse_header`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise ValueError(f"{self.path}: file must have at least 8 bytes, it has {size}")
            (length,) = struct.unpack("<Q", head)
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(
                    f"{self.path}: header must fit in the file's {size} bytes and in {MAX_HEADER}, got {length}"
                )
            self.entries, self.metadata = parse_header(file.read(length), 8 + length, size, str(self.path))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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

    def close(self) -> None:
        """Let go of the mapping; it stays until the last array that views it is gone."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def entry(self, name: str) -> Entry:
        """What the header says of a tensor.

        Raises:
            KeyError: there is none of that name.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise KeyError(f"{self.path} has no tensor {name!r}") from None

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's bytes, flat."""
        entry = self.entry(name)
        return np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start)

    def release(self, name: str) -> None:
        """Tell the system that a tensor's pages are not needed any more, so that reading a checkpoint
        from end to end keeps the memory of one tensor."""
        entry = self.entry(name)
        page = mmap.PAGESIZE
        start = -(-entry.start // page) * page
        length = entry.stop // page * page - start
        if length > 0 and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def load(self, name: str, framework: str = "numpy") -> Any:
        """A tensor as an array of a framework: "numpy", "torch", "jax" or "mlx". NumPy's and torch's
        share the file's pages (torch's are private: writing to one changes no file).

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
        """A tensor as an array that shares the file's pages until it is written to; writing changes no file."""
        entry = self.entry(name)
        start = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if entry.nbytes == 0:
            return typed(np.empty(0, np.uint8), entry.dtype, entry.shape)
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), entry.stop - start, access=mmap.ACCESS_COPY, offset=start)
        return typed(np.frombuffer(pages, np.uint8, entry.nbytes, entry.start - start), entry.dtype, entry.shape)

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
    order = sorted(plan, key=lambda name: (-DTYPES[plan[name][0]].bits, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    spans: dict[str, tuple[int, int]] = {}
    for name in order:
        dtype, shape = plan[name]
        end = at + nbytes_of(dtype, tuple(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        spans[name] = (at, end)
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise ValueError(f"header must be at most {MAX_HEADER} bytes, got {len(text)}: write several files")
    base = 8 + len(text)
    entries = {
        name: Entry(name, plan[name][0], tuple(plan[name][1]), base + begin, base + end)
        for name, (begin, end) in spans.items()
    }
    return struct.pack("<Q", len(text)) + text, entries, base + at


def save_arrays(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a file. ``dtypes`` gives the header's type where an array's own does not say it
    (codes in uint8); types below 8 bits take packed bytes."""
    plan = {}
    for name, array in arrays.items():
        dtype = (dtypes or {}).get(name) or stored_name(array)
        shape = tuple(array.shape)
        if DTYPES[dtype].bits < 8:
            shape = (*shape[:-1], shape[-1] * 8 // DTYPES[dtype].bits)
        plan[name] = (dtype, shape)
    with SafetensorsWriter(path, plan, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
