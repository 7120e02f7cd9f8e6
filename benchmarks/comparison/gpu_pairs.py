# SPDX-License-Identifier: Apache-2.0
"""The floor under speed: `breccia.linear` of every pair of recipes, and of bfloat16 by every recipe, against cuBLAS's
bfloat16 by bfloat16, both in CUDA graphs, with bfloat16 results. Errors are against float64 of the dequantized
operands.
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
    dense = randn(n, k)
    weights = {name: breccia.cast(dense, recipe) for name, recipe in RECIPES.items()}
    values = {name: breccia.dequantize(w).double() for name, w in weights.items()}
    for m in rows:
        x = randn(m, k)
        peer = functools.partial(torch.nn.functional.linear, x, dense)
        sides = {"bf16": x, **{name: breccia.cast(x, recipe) for name, recipe in RECIPES.items()}}
        for left, given in sides.items():
            exact = (given if left == "bf16" else breccia.dequantize(given))[:256].double()
            for right, w in weights.items():
                call = functools.partial(breccia.linear, given, w, out_dtype=torch.bfloat16)
                direct = functools.partial(torch.ops.breccia.matmul, *_parts(given), *_parts(w.mT), torch.bfloat16)
                path = path_of(functools.partial(direct, "exact"))
                us, other, ratio = alternate([call], [peer], 16 if m > 256 else 48, 3)
                off = error(call()[:256], exact @ values[right].T)
                note(
                    "pair", f"{left} × {right}", m=m, n=n, k=k, us=us, bf16_us=other, ratio=ratio, error=off, path=path
                )


def _parts(operand: Any) -> Any:
    from breccia.frameworks._torch_meta import flatten

    return flatten(operand) if isinstance(operand, breccia.ScaledTensor) else ([operand], "")


def below_the_floor() -> list[str]:
    """What the rows measured say, a line for each cell."""
    found = [row for row in ROWS if row["group"] == "pair" and row["ratio"] < FLOOR]
    return [f"{row['name']}, {row['m']} rows: {row['ratio']} of bf16" for row in found]
