# SPDX-License-Identifier: Apache-2.0
"""Products of experts: `breccia.grouped_matmul` against bfloat16 by torch and DeepGEMM's contiguous product, in CUDA
graphs and eager. DeepGEMM comes as gpu_peers.py says.
"""

from __future__ import annotations

import statistics
from typing import Any

import breccia
import torch

from .gpu_eager import against
from .gpu_timing import Fn, error, in_turn, note, randn

SHAPES = [(8, 8), (8, 128), (16, 256), (64, 128)]  # experts, rows of each
RECIPES: dict[str, tuple[Any, Any]] = {
    "FP8 128x128 by FP8 1x128": (breccia.Float8BlockScaling(block_m=128), breccia.Float8BlockScaling()),
    "FP8 128x128 by bf16": (breccia.Float8BlockScaling(block_m=128), None),
    "MXFP8 by bf16": (breccia.MXFP8BlockScaling(), None),
    "NVFP4 by bf16": (breccia.NVFP4BlockScaling(), None),
    "MXFP4 by bf16": (breccia.MXFP4BlockScaling(), None),
    "INT4 by bf16": (breccia.INT4Scaling(), None),
}


def deep_gemm(x: Any, w: Any, experts: int, rows: int) -> Fn | str:
    """Its call, or why there is none: it wants groups of whole tiles."""
    try:
        import deep_gemm as library
    except ImportError as missing:
        return str(missing)
    if rows % 128:
        return "rows of an expert are no multiple of 128"
    out = torch.empty((x.shape[0], w.shape[1]), device="cuda", dtype=torch.bfloat16)
    turned = library.get_mn_major_tma_aligned_tensor(x.scale)
    belongs = torch.arange(experts, device="cuda", dtype=torch.int32).repeat_interleave(rows)

    def call() -> torch.Tensor:
        library.m_grouped_fp8_gemm_nt_contiguous((x.data, turned), (w.data, w.scale), out, belongs)
        return out

    return call


def experts(n: int = 4096, k: int = 2048) -> None:
    for count, rows in SHAPES:
        total = count * rows
        stack, x = randn(count, n, k), randn(total, k)
        offsets = torch.arange(0, total + 1, rows, device="cuda", dtype=torch.int32)

        def peer() -> Any:
            return torch._grouped_mm(x, stack.transpose(1, 2), offs=offsets[1:])

        for name, (weights, activations) in RECIPES.items():
            w = breccia.cast(stack, weights)
            given = x if activations is None else breccia.cast(x, activations)

            def ours() -> Any:
                return breccia.grouped_matmul(given, w, offsets, torch.bfloat16)

            contestants: dict[str, list[Fn]] = {"us": [ours], "bf16_grouped_us": [peer]}
            theirs = "" if activations is None else deep_gemm(given, w, count, rows)
            if callable(theirs):
                contestants["deep_gemm_us"] = [theirs]
            rounds = in_turn(list(contestants.values()), 16)
            us = {key: statistics.median(r[i] for r in rounds) for i, key in enumerate(contestants)}
            left = (x if activations is None else breccia.dequantize(given)).double().unflatten(0, (count, rows))
            exact = torch.bmm(left, breccia.dequantize(w).double().transpose(1, 2)).flatten(0, 1)
            eager, bf16, _ = against(ours, peer, rounds=5, calls=20)
            note("experts", name, experts=count, rows=rows, n=n, k=k, **us, ratio=us["bf16_grouped_us"] / us["us"],
                 eager_us=eager, eager_bf16_us=bf16, error=error(ours(), exact))  # fmt: skip
