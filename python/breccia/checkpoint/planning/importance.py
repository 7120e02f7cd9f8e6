# SPDX-License-Identifier: Apache-2.0
"""What errors of each column of a checkpoint's tensors count: a file of importance, by the names of the tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia.bridges.parts import Found
from breccia.checkpoint.files.input_file import DataFile
from breccia.checkpoint.planning.layer_moments import LayerMoments
from breccia.checkpoint.reading.models import is_one_expert
from breccia.checkpoint.reading.source import Checkpoint
from breccia.gguf.imatrix import read_imatrix
from breccia.gguf.models import ModelMap
from breccia.moments import Moments, MomentsFile, load_moments

Array = Any


class Importance(DataFile):
    """An importance matrix of llama.cpp (GGUF or .dat), or a file that `breccia.moments.save_moments` wrote, which
    ``argument`` "moments" asks for. ``names``: the model's as GGUF spells them, if they are known; files of moments
    have the model's own.

    Attributes:
        of_model: what a file of moments says of the model that they were measured in; empty of another file.
        of_other_weights: whether that is known to have others than the source.
    """

    def __init__(self, path: str | os.PathLike[str], names: ModelMap | None, argument: str = "imatrix") -> None:
        super().__init__(path, argument)
        with open(self.path, "rb") as file:
            start = file.read(9)
        own = start[8:] == b"{"
        if not own and argument == "moments":
            try:
                read_imatrix(self.path)
                what = "an importance matrix: imatrix"
            except ValueError:
                what = "no such file"
            raise ValueError(f"moments must be a file that calibrate wrote, {self.path} is {what}")
        moments: Mapping[str, Moments] = load_moments(self.path) if own else read_imatrix(self.path)
        self._file = moments if isinstance(moments, MomentsFile) else None
        self._layers = LayerMoments(moments, names)
        self.of_model: dict[str, str] = {} if self._file is None else {"moments": str(self.path), **self._file.metadata}
        self.of_other_weights = False

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def of(self, name: str, shape: Sequence[int]) -> Array | None:
        """The importance of a tensor's columns, float32: (K,), or (E, K) for stacked experts; None where the file has
        none. Raises ValueError where the file has that of another number of columns."""
        found = self._layers.diagonals(name, shape)
        if found is None:
            return None
        if found.experts is not None:
            return _means(found)
        if not is_one_expert(name):
            return np.asarray(found.diag, np.float32)
        if (np.isfinite(found.diag) & (found.diag > 0)).any():
            return _means(found)
        pool = self._layers.pool(name, shape)  # for one that the text never chose
        return None if pool is None else _means(pool)

    def of_found(self, found: Found) -> Array | None:
        """As `of`, by what a tensor is called or is a half of."""
        return next((h for name in _names(found) if (h := self.of(name, found.shape)) is not None), None)

    def moments(self, found: Found, expert: int | None = None) -> Moments | None:
        """The moments of a matrix's input as they were measured, of one of its experts where it has some; None where
        the file has none."""
        each = (self._layers.of(name, found.shape, expert) for name in _names(found))
        return next((one for one in each if one is not None), None)

    def pool(self, found: Found) -> Moments | None:
        """The sum of those of all experts of a tensor's layer; None where it is no expert's."""
        each = (self._layers.pool(name, found.shape) for name in _names(found))
        return next((one for one in each if one is not None), None)

    def release(self) -> None:
        """Tell the system that what was read of a file of moments is not needed any more."""
        if self._file is not None:
            self._file.release()


def print_of(checkpoint: Checkpoint) -> str:
    """A digest of config.json, and of each stored tensor's name, form, and first and last kilobyte."""
    config = {
        key: said for key, said in checkpoint.config.items() if key not in ("_name_or_path", "transformers_version")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, entry in sorted(checkpoint.entries.items()):
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}".encode())
        for start in (0, max(0, entry.nbytes - 1024)):
            digest.update(checkpoint.span(name, start, min(start + 1024, entry.nbytes)).tobytes())
    return digest.hexdigest()


def _names(found: Found) -> list[str]:
    whole = found.origin.whole
    if whole is None or whole.shape[-1:] != found.shape[-1:]:  # GGUF turns one of the two
        return [found.name]
    return [found.name, whole.name]


def _means(moments: Moments) -> Array:
    """Of experts means, for sums of one that is chosen often say nothing of one that is chosen rarely."""
    return (moments.diag / np.maximum(moments.count, 1)[..., None]).astype(np.float32)
