# SPDX-License-Identifier: Apache-2.0
"""Which moments of a file are those of a checkpoint's tensor: by its name, and those of experts whether they stand one
by one or all of a layer together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from breccia.checkpoint.reading.models import other_names
from breccia.gguf.models import ModelMap
from breccia.moments import Moments

_ONE = re.compile(r"(?P<block>.*)\.experts\.(?P<number>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)(\.weight)?")
_ALL = re.compile(r"(?P<block>.*)\.(switch_mlp|experts)\.(?P<kind>gate_proj|up_proj|down_proj|gate_up_proj)(\.weight)?")
_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BORROWED = 0.25  # rows a column that an expert takes from the mean of all


class LayerMoments:
    """Moments by the names of a checkpoint's tensors; those of GGUF (``names``, if they are known) and of the
    parameters of fused experts are understood. Messages call them ``what``; ``used`` are those that belong to a tensor
    that was asked for."""

    def __init__(self, moments: Mapping[str, Moments], names: ModelMap | None = None, what: str = "importance") -> None:
        self._moments, self._names, self._what = moments, names, what
        self._apart: dict[tuple[str, str], dict[int, str]] | None = None
        self._pools: dict[str, Moments] = {}
        self.used: set[str] = set()

    def of(self, name: str, shape: Sequence[int], expert: int | None = None) -> Moments | None:
        """The moments of the input of a matrix, of which (E, N, K) has E; None where there are none. Raises ValueError
        where there are some, of another number of columns or experts."""
        if expert is None:
            return self._of_one(name, shape[-1])
        if (stack := self._of_all(name, shape)) is not None:
            return stack if stack.experts is None else stack.expert(expert)
        apart = self._apart_from(name, shape)
        return None if apart is None else self._fitting(self._take(apart[expert]), name, shape[-1:])

    def diagonals(self, name: str, shape: Sequence[int]) -> Moments | None:
        """``diag`` and ``count`` of a tensor (…, N, K), of each of its experts or one for all; None where there are
        none. Raises ValueError where there are some, of another number of columns or experts."""
        if len(shape) < 3:
            return self._of_one(name, shape[-1])
        if (stack := self._of_all(name, shape)) is not None:
            return stack
        apart = self._apart_from(name, shape)
        if apart is None:
            return None
        each = [self._fitting(self._take(key), name, shape[-1:]) for key in apart]
        return Moments(np.stack([one.diag for one in each]), np.stack([one.count for one in each]))

    def _of_one(self, name: str, columns: int) -> Moments | None:
        if (key := self._known(self._spelled(name))) is not None:
            return self._fitting(self._take(key), name, (columns,))
        one = _ONE.fullmatch(name)
        stack = None if one is None else self._stack(one, name, columns)
        if stack is None or one is None or stack.experts is None:
            return stack
        if (number := int(one["number"])) >= stack.experts:
            raise ValueError(f"{self._what} of {name} must be of more than {number} experts, it has {stack.diag.shape}")
        return stack.expert(number)

    def _of_all(self, name: str, shape: Sequence[int]) -> Moments | None:
        if (key := self._known(self._spelled(name))) is not None:
            return self._fitting(self._take(key), name, (shape[0], shape[-1]))
        every = _ALL.fullmatch(name)
        stack = None if every is None else self._stack(every, name, shape[-1])
        return None if stack is None else self._fitting(stack, name, (shape[0], shape[-1]))

    def _apart_from(self, name: str, shape: Sequence[int]) -> list[str] | None:
        """What the experts of a tensor have as moments one by one, where all of them do."""
        every = _ALL.fullmatch(name)
        siblings = {} if every is None else self._siblings(every)
        return [siblings[i] for i in range(shape[0])] if sorted(siblings) == list(range(shape[0])) else None

    def pool(self, name: str, shape: Sequence[int]) -> Moments | None:
        """The sum of the moments of all experts of a tensor's layer; None where it is no expert's."""
        match = _ONE.fullmatch(name) or (_ALL.fullmatch(name) if len(shape) == 3 else None)
        if match is None:
            return None
        key = f"{match['block']} {_kind(match)}"
        if key not in self._pools:
            stack = self._stack(match, name, shape[-1])
            if stack is not None and stack.experts is not None:
                parts = [stack.expert(i) for i in range(stack.experts)]
            else:
                parts = [self._moments[one] for one in self._siblings(match).values()]
            if not parts:
                return None
            self._pools[key] = _sum(parts)
        return self._pools[key]

    def _take(self, key: str) -> Moments:
        self.used.add(key)
        return self._moments[key]

    def _known(self, spelled: Iterator[str]) -> str | None:
        return next((key for key in spelled if key in self._moments), None)

    def _spelled(self, name: str) -> Iterator[str]:
        """What a tensor's moments may be called."""
        bare = name.removesuffix(".weight")
        yield name
        yield bare
        inside = None if self._names is None else self._names.inside(name)
        if inside is not None:
            yield inside
        yield from other_names({bare})

    def _stack(self, match: re.Match[str], name: str, columns: int) -> Moments | None:
        """Those of all experts of a tensor's layer, where they stand together."""
        key = self._known(self._together(match["block"], _kind(match)))
        return None if key is None else self._fitting(self._take(key), name, (0, columns))

    def _together(self, block: str, kind: str) -> Iterator[str]:
        """What the moments of all experts of a layer may be called."""
        fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
        for place in _places(block):
            for part in ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,):
                yield from self._spelled(f"{place}.switch_mlp.{part}.weight")
            yield from self._spelled(f"{place}.experts.{fused}")
            yield from self._spelled(f"{place}.experts.{kind}")

    def _siblings(self, match: re.Match[str]) -> dict[int, str]:
        """The experts of a tensor's layer that have moments of their own, by their numbers."""
        if self._apart is None:
            self._apart = {}
            for key in self._moments:
                if (one := _ONE.fullmatch(key)) is not None:
                    self._apart.setdefault((one["block"], _kind(one)), {})[int(one["number"])] = key
        kind = "gate_proj" if _kind(match) == "gate_up_proj" else _kind(match)
        found = (self._apart.get((place, kind)) for place in _places(match["block"]))
        return next((one for one in found if one is not None), {})

    def _fitting(self, found: Moments, name: str, shape: Sequence[int]) -> Moments:
        """Moments of shape (K,), or (E, K), where they may be one for all; E is 0 where any number will do. Of a file
        of means they may be one expert after the other. Raises ValueError where they have another."""
        columns, experts = shape[-1], shape[0] if len(shape) == 2 else None
        each, rest = divmod(found.diag.size, columns)
        if experts is not None and found.diag.ndim == 1 and not rest and each > 1 and experts in (0, each):
            found = Moments(found.diag.reshape(each, columns), np.ones(each, np.int64))
        if found.columns != columns:
            raise ValueError(f"{self._what} of {name} must have {columns} columns, it has {found.diag.shape}")
        if found.experts is not None and experts not in (0, found.experts):
            raise ValueError(f"{self._what} of {name} must be of {experts or 'no'} experts, it has {found.diag.shape}")
        return found


