# SPDX-License-Identifier: Apache-2.0
"""Rounding that keeps a small change of codes: by chance, and what a column loses is made good in those after it.

A change of less than half a step of the grid vanishes where each weight is rounded to nearest. By chance it is kept on
average, in every column, and the price is noise. Here the remainder e = w - q of a column is also fed to those still to
be rounded, so that what the layer computes has less of the noise, by the squares Σ (e @ x)² that second moments H of
the inputs x give, as GPTQ does. Without moments, H = λ I + Aᵀ A with A an orthonormal basis of the rows of the change:
of a LoRA adapter B @ A, the inputs that it looks at.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from breccia import _core, formats, verbs
from breccia.bridges.common import float32
from breccia.bridges.packing import pack_nibbles
from breccia.calibration.error_feedback import matrix_of_moments
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.input_file import sha256_of
from breccia.checkpoint.lora.adapters import Change
from breccia.checkpoint.workers import runs
from breccia.moments import MomentsFile
from breccia.scaled_tensor import ScaledTensor

Array = Any
_BATCH = 64  # columns whose remainders feed each other before a product feeds the rest
_DAMP = 0.05  # of moments: added to the diagonal, in its mean
_REST = 0.03  # λ: what a remainder counts by itself, beside 1 in the directions of the change: benchmarks/lora_merge.py


class Feed(Protocol):
    """How much of the remainder of a column is added to each column after it: S (K, K), of i to c, i < c."""

    def earlier(self, remainders: Array, start: int, stop: int) -> Array:
        """What columns before ``start`` add to those from ``start`` to ``stop``, (N, stop - start)."""

    def inside(self, start: int, stop: int) -> Array:
        """S of these columns, (stop - start, stop - start)."""


def _upper_factor(moments: Array) -> Array | None:
    """V of moments = V Vᵀ, upper triangular: Cholesky's of the opposite order; None where they are not positive
    definite."""
    try:
        return np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        return None


class OfMoments:
    """By second moments of the inputs (``moments`` of one matrix, as `breccia.gptq` takes them), in their mean, and by
    the rows (r, K) of which a change is a combination. A remainder counts ``rest`` by itself, beside 1 in the
    directions of the rows. Raises ValueError where moments are not finite, or not positive definite with any
    damping."""

    def __init__(self, moments: Any, rows: Array | None = None, rest: float = _REST) -> None:
        full = matrix_of_moments(moments).astype(np.float64)
        if not np.isfinite(full).all():
            raise ValueError("moments must be finite, they hold NaN or infinity")
        mean = float(np.diag(full).mean()) or 1.0
        if rows is not None:
            basis = _basis(rows)
            full = full + mean / rest * (basis @ basis.T)
        damp = _DAMP
        while (upper := _upper_factor(full + damp * mean * np.eye(len(full)))) is None:
            if damp >= 1:
                raise ValueError("moments must be finite and not negative on any direction, they are")
            damp = _core.more_damping(damp)
        self._share = (upper / np.diag(upper)).astype(np.float32)

    def earlier(self, remainders: Array, start: int, stop: int) -> Array:
        """See `Feed`."""
        return remainders[:, :start] @ self._share[:start, start:stop]

    def inside(self, start: int, stop: int) -> Array:
        """See `Feed`."""
        return self._share[start:stop, start:stop]


class OfRows:
    """By the rows (r, K) of which a change is a combination. A remainder counts ``rest``, λ, by itself, beside 1 in the
    directions of the rows."""

    def __init__(self, rows: Array, rest: float = _REST) -> None:
        basis = _basis(rows)
        # S_ic = a_i · y_c with (λ I + Σ_{j ≥ c} a_j a_jᵀ) y_c = a_c
        left = np.cumsum((basis[:, :, None] * basis[:, None, :])[::-1], axis=0)[::-1]
        left = left + rest * np.eye(basis.shape[1])
        solved = np.linalg.solve(left, basis[:, :, None])[..., 0]
        self._basis, self._solved = basis.astype(np.float32), solved.astype(np.float32)

    def earlier(self, remainders: Array, start: int, stop: int) -> Array:
        """See `Feed`."""
        return (remainders[:, :start] @ self._basis[:start]) @ self._solved[start:stop].T

    def inside(self, start: int, stop: int) -> Array:
        """See `Feed`."""
        return self._basis[start:stop] @ self._solved[start:stop].T


def _basis(rows: Array) -> Array:
    """An orthonormal basis of rows (r, K), (K, r)."""
    return np.linalg.qr(np.asarray(rows, np.float64).T)[0]


def round_change(old: ScaledTensor, values: Array, nearest: ScaledTensor, feed: Feed, seed: int = 0) -> ScaledTensor:
    """Codes (N, K) of values that are those of ``old`` with a small change, in the form of ``nearest``: the values
    rounded to nearest. A block has the scale (and zero point) of ``old`` where that reaches its values, so that what
    does not change stays on its grid, else that of ``nearest``. Raises ValueError where groups of ``nearest`` have
    exponents: their grids are not even."""
    if nearest.exponents is not None:
        raise ValueError(f"rounding 'feedback' needs a recipe without exponents, got {type(nearest.recipe).__name__}")
    form = _kept_scales(old, values, nearest)
    chosen = np.empty(values.shape, np.uint8)
    for rows in _pieces(form):
        drawn = np.random.default_rng([seed, rows.start]).random((values.shape[1], rows.stop - rows.start), np.float32)
        chosen[rows] = _rounded(form[rows], values[rows], feed, drawn)
    return _with_codes(form, chosen)


def _rounded(form: ScaledTensor, values: Array, feed: Feed, drawn: Array) -> Array:
    """Codes (n, K) of some rows, on the grid of ``form``."""
    step, zero = _grid(form)
    numbers, codes = _codes(form)
    remainders = np.zeros(values.shape, np.float32)
    chosen = np.empty(values.shape, np.uint8)
    for start in range(0, values.shape[1], _BATCH):
        stop = min(start + _BATCH, values.shape[1])
        wanted = values[:, start:stop] + feed.earlier(remainders, start, stop)
        inside = feed.inside(start, stop)
        for c in range(start, stop):
            goal = wanted[:, c - start] + remainders[:, start:c] @ inside[: c - start, c - start]
            ratio = np.divide(goal - zero[:, c], step[:, c], out=np.zeros_like(goal), where=step[:, c] != 0)
            below = np.clip(np.searchsorted(numbers, ratio, side="right") - 1, 0, len(numbers) - 2)
            share = (ratio - numbers[below]) / (numbers[below + 1] - numbers[below])
            index = below + (drawn[c] < share)
            chosen[:, c] = codes[index]
            remainders[:, c] = values[:, c] - (zero[:, c] + step[:, c] * numbers[index])
    return chosen


def _pieces(form: ScaledTensor) -> Iterator[slice]:
    """Runs of rows, whole blocks each."""
    tall = max(form.layout.block.rows, 1)
    return runs(form.shape[0], max(1024 // tall, 1) * tall)


def _kept_scales(old: ScaledTensor, values: Array, nearest: ScaledTensor) -> ScaledTensor:
    """``nearest`` with the scales and zero points of ``old`` in blocks whose values these reach."""
    if old.recipe.element != nearest.recipe.element or old.layout != nearest.layout:
        return nearest
    if not _same(old.global_scale, nearest.global_scale) or (old.zero_point is None) != (nearest.zero_point is None):
        return nearest
    numbers = _codes(old)[0]
    # What is past an end by less than half of its last step is nearest to that end on a longer grid, too.
    low, high = (1.5 * numbers[end] - 0.5 * numbers[inner] for end, inner in ((0, 1), (-1, -2)))
    fits = np.empty(values.shape, bool)
    for rows in _pieces(old):
        step, zero = _grid(old[rows])
        fits[rows] = (values[rows] >= zero + step * low) & (values[rows] <= zero + step * high)
    reached = _of_blocks(fits, old.layout)

    def chosen(kept: Any, anew: Any) -> Any:
        return None if kept is None else np.where(reached.reshape(np.shape(kept)), kept, anew).astype(kept.dtype)

    scale, zeros = chosen(old.scale, nearest.scale), chosen(old.zero_point, nearest.zero_point)
    return nearest._with(scale=scale, zero_point=zeros)


def _same(one: Any, other: Any) -> bool:
    return (one is None) == (other is None) and (one is None or np.array_equal(one, other))


def _of_blocks(holds: Array, layout: Any) -> Array:
    """Whether something holds of all elements of each block, a row of blocks after another."""
    rows, columns = holds.shape
    block = layout.block
    tall, wide = block.rows or rows, block.columns or columns
    padded = np.pad(holds, ((0, -rows % tall), (0, -columns % wide)), constant_values=True)
    down, across = padded.shape[0] // tall, padded.shape[1] // wide
    every: Array = padded.reshape(down, tall, across, wide).all(axis=(1, 3))
    return every


def _codes(scaled: ScaledTensor) -> tuple[Array, Array]:
    """The finite numbers of an element format, rising, and their codes; of two zeros the one without a sign."""
    element = scaled.recipe.element
    codes = np.arange(2 ** formats.finfo(element).bits, dtype=np.uint8)
    numbers = formats.decode(codes, element)
    numbers, codes = numbers[np.isfinite(numbers)], codes[np.isfinite(numbers)]
    rising, first = np.unique(numbers, return_index=True)
    return rising, codes[first]


def _grid(form: ScaledTensor) -> tuple[Array, Array]:
    """Step and offset of each element, float32 (N, K): its value is offset + step · number of its code."""
    element = form.recipe.element
    zero, one = (
        verbs.dequantize(_with_codes(form, np.full(form.shape, code, np.uint8)))
        for code in formats.encode(np.array([0.0, 1.0]), element)
    )
    return one - zero, zero


def _with_codes(form: ScaledTensor, codes: Array) -> ScaledTensor:
    data = pack_nibbles(codes & 15) if form.is_packed else codes
    return form._with(data=np.ascontiguousarray(data).view(form.data.dtype).reshape(form.data.shape))


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
