# SPDX-License-Identifier: Apache-2.0
"""Rotations that programs apply to the inputs and outputs of a layer, and their undoing in the layer's weight.

A file says ``x' = x · V`` and ``y' = y · U`` beside a weight that was made for these: ``W · Vᵀ`` and ``Uᵀ · W`` are the
weight of the plain layer. A Hadamard matrix is Sylvester's of the largest power of two, or that times one that is known
(hadamards.json, which benchmarks/make_hadamards.py writes); others are tensors of the file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from breccia.bridges.common import Array, float32


class Rotation(NamedTuple):
    """One rotation of a layer.

    Attributes:
        side: "input", or "output", of the weight and of the bias.
        size: of the matrix, which stands once for each so many inputs or outputs.
        stored: the name of the tensor that has it; "" of Hadamard's.
        order: the name of the tensor that has the order of its rows and columns; "" where they stay.
        scaled: whether what is stored is divided by the root of the size, as Hadamard's is.
        transposed: whether programs multiply by the transposed one.
    """

    side: str
    size: int
    stored: str = ""
    order: str = ""
    scaled: bool = True
    transposed: bool = False

    def undone(self, values: Array, array: Callable[[str], Array]) -> Array:
        """Numbers of a plain layer, float32, of those of a weight (…, N, K) or a bias (N,); ``array`` reads a stored
        tensor by its name."""
        alone = values.ndim == 1
        rows = float32(values)
        if self.side == "output" and not alone:
            rows = np.swapaxes(rows, -1, -2)
        shape = rows.shape
        rows = rows.reshape(*shape[:-1], -1, self.size)
        # rows of W times Vᵀ, and its columns and the bias times U
        flip = (self.side == "input") != self.transposed
        if self.stored or self.order:
            matrix = float32(array(self.stored)) if self.stored else hadamard(np.eye(self.size, dtype=np.float32))
            if self.order:
                matrix = matrix[np.ix_(array(self.order), array(self.order))]
            rows = rows @ (matrix.T if flip else matrix)
            rows = rows / np.float32(math.sqrt(self.size)) if self.scaled and self.stored else rows
        else:
            rows = hadamard(rows, transposed=flip)
        rows = rows.reshape(shape)
        made: Array = np.ascontiguousarray(np.swapaxes(rows, -1, -2) if self.side == "output" and not alone else rows)
        return made


def hadamard(rows: Array, transposed: bool = False) -> Array:
    """Rows (…, N), float32, times the Hadamard matrix of their length, which is orthogonal, or times that transposed.
    Raises ValueError where none of that size is known."""
    size = rows.shape[-1]
    known = _factor(size)
    shape, out = rows.shape, rows
    step = 1
    while step < size // known:
        pairs = out.reshape(*shape[:-1], -1, 2, step)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([left + right, left - right], -2).reshape(shape)
        step *= 2
    if known > 1:
        matrix = _known()[known]
        out = np.matmul(matrix.T if transposed else matrix, out.reshape(*shape[:-1], known, -1)).reshape(shape)
    made: Array = out / np.float32(math.sqrt(size))
    return made


def is_known(size: int, alone: bool = False) -> bool:
    """Whether there is a Hadamard matrix of a size; ``alone``: one of Sylvester's."""
    return size > 0 and (size & (size - 1) == 0 or (not alone and any(_divides(size, one) for one in _known())))


def _divides(size: int, known: int) -> bool:
    return size % known == 0 and (size // known) & (size // known - 1) == 0


def _factor(size: int) -> int:
    """The size of the known matrix that is a factor, 1 of powers of two."""
    if not is_known(size):
        raise ValueError(f"a Hadamard matrix of size {size} is not known: it is no power of two times {[*_known()]}")
    return 1 if size & (size - 1) == 0 else max(one for one in _known() if _divides(size, one))


@functools.cache
def _known() -> dict[int, Array]:
    """Matrices whose sizes are no powers of two."""
    said: dict[str, Any] = json.loads(Path(__file__).with_name("hadamards.json").read_bytes())
    found = {}
    for size, text in sorted((int(size), text) for size, text in said.items()):
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=size * size)
        found[size] = 1 - 2 * bits.reshape(size, size).astype(np.float32)
    return found
