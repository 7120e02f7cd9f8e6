# SPDX-License-Identifier: Apache-2.0
"""Block FP8 products by the public verbs against DeepGEMM, cuBLASLt and plain bf16, each from a CUDA graph.

DeepGEMM comes with the wheels `sgl-deep-gemm` and `apache-tvm-ffi`, in versions that are built for the torch that is
there (0.1.4 and 0.1.11 for torch 2.11; later ones do not load, or take no tensor); without them its column is empty.
"""

from __future__ import annotations

import statistics
from typing import Any

import breccia
import torch
from torch.nn import functional

from comparison.gpu_timing import FP8, Fn, error, in_turn, note, randn

SHAPES = [
    (16, 7168, 4096),
    (64, 7168, 4096),
    (128, 7168, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (128, 4096, 4096),
    (64, 2112, 7168),
    (128, 2112, 7168),
    (128, 576, 7168),
    (512, 576, 7168),
    (128, 24576, 1536),
    (256, 4096, 4096),
    (512, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 32768, 512),
    (4096, 7168, 16384),
    (8192, 8192, 8192),
]
ROWS_CHECKED = 256


def deep_gemm(x: Any, w: Any) -> tuple[Fn, torch.Tensor] | str:
    """(call, its output), or why there is none. The activations' scales are turned beforehand."""
    try:
        import deep_gemm as library
    except ImportError as missing:
        return str(missing)
    out = torch.empty((x.shape[0], w.shape[0]), device="cuda", dtype=torch.bfloat16)
    turned = library.get_mn_major_tma_aligned_tensor(x.scale)
    scale = w.scale.contiguous()

    def call() -> torch.Tensor:
        library.fp8_gemm_nt((x.data, turned), (w.data, scale), out)
        return out

    return call, out


def cublas(x: Any, w: Any) -> Fn | None:
    """torch._scaled_mm of block-scaled operands, where it takes the shape."""

    def call() -> torch.Tensor:
        return torch._scaled_mm(
            x.data.view(FP8), w.data.view(FP8).T, scale_a=x.scale, scale_b=w.scale.T, out_dtype=torch.bfloat16
        )

    try:
        call()
    except RuntimeError:
        return None
    return call


def block_fp8() -> None:
    for m, n, k in SHAPES:
        a, b = randn(m, k), randn(n, k)
        x, w = breccia.cast(a, breccia.Float8BlockScaling()), breccia.cast(b, breccia.Float8BlockScaling(block_m=128))
        top = min(m, ROWS_CHECKED)
        exact = breccia.dequantize(x)[:top].double() @ breccia.dequantize(w).double().T
        contestants: dict[str, Fn] = {
            "us": lambda x=x, w=w: breccia.linear(x, w, out_dtype=torch.bfloat16),
            "bf16_us": lambda a=a, b=b: functional.linear(a, b),
        }
        peer = deep_gemm(x, w)
        if not isinstance(peer, str):
            contestants["deepgemm_us"] = peer[0]
        scaled_mm = cublas(x, w)
        if scaled_mm is not None:
            contestants["cublas_us"] = scaled_mm
        calls = max(4, min(48, int(1e12 / (m * n * k))))
        rounds = in_turn([[call] for call in contestants.values()], calls)
        us = {
            name: statistics.median(found) for name, found in zip(contestants, zip(*rounds, strict=True), strict=True)
        }
        ratio = us["deepgemm_us"] / us["us"] if "deepgemm_us" in us else None
        note(
            "block FP8",
            "linear(1x128, 128x128)",
            shape=f"{m}x{n}x{k}",
            **us,
            tflops=2e-6 * m * n * k / us["us"],
            times_deepgemm=ratio if ratio is not None else peer,
            error=error(contestants["us"]()[:top], exact),
            **({"deepgemm_error": error(peer[0]()[:top], exact)} if not isinstance(peer, str) else {}),
        )
