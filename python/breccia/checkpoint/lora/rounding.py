# SPDX-License-Identifier: Apache-2.0
"""How weights with an adapter's change are rounded."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from breccia.bridges.common import float32
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.input_file import sha256_of
from breccia.checkpoint.lora.adapters import Change
from breccia.checkpoint.lora.feedback import Feed, OfMoments, OfRows, round_change
from breccia.moments import MomentsFile
from breccia.scaled_tensor import ScaledTensor

__all__ = ["MergeRounding", "seed_of"]

How: TypeAlias = Literal["nearest", "stochastic", "feedback"]


def seed_of(seed: int, name: str) -> int:
    """The seed of what is drawn for one tensor, by its name, of that of all."""
    return (seed + zlib.crc32(name.encode())) & 0x7FFFFFFF


@dataclass(frozen=True)
class MergeRounding:
    """What `merge_lora` was asked for.

    Attributes:
        rounding: "nearest"; "stochastic", by chance; or "feedback", later columns make good, too, what one loses.
        seed: of what is drawn; None for "nearest".
        moments: of "feedback", a file of `breccia.calibrate`; None: by the rows of the adapter's matrix A.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: it has a value that it cannot have, or does not go with the others.
    """

    rounding: str
    seed: int | None
    moments: MomentsFile | None

    @classmethod
    def of(cls, rounding: str | None, seed: int | None, moments: str | os.PathLike[str] | None) -> MergeRounding:
        """The same of arguments; a seed alone asks for "stochastic"."""
        how = ("nearest" if seed is None else "stochastic") if rounding is None else rounding
        if how not in get_args(How):
            raise ValueError(f"rounding must be one of {', '.join(get_args(How))}, or None, got {rounding!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, got {seed!r}")
        if seed is not None and how == "nearest":
            raise ValueError(f"seed must be left out with rounding nearest, which draws nothing, got {seed!r}")
        if moments is not None and how != "feedback":
            raise ValueError(f"moments must be left out except with rounding feedback, got them with {how}")
        file = None if moments is None else MomentsFile(path_of(moments, "moments"))
        return cls(how, None if how == "nearest" else seed or 0, file)

    @property
    def said(self) -> list[Any]:
        """What tells one way to round from another."""
        if self.moments is None:
            return [self.rounding, self.seed]
        return [self.rounding, self.seed, sha256_of(self.moments.path)]

    def options(self, name: str) -> dict[str, Any]:
        """Those of `breccia.cast` for one tensor."""
        return {"rounding": "stochastic", "seed": self._seed_of(name)} if self.rounding == "stochastic" else {}

    def _seed_of(self, name: str) -> int:
        return seed_of(self.seed or 0, name)

    def has_moments(self, name: str) -> bool:
        """Whether the file has moments of what a weight multiplies."""
        return self.moments is not None and name.removesuffix(".weight") in self.moments

    def again(self, name: str, old: Any, values: Any, nearest: ScaledTensor, change: Change) -> ScaledTensor:
        """The second pass over one tensor, of its codes before, its values with the change, float32, and these rounded
        to nearest: the last, or what "feedback" gives. Raises ValueError where the moments are not of the weight's
        columns, or not valid."""
        if (
            self.rounding != "feedback"
            or change.a is None
            or not isinstance(old, ScaledTensor)
            or len(values.shape) != 2
        ):
            return nearest
        if not np.isfinite(values).all():
            return nearest
        return round_change(old, values, nearest, self._feed(name, change, values.shape[1]), self._seed_of(name))

    def _feed(self, name: str, change: Change, columns: int) -> Feed:
        rows = float32(change.b).T if change.turned else float32(change.a)
        if not self.has_moments(name):
            return OfRows(rows)
        assert self.moments is not None
        found = self.moments[name.removesuffix(".weight")]
        if found.experts is not None or found.columns != columns:
            raise ValueError(f"moments of {name!r} must be of {columns} columns, they are of {found.diag.shape}")
        return OfMoments(found, rows)

    def close(self) -> None:
        """Let go of the file."""
        if self.moments is not None:
            self.moments.close()
