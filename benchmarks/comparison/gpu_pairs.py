# SPDX-License-Identifier: Apache-2.0
"""The floor under speed: `breccia.linear` of every pair of recipes, and of bfloat16 by every recipe, against cuBLAS's
bfloat16 by bfloat16, both in CUDA graphs, with bfloat16 results. Up to 256 rows eight weights take turns, more than
the L2 cache holds. Errors are against float64 of the dequantized operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import breccia
import torch
from breccia.kernels.triton.products import paths

from .gpu_eager import RECIPES
from .gpu_timing import ROWS, alternate, error, note, randn

ROWS_OF_X = (1, 16, 256, 2048)
FLOOR = 0.8  # of bfloat16


def path_of(call: Callable[[], Any]) -> str:
    """The names of the kernels that take a product, the last one last."""
    seen: list[str] = []
    find = paths.find

    def noted(p: paths.Product) -> paths.Path:
        path = find(p)
        seen.append(path.name)
        return path

    with mock.patch.object(paths, "find", noted):
        call()
    return "; ".join(seen)


def pairs(rows: tuple[int, ...] = ROWS_OF_X, n: int = 4096, k: int = 4096) -> None:
    dense = [randn(n, k) for _ in range(8)]
    weights = {name: [breccia.cast(w, recipe) for w in dense] for name, recipe in RECIPES.items()}
    for m in rows:
        x, turns = randn(m, k), 8 if m <= 256 else 1
        peer = [functools.partial(torch.nn.functional.linear, x, w) for w in dense[:turns]]
        sides = {"bf16": x, **{name: breccia.cast(x, recipe) for name, recipe in RECIPES.items()}}
        for left, given in sides.items():
            exact = (given if left == "bf16" else breccia.dequantize(given))[:256].double()
            for right, those in weights.items():
                calls = [functools.partial(breccia.linear, given, w, out_dtype=torch.bfloat16) for w in those[:turns]]
                operands = (*_parts(given), *_parts(those[0].mT))
                path = path_of(functools.partial(torch.ops.breccia.matmul, *operands, torch.bfloat16, "exact"))
                us, other, ratio = alternate(list(calls), list(peer), 16 if m > 256 else 48)
                off = error(calls[0]()[:256], exact @ breccia.dequantize(those[0]).double().T)
                note(
                    "pair", f"{left} × {right}", m=m, n=n, k=k, us=us, bf16_us=other, ratio=ratio, error=off, path=path
                )


def _parts(operand: Any) -> Any:
    from breccia.frameworks.torch.meta import flatten

    return flatten(operand) if isinstance(operand, breccia.ScaledTensor) else ([operand], "")


def below_the_floor() -> list[str]:
    """What the rows measured say, a line for each cell."""
    found = [row for row in ROWS if row["group"] == "pair" and row["ratio"] < FLOOR]
    return [f"{row['name']}, {row['m']} rows: {row['ratio']} of bf16" for row in found]
