# SPDX-License-Identifier: Apache-2.0
"""What errors of each column of a checkpoint's tensors count: a file of importance, by the names of the tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files import disk
from breccia.gguf.imatrix import read_imatrix
from breccia.gguf.models import ModelMap
from breccia.moments import Moments, load_moments

__all__ = ["Importance"]

Array = Any
_EXPERT = re.compile(r"(?P<block>.*)\.experts\.(?P<number>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Importance:
    """An importance matrix of llama.cpp (GGUF or .dat), or a file that `breccia.moments.save_moments` wrote.

    Args:
        path: the file.
        names: the model's names as GGUF spells them, if they are known; files of moments have the model's own.

    Raises:
        ValueError: the file is not valid.
    """

    def __init__(self, path: str | os.PathLike[str], names: ModelMap | None) -> None:
        self.path = path_of(path, "imatrix")
        self.names = names
        self._stamp = disk.stamp_of(self.path.stat())
        with open(self.path, "rb") as file:
            start = file.read(9)
        own = start[8:] == b"{"
        self._moments: Mapping[str, Moments] = load_moments(self.path) if own else read_imatrix(self.path)

    def __repr__(self) -> str:
        """What tells one file from another."""
        return f"Importance({str(self.path.resolve())!r}, {self._stamp})"

    def of(self, name: str, shape: Sequence[int]) -> Array | None:
        """The importance of a tensor's columns.

        Args:
            name: of the tensor in its checkpoint.
            shape: of the tensor, (…, N, K).

        Returns:
            float32 (K,), or (E, K) for stacked experts; None where the file has none.

        Raises:
            ValueError: the file has that of another number of columns.
        """
        expert = _EXPERT.fullmatch(name)
        found = self._find(name)
        if found is None and expert is not None:
            kind = _PROJECTIONS.get(expert["kind"], expert["kind"])
            found = self._find(f"{expert['block']}.switch_mlp.{kind}.weight")
            return None if found is None else self._of_expert(found, name, int(expert["number"]), shape[-1])
        if found is None:
            return None
        diag = found.diag
        if len(shape) == 3 and diag.size == shape[0] * shape[2]:
            diag = diag.reshape(shape[0], shape[2])
        if diag.shape != tuple(shape[-1:]) and diag.shape != (*shape[:-2], shape[-1]):
            raise ValueError(f"{self.path}: importance of {name} must have {shape[-1]} columns, it has {diag.shape}")
        return _means(diag, found.count)

    def _find(self, name: str) -> Moments | None:
        inside = None if self.names is None else self.names.inside(name)
        for known in (name, name.removesuffix(".weight"), inside):
            if known is not None and known in self._moments:
                return self._moments[known]
        return None

    def _of_expert(self, found: Moments, name: str, number: int, columns: int) -> Array:
        if found.diag.size % columns or number >= found.diag.size // columns:
            raise ValueError(
                f"{self.path}: importance of {name} must have {columns} columns, it has {found.diag.shape}"
            )
        diag = found.diag.reshape(-1, columns)
        own = _means(diag, found.count)[number]
        if (np.isfinite(own) & (own > 0)).any():
            return own
        return diag.mean(0, dtype=np.float64).astype(np.float32)  # one that the text never chose: that of all


def _means(diag: Array, count: Array) -> Array:
    """Of experts means, for sums of one that is chosen often say nothing of one that is chosen rarely."""
    if diag.ndim == 1 or np.ndim(count) == 0:
        return np.asarray(diag, np.float32)
    return (diag / np.maximum(count, 1)[..., None]).astype(np.float32)
