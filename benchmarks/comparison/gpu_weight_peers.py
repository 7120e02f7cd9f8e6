# SPDX-License-Identifier: Apache-2.0
"""One row of bf16 by the quantized weights of Llama-3 8B, by the public verb, against torch's tinygemm (INT4), Humming
and plain bf16. Each comes from a CUDA graph and takes eight weights in turn, more than the L2 cache holds.

Humming comes with the wheel `humming-kernels`; without it its column is empty. Errors are relative to the product of
the weights before they were quantized, so that the loss of the format stands beside each time.
"""

from __future__ import annotations

import statistics
from typing import Any

import breccia
import torch
from torch.nn import functional

from comparison.gpu_timing import Fn, error, in_turn, note, randn

SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (14336, 4096), (4096, 14336)]
COPIES = 8
FORMATS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "int4": (breccia.INT4Scaling(), {"dtype": "int4", "group_size": 128}),
    "mxfp4": (breccia.MXFP4BlockScaling(), {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}),
    "nvfp4": (breccia.NVFP4BlockScaling(), {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3",
                                            "scale_2_type": "tensor"}),
    "fp8": (breccia.Float8CurrentScaling(granularity="row"), {"dtype": "float8e4m3"}),
    "int8": (breccia.INT8Scaling(), {"dtype": "int8"}),
}  # fmt: skip


def tinygemm(x: torch.Tensor, w: torch.Tensor) -> Fn:
    """torch's product by INT4 weights in groups of 128."""
    q = breccia.cast(w, breccia.INT4Scaling())
    low = q.data.view(torch.uint8) & 15
    high = q.data.view(torch.uint8) >> 4
    codes = torch.stack((low, high), -1).flatten(-2) ^ 8  # 0 … 15, zero at 8
    packed = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), 8)
    scale = q.scale.to(torch.bfloat16).T.contiguous()
    scales_and_zeros = torch.stack((scale, torch.zeros_like(scale)), -1).contiguous()
    return lambda: torch._weight_int4pack_mm(x, packed, 128, scales_and_zeros)


def humming(x: torch.Tensor, w: torch.Tensor, form: dict[str, Any] | None) -> Fn | str:
    """Humming's layer with the same format, or why there is none."""
    if form is None:
        return "no such format"
    try:
        from humming.layer import HummingLayer

        layer = HummingLayer(
            shape_n=w.shape[0], shape_k=w.shape[1], weight_config=dict(form), torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_unquantized(w)
        layer.transform()
        layer(x)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return lambda: layer(x)


def weight_peers() -> None:
    for n, k in SHAPES:
        x, dense = randn(1, k), [randn(n, k) for _ in range(COPIES)]
        exact = x.double() @ dense[0].double().T
        for name, (recipe, form) in FORMATS.items():
            weights = [breccia.cast(w, recipe) for w in dense]
            contestants: dict[str, list[Fn]] = {
                "us": [lambda q=q: breccia.linear(x, q, out_dtype=torch.bfloat16) for q in weights],
                "bf16_us": [lambda w=w: functional.linear(x, w) for w in dense],
            }
            if name == "int4":
                contestants["tinygemm_us"] = [tinygemm(x, w) for w in dense]
            theirs = [humming(x, w, form) for w in dense[: COPIES if form else 1]]
            why = next((call for call in theirs if isinstance(call, str)), None)
            if why is None:
                contestants["humming_us"] = theirs
            rounds = in_turn(list(contestants.values()), 24)
            us = {
                key: statistics.median(found) for key, found in zip(contestants, zip(*rounds, strict=True), strict=True)
            }
            errors = {
                key.replace("us", "error"): error(calls[0](), exact)
                for key, calls in contestants.items()
                if key != "bf16_us"
            }
            note("weight peers", name, shape=f"1x{n}x{k}", **us, **errors, **({"humming": why} if why else {}))
            del weights, contestants, theirs
            torch.cuda.empty_cache()
