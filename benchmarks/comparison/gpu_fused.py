# SPDX-License-Identifier: Apache-2.0
"""Casts fused with the kernel before them (`breccia.nn.functional`), against torch's operations and a cast: eager, and
compiled in a CUDA graph."""

from __future__ import annotations

from typing import Any

import breccia
import torch
from breccia.nn import functional as fused
from torch.nn import functional

from comparison.gpu_eager import RECIPES, against
from comparison.gpu_timing import Fn, alternate, note, randn

HIDDEN, INNER = 4096, 14336


def fused_casts() -> None:
    """Llama-8B's shapes, one token and many."""
    for tokens in (1, 16, 2048):
        x, r, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
        gate, up = randn(tokens, INNER), randn(tokens, INNER)
        for name in ("fp8 rows", "fp8 1x128", "mxfp8", "mxfp4"):
            recipe = RECIPES[name]

            def apart_norm(recipe: Any = recipe) -> Any:
                total = x + r
                return breccia.cast(functional.rms_norm(total, (HIDDEN,), weight, 1e-6), recipe).data, total

            def apart_silu(recipe: Any = recipe) -> Any:
                return breccia.cast(functional.silu(gate) * up, recipe).data

            def one_norm(recipe: Any = recipe) -> Any:
                scaled, total = fused.rms_norm(x, weight, recipe, residual=r)
                return scaled.data, total

            def one_silu(recipe: Any = recipe) -> Any:
                return fused.silu_mul(gate, up, recipe).data

            pairs: dict[str, tuple[Fn, Fn]] = {"rms_norm": (one_norm, apart_norm), "silu_mul": (one_silu, apart_silu)}
            for verb, (one, apart) in pairs.items():
                eager_us, eager_apart, eager_ratio = against(one, apart)
                torch._dynamo.reset()
                compiled: Fn = torch.compile(apart)
                us, other, ratio = alternate([one], [compiled], 24)
                note("fused casts", f"{verb} {name}", tokens=tokens, us=us, compiled_us=other, times_compiled=ratio,
                     eager_us=eager_us, eager_apart_us=eager_apart, times_eager=1 / eager_ratio)  # fmt: skip
