# SPDX-License-Identifier: Apache-2.0
"""Second moments of what goes into the linear layers of a model, and the file that keeps them.

A layer y = x @ w.T with an error R in its weights is wrong by x @ R.T, whose expected square is tr(R H R.T) with
H = E[x.T x]. So H, or as much of it as memory allows, says which columns of a weight matter, and how errors of one
column can be made good in another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

__all__ = ["Moments", "MomentsFile", "load_moments", "save_moments"]

_INFIX = ".moments."
_SHARED = "breccia.moments.shared"  # of the metadata: JSON, name → the name whose moments it has


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the rows x (K numbers each) that went into one linear layer, or into each of E experts.

    Sums, not means, so that those of two runs add up: see ``+``. Every use of them is invariant under a factor but that
    of ``count``, which weighs experts against each other.

    Attributes:
        diag: Σ x², float32 (K,), or (E, K) for experts.
        count: how many rows were added, int64 () or (E,).
        block: Σ x.T x of runs of g neighbours, float32 (K / g, g, g) or (E, K / g, g, g); None where not taken.
        full: Σ x.T x, float32 (K, K), symmetric, or (E, K, K); None where not taken.
        amax: the largest |x|, float32 () or (E,); None where not taken.
        column_amax: the largest |x| of each column, float32 (K,) or (E, K); None where not taken.

    Raises:
        TypeError: an array has another dtype.
        ValueError: the shapes do not fit each other.
    """

    diag: np.ndarray[Any, Any]
    count: np.ndarray[Any, Any]
    block: np.ndarray[Any, Any] | None = None
    full: np.ndarray[Any, Any] | None = None
    amax: np.ndarray[Any, Any] | None = None
    column_amax: np.ndarray[Any, Any] | None = None

    def __post_init__(self) -> None:
        diag = np.asarray(self.diag)
        if diag.ndim not in (1, 2):
            raise ValueError(f"diag must be (K,) or (E, K), got shape {diag.shape}")
        experts, columns = diag.shape[:-1], diag.shape[-1]
        for name, value in self.arrays().items():
            wanted = np.int64 if name == "count" else np.float32
            if value.dtype != wanted:
                raise TypeError(f"{name} must be {np.dtype(wanted).name}, got {value.dtype}")
            shape: tuple[int, ...] = experts
            if name in ("diag", "column_amax"):
                shape = (*experts, columns)
            elif name == "full":
                shape = (*experts, columns, columns)
            elif name == "block":
                group = value.shape[-1] if value.ndim else 1
                shape = (*experts, columns // max(group, 1), group, group)
                if columns % max(group, 1):
                    raise ValueError(f"block must be of runs that divide K, {columns}, got shape {value.shape}")
            if value.shape != shape:
                raise ValueError(f"{name} must be {shape} for diag {diag.shape}, got shape {value.shape}")
            object.__setattr__(self, name, value)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What there is, by the names of the attributes.

        Returns:
            Name → array.
        """
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: np.asarray(value) for name, value in values if value is not None}

    @property
    def level(self) -> str:
        """The most that is there: "full", "block" or "diag"."""
        return "full" if self.full is not None else "block" if self.block is not None else "diag"

    @property
    def columns(self) -> int:
        """K."""
        return int(np.asarray(self.diag).shape[-1])

    @property
    def experts(self) -> int | None:
        """E; None for a layer without experts."""
        return int(self.diag.shape[0]) if self.diag.ndim == 2 else None

    def expert(self, index: int) -> Moments:
        """Those of one expert.

        Args:
            index: from 0 to E - 1.

        Returns:
            Moments without the axis of experts, which view these.

        Raises:
            ValueError: there is no such expert.
        """
        if self.experts is None or not 0 <= index < self.experts:
            raise ValueError(f"index must be that of one of {self.experts or 0} experts, got {index}")
        return Moments(**{name: value[index] for name, value in self.arrays().items()})

    def __add__(self, other: Moments) -> Moments:
        """Of the rows of both; what only one has is left out."""
        if not isinstance(other, Moments):
            return NotImplemented
        mine, others = self.arrays(), other.arrays()
        both = [name for name in mine if name in others]
        if unlike := [name for name in both if mine[name].shape != others[name].shape]:
            name = unlike[0]
            raise ValueError(f"{name} must have one shape to be added, got {mine[name].shape} and {others[name].shape}")
        added = {name: np.maximum if name.endswith("amax") else np.add for name in both}
        return Moments(**{name: np.asarray(add(mine[name], others[name])) for name, add in added.items()})


def save_moments(
    moments: Mapping[str, Moments], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write moments to a safetensors file: tensors ``NAME.moments.diag``, ``.count``, ``.block``, ``.full``, ``.amax``
    and ``.column_amax``.

    Args:
        moments: a linear layer's name in its checkpoint, without ``.weight`` → its moments. An object that stands under
            several names, as that of q, k and v does, is written once.
        path: the file; replaced if it is there.
        metadata: further strings of the header, such as hashes of model and text.

    Raises:
        TypeError: ``moments`` does not map names to Moments.
    """
    from breccia.checkpoint.files.safetensors_file import save_arrays

    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in moments.items():
        if not isinstance(name, str) or not isinstance(value, Moments):
            raise TypeError(f"moments must map names to Moments, got {name!r}: {type(value).__name__}")
        if (known := first.setdefault(id(value), name)) != name:
            shared[name] = known
        else:
            arrays |= {f"{name}{_INFIX}{part}": array for part, array in value.arrays().items()}
    save_arrays(arrays, path, {**(metadata or {}), _SHARED: json.dumps(shared)})


def load_moments(path: str | os.PathLike[str]) -> MomentsFile:
    """The moments of a file that `save_moments` wrote.

    Args:
        path: the file.

    Returns:
        A mapping from names to Moments, whose arrays view the file: none is read before it is used.

    Raises:
        ValueError: the file is not valid.
    """
    return MomentsFile(path)


class MomentsFile(Mapping[str, Moments]):
    """What `load_moments` returns. ``metadata``: the header's strings."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from breccia.checkpoint.files.safetensors_file import SafetensorsFile

        self._file = SafetensorsFile(path)
        self.path = self._file.path
        try:
            self._parts, self._shared = self._index()
        except BaseException:
            self._file.close()
            raise
        self.metadata = {key: text for key, text in self._file.metadata.items() if key != _SHARED}
        self._known: dict[str, Moments] = {}

    def _index(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        known = {field.name for field in fields(Moments)}
        parts: dict[str, list[str]] = {}
        for tensor in self._file:
            name, infix, part = tensor.rpartition(_INFIX)
            if not infix or part not in known:
                raise ValueError(
                    f"{self.path}: tensors must be called NAME{_INFIX}PART, with a part of "
                    f"{', '.join(sorted(known))}, got {tensor!r}"
                )
            parts.setdefault(name, []).append(part)
        for name, found in parts.items():
            if missing := {"diag", "count"} - set(found):
                raise ValueError(f"{self.path}: moments of {name} must have diag and count, it lacks {min(missing)}")
        try:
            shared = json.loads(self._file.metadata.get(_SHARED, "{}"))
        except (ValueError, RecursionError):
            shared = None
        if not isinstance(shared, dict) or not all(isinstance(of, str) and of in parts for of in shared.values()):
            raise ValueError(f"{self.path}: metadata {_SHARED!r} must map names to names of moments in the file")
        return parts, shared

    def __getitem__(self, name: str) -> Moments:
        own = self._shared.get(name, name)
        if own not in self._parts:
            raise KeyError(f"{self.path} has no moments of {name!r}")
        if own not in self._known:
            try:
                values = {part: self._file[f"{own}{_INFIX}{part}"] for part in self._parts[own]}
                for part in ("diag", "amax", "column_amax"):
                    if part in values and not (np.isfinite(values[part]) & (values[part] >= 0)).all():
                        raise ValueError(f"{part} must be finite and not negative, it is not")
                self._known[own] = Moments(**values)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.path}: moments of {own}: {error}") from None
        return self._known[own]

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield from (name for name in self._shared if name not in self._parts)

    def __len__(self) -> int:
        return len(self._parts) + sum(name not in self._parts for name in self._shared)

    def __enter__(self) -> MomentsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def release(self) -> None:
        """Tell the system that what was read so far is not needed any more: memory then holds what is read next."""
        for name, parts in self._parts.items():
            if name in self._known:
                for part in parts:
                    self._file.release(f"{name}{_INFIX}{part}")
        self._known.clear()

    def close(self) -> None:
        """Let go of the file; arrays that view it stay."""
        self._file.close()

    def __repr__(self) -> str:
        return f"breccia.moments.load_moments({str(self.path)!r}): moments of {len(self)} layers"