def experts_of(name: str, shape: Sequence[int]) -> str | None:
    """The layer that a tensor is of an expert of, or of all; None where it is of no expert."""
    match = _ONE.fullmatch(name) or (_ALL.fullmatch(name) if len(shape) == 3 else None)
    return None if match is None else match["block"]


def smoothed(own: Moments, pool: Moments) -> Moments:
    """The moments of one expert, and K / 4 rows of the mean of all of its layer: what few tokens reached leans on what
    many did, and what none reached has the moments of all."""
    count = int(pool.count)
    if not count:
        return own
    rows = max(round(_BORROWED * own.columns), 1)
    share = np.float32(rows / count)
    mine, others = own.arrays(), pool.arrays()
    both = [part for part in ("diag", "block", "full") if part in mine and part in others]
    parts: dict[str, Any] = {part: mine[part] + share * others[part] for part in both}
    return Moments(count=np.asarray(int(own.count) + rows, np.int64), **parts)


def energy(rows: np.ndarray[Any, Any], moments: Moments) -> float:
    """tr RHRᵀ of rows R (N, K), with products in their type. Raises ValueError where the moments are not finite."""
    if moments.full is not None:
        product = rows @ moments.full.astype(rows.dtype, copy=False)
    elif moments.block is not None:
        runs = rows.reshape(len(rows), *moments.block.shape[:2]).transpose(1, 0, 2)
        rows, product = runs, runs @ moments.block.astype(rows.dtype, copy=False)
    else:
        product = rows * moments.diag.astype(rows.dtype, copy=False)
    result = float(np.sum(product * rows, dtype=np.float64))
    if not math.isfinite(result) and not all(np.isfinite(part).all() for part in moments.arrays().values()):
        raise ValueError("moments must be finite, they hold NaN or infinity")
    return result


def _kind(match: re.Match[str]) -> str:
    return _KINDS.get(match["kind"], match["kind"])


def _sum(parts: Sequence[Moments]) -> Moments:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total


def _places(block: str) -> list[str]:
    """What a layer of experts is called in files and in transformers' models."""
    return list(dict.fromkeys((block, block.replace("block_sparse_moe", "mlp"))))
