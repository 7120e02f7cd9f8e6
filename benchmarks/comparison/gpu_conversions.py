# SPDX-License-Identifier: Apache-2.0
"""cast, dequantize, requantize and the search by squared error on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import breccia
import torch
from breccia.frameworks.torch import tensors
from breccia.kernels import triton as kernels
from breccia.kernels.triton import recipes
from breccia.kernels.triton.casts import cast_block, cast_nvfp4, cast_tensor
from breccia.kernels.triton.conversions import dequant
from breccia.kernels.triton.recipes import Plan, Source
from breccia.verbs.cast_options import CastOptions

from comparison.gpu_timing import FP8, Fn, call_time, note, randn, replay_time


def casts() -> None:
    n = 8192
    x = randn(n, n)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / replay_time([lambda: y.copy_(x)], 20) / 1e3
    note("copy", "bf16 8192x8192", gb_per_s=copy)

    def bandwidth(group: str, name: str, f: Fn, size: int) -> None:
        us = replay_time([f], 20)
        note(group, name, us=us, gb_per_s=size / us / 1e3, of_copy=size / us / 1e3 / copy)

    blocks = (
        ("FP8 1x128", "e4m3", (1, 128), "divide", torch.float32, False),
        ("FP8 128x128", "e4m3", (128, 128), "divide", torch.float32, False),
        ("MXFP8", "e4m3", (1, 32), "rceil", torch.float32, False),
        ("MXFP6", "e2m3", (1, 32), "rceil", torch.float32, False),
        ("MXFP4", "e2m1", (1, 32), "rceil", torch.float32, True),
        ("INT4 g128", "int4", (1, 128), "divide", torch.float16, True),
    )
    for name, fmt, block, rule, scale, packed in blocks:
        plan = Plan("block", fmt, rule, block, scale, packed)
        c, s = cast_block.cast_block(x, plan)
        size = x.nbytes + c.nbytes + s.nbytes
        bandwidth("cast", name, lambda: cast_block.cast_block(x, plan), size)
        sfmt = "float" if rule == "divide" else "e8m0"

        def back() -> torch.Tensor:
            return dequant.dequantize(Source(c, s, fmt, sfmt, (n, n), block, packed), torch.bfloat16)

        bandwidth("dequantize", name, back, size)
    scale = torch.empty((), device="cuda")
    stats = cast_tensor.statistics(x, "nvfp4", 6.0, 1.0, scale)
    c, s, g = cast_nvfp4.cast_nvfp4(x)
    size = x.nbytes + c.nbytes + s.nbytes
    bandwidth("cast", "NVFP4, maximum known", lambda: cast_nvfp4.cast_nvfp4(x, stats=stats), size)
    bandwidth("cast", "NVFP4, both passes (x counted twice)", lambda: cast_nvfp4.cast_nvfp4(x), size + x.nbytes)

    def back() -> torch.Tensor:
        return dequant.dequantize(Source(c, s, "e2m1", "e4m3", (n, n), (1, 16), True, None, g), torch.bfloat16)

    bandwidth("dequantize", "NVFP4", back, size)
    bandwidth(
        "cast", "FP8 per row", lambda: cast_tensor.cast_row(x, Plan("row", "e4m3", block=(1, 0))), x.nbytes * 3 // 2
    )
    bandwidth(
        "cast",
        "FP8 per tensor, both passes (x counted twice)",
        lambda: cast_tensor.cast_tensor(x, "e4m3"),
        x.nbytes * 5 // 2,
    )

    for recipe in (breccia.Float8BlockScaling(), breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()):
        both = kernels.cast_transpose(x, recipe)
        size = x.nbytes * (2 if recipe.name == "nvfp4" else 1) + sum(t.nbytes for t in both)
        bandwidth("cast", f"{recipe.name} and transposed", lambda: kernels.cast_transpose(x, recipe), size)

    for recipe in (breccia.Float8BlockScaling(), breccia.MXFP8BlockScaling(), breccia.MXFP4BlockScaling()):
        size = x.nbytes + kernels.cast(x, recipe).nbytes
        bandwidth("cast", f"{recipe.name} of a transposed view", lambda: kernels.cast(x.T, recipe), size)

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x.view(n, n // 128, 128).float()
        s = v.abs().amax(-1, keepdim=True) / 448.0
        return (v / s).to(FP8).view(n, n), s.squeeze(-1)

    compiled = torch.compile(plain)
    bandwidth("cast", "torch.compile FP8 1x128", lambda: compiled(x), x.nbytes * 3 // 2)
    bandwidth("cast", "torch .to FP8, no scale", lambda: x.to(FP8), x.nbytes * 3 // 2)


def conversions() -> None:
    """requantize and the searching casts, against the whole-array operations they replace and what torch.compile makes
    of a plain formulation (one that divides approximately and keeps no exact scales)."""
    n = 8192
    x = randn(n, n)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / replay_time([lambda: y.copy_(x)], 20) / 1e3

    def row(group: str, name: str, ours: Fn, size: int, peer: Fn | None, kernel: bool = True) -> None:
        us = replay_time([ours], 8, 3) if kernel else call_time(ours)
        gb_per_s = size / us / 1e3
        values = {"us": us, "gb_per_s": gb_per_s, "of_copy": gb_per_s / copy}
        if peer is not None:
            values["torch_operations_us"] = call_time(peer)
        note(group, name, **values)

    fp8, mxfp8, mxfp4 = breccia.Float8BlockScaling(), breccia.MXFP8BlockScaling(), breccia.MXFP4BlockScaling()
    nvfp4, int4 = breccia.NVFP4BlockScaling(), breccia.INT4Scaling()
    for source, goal in ((fp8, mxfp8), (mxfp8, fp8), (mxfp4, fp8), (nvfp4, fp8), (nvfp4, mxfp8), (fp8, nvfp4)):
        scaled = kernels.cast(x, source)
        size = scaled.nbytes + kernels.requantize(scaled, goal).nbytes
        row(
            "requantize",
            f"{source.name} to {goal.name}",
            lambda: kernels.requantize(scaled, goal),
            size,
            lambda: tensors.whole_array_requantize(scaled, goal),
            recipes.finds_exact_scales(source, source.layout, goal),  # elsewhere whole-array operations run
        )
    searched = [replace(recipe, scale_search="mse") for recipe in (mxfp8, mxfp4, nvfp4, int4)]
    for recipe in (*searched, breccia.INT4Scaling(symmetric=False, signed=False)):
        name = f"{recipe.name} {'mse' if recipe.scale_search == 'mse' else 'asymmetric'}"
        size = x.nbytes + kernels.cast(x, recipe).nbytes

        def peer() -> Any:
            return tensors.whole_array_cast(x, recipe, CastOptions())

        row("search", name, lambda: kernels.cast(x, recipe), size, peer)

    def plain(c: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = (c.view(n, n // 128, 128).float() * s[:, :, None]).view(n, n // 32, 32)
        e = torch.ceil(torch.log2(v.abs().amax(-1, keepdim=True) / 448.0))
        return (v * torch.exp2(-e)).to(FP8).view(n, n), (e + 127).to(torch.uint8).squeeze(-1)

    compiled, given = torch.compile(plain), kernels.cast(x, fp8)
    row("requantize", "torch.compile block to mxfp8", lambda: compiled(given.data, given.scale), 2 * n * n, None)
