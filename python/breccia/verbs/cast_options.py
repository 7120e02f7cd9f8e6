# SPDX-License-Identifier: Apache-2.0
"""How a cast rounds, beyond what its recipe says: the options that low-precision training needs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from breccia.value.inputs import side_array

__all__ = ["CastOptions", "Hadamard", "Rounding", "column_weights"]

Rounding: TypeAlias = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of blocks of ``block`` elements of a row: x · diag(signs) · H / √block,
    with signs drawn from ``seed``. It is orthogonal: the product of two tensors transformed alike along
    the axis they are contracted over is unchanged, while an outlier is spread over its block.

    Raises:
        TypeError: ``seed`` is not an integer.
        ValueError: ``block`` is not a power of two between 2 and 1024.
    """

    block: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block not in (2**i for i in range(1, 11)):
            raise ValueError(f"block must be a power of two between 2 and 1024, got {self.block!r}")
        if isinstance(self.seed, (bool, float, str)):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")


@dataclass(frozen=True, eq=False)
class CastOptions:
    """Checked options of `breccia.cast`."""

    rounding: str = "nearest"
    seed: Any = None
    hadamard: Hadamard | None = None
    square_blocks: bool = False
    amax: Any = None
    offset: Any = 0
    importance: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.rounding, str):
            object.__setattr__(self, "rounding", self.rounding.lower())
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.rounding == "stochastic" and self.seed is None:
            raise ValueError("seed is required for rounding='stochastic': the same seed gives the same codes")
        if self.rounding == "nearest" and self.seed is not None:
            raise ValueError(f"seed must be None for rounding='nearest', which draws nothing, got {self.seed!r}")
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(f"hadamard must be a breccia.Hadamard or None, got {type(self.hadamard).__name__}")
        if isinstance(self.seed, np.integer):
            object.__setattr__(self, "seed", int(self.seed))
        if isinstance(self.seed, (bool, float, str)):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")
        if not isinstance(self.square_blocks, bool):
            raise TypeError(f"square_blocks must be True or False, got {self.square_blocks!r}")
        pair = self.offset if isinstance(self.offset, tuple) else (self.offset, 0)
        if len(pair) != 2 or not all(_is_integer(x) for x in pair):
            raise TypeError(f"offset must be an integer or a pair of them (position, row length), got {self.offset!r}")
        if any(isinstance(x, int) and x >= 2**63 for x in pair):
            raise ValueError(f"offset must be below 2**63, got {self.offset!r}")
        if any(isinstance(x, int) and x < 0 for x in pair):
            raise ValueError(f"offset must not be negative, got {self.offset!r}")
        object.__setattr__(self, "offset", pair)
        if self.importance is not None:
            object.__setattr__(self, "importance", side_array(self.importance, "importance"))

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for."""
        return self.is_plain and self.amax is None

    @property
    def is_plain(self) -> bool:
        """Whether nothing was asked for but, maybe, an amax."""
        nearest = self.rounding == "nearest" and self.importance is None
        return nearest and self.hadamard is None and not self.square_blocks

    @property
    def core_arguments(self) -> dict[str, Any]:
        """As keyword arguments of the core's casts."""
        return {
            "seed": None if self.seed is None else operator.index(self.seed),
            "hadamard": None if self.hadamard is None else (self.hadamard.block, self.hadamard.seed),
            "square_blocks": self.square_blocks,
            "amax": None if self.amax is None else side_array(self.amax, "amax").reshape(-1).tolist(),
            "offset": (operator.index(self.offset[0]), operator.index(self.offset[1])),
            "importance": self.importance,
        }


def _is_integer(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


def column_weights(importance: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What errors of each column of values (…, N, K) count, as the core's casts take it, float64: zeros and what is not
    finite are the mean of their column over the leading axes, else of all, else 1. ``importance`` is of any framework,
    of shape ``shape[-1:]`` or ``(*shape[:-2], shape[-1])``."""
    h = side_array(importance, "importance").astype(np.float64)
    if h.shape not in (shape[-1:], (*shape[:-2], shape[-1])):
        raise ValueError(f"importance must be ({shape[-1]},) or (…, {shape[-1]}) for shape {shape}, got {h.shape}")
    if (h < 0).any():
        raise ValueError(f"importance must not be negative, got {h.min()}")
    usable = np.isfinite(h) & (h > 0)
    count = usable.reshape(-1, shape[-1]).sum(0)
    total = np.where(usable, h, 0).reshape(-1, shape[-1]).sum(0)
    mean = total.sum() / max(int(count.sum()), 1) or 1.0
    pooled = np.where(count > 0, total / np.maximum(count, 1), mean)
    filled: np.ndarray[Any, np.dtype[np.float64]] = np.where(usable, h, pooled)
    return filled[..., None, :] if h.ndim > 1 else filled
