# SPDX-License-Identifier: Apache-2.0
"""Products on a GPU."""

from __future__ import annotations

from typing import Any

import breccia
import torch
import triton
import triton.language as tl
from breccia.kernels import triton as kernels
from breccia.kernels.triton import recipes
from breccia.kernels.triton.casts import cast_block
from breccia.kernels.triton.conversions import dequant
from breccia.kernels.triton.products import dense_matmul
from breccia.kernels.triton.products import dispatch as products
from breccia.kernels.triton.recipes import Plan, Source
from torch.nn import functional

from comparison.gpu_timing import FP8, Fn, alternate, error, note, randn, replay_time


def block_operands(m: int, n: int, k: int) -> Any:
    a, b = randn(m, k), randn(n, k)
    ac, sa = cast_block.cast_block(a, Plan("block", "e4m3", block=(1, 128)))
    bc, sb = cast_block.cast_block(b, Plan("block", "e4m3", block=(128, 128)))
    return ac.view(FP8), sa.T.contiguous().T, bc.view(FP8), sb


def values(c: torch.Tensor, s: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return dequant.dequantize(Source(c.view(torch.uint8), s, "e4m3", "float", tuple(c.shape), block)).double()


def products_large(shapes: list[tuple[int, int, int]]) -> None:
    for m, n, k in shapes:
        ac, sa, bc, sb = block_operands(m, n, k)
        top = min(m, 256)
        ref = values(ac[:top], sa[:top], (1, 128)) @ values(bc, sb, (128, 128)).T
        tflop = 2e-6 * m * n * k
        calls = 20 if tflop < 3e5 else 8

        def row(name: str, mode: str, ours: Fn, peer: Fn, ref: torch.Tensor) -> None:
            us, other, ratio = alternate([ours], [peer], calls)
            note(
                "product",
                name,
                shape=f"{m}x{n}x{k}",
                accumulate=mode,
                us=us,
                tflops=tflop / us,
                cublas_us=other,
                ratio=ratio,
                error=error(ours()[:top], ref),
                cublas_error=error(peer()[:top], ref),
            )

        row(
            "1x128 by 128x128",
            "fp32 every 128",
            lambda: dense_matmul.dense_matmul(ac, bc, sa, sb, block=True),
            lambda: torch._scaled_mm(ac, bc.T, scale_a=sa, scale_b=sb.T, out_dtype=torch.bfloat16),
            ref,
        )
        one = torch.tensor(0.01, device="cuda")
        unit = ac[:top].double() @ bc.double().T * 1e-4
        rows_a, rows_b = torch.full((m, 1), 0.01, device="cuda"), torch.full((n, 1), 0.01, device="cuda")
        for fast in (True, False):
            mode = "fast" if fast else "fp32 every 128"
            row(
                "per tensor",
                mode,
                lambda: dense_matmul.dense_matmul(ac, bc, one, one, fast=fast),
                lambda: torch._scaled_mm(
                    ac, bc.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
                ),
                unit,
            )
        row(
            "per row",
            "fast",
            lambda: dense_matmul.dense_matmul(ac, bc, rows_a, rows_b, fast=True),
            lambda: torch._scaled_mm(
                ac, bc.T, scale_a=rows_a, scale_b=rows_b.T, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            unit,
        )
        wa, wb = randn(m, k), randn(n, k)
        us = replay_time([lambda: functional.linear(wa, wb)], calls)
        note("product", "bf16 cuBLAS", shape=f"{m}x{n}x{k}", us=us, tflops=tflop / us)


def products_small() -> None:
    n, k = 7168, 4096
    weights = [block_operands(16, n, k)[2:] for _ in range(8)]
    for m in (1, 16, 32, 64, 128):
        ac, sa, _, _ = block_operands(m, 128, k)
        ref = values(ac, sa, (1, 128)) @ values(*weights[0], (128, 128)).T
        for state, used in (("cold", weights), ("warm", weights[:1])):
            ours = [lambda w=w: dense_matmul.dense_matmul(ac, w[0], sa, w[1], block=True) for w in used]
            peer = [
                lambda w=w: torch._scaled_mm(ac, w[0].T, scale_a=sa, scale_b=w[1].T, out_dtype=torch.bfloat16)
                for w in used
            ]
            try:
                us, other, ratio = alternate(ours, peer, 48)
            except RuntimeError:
                us, other, ratio = replay_time(ours, 48), None, None
            note(
                "small",
                f"1x128 by 128x128, L2 {state}",
                shape=f"{m}x{n}x{k}",
                us=us,
                cublas_us=other,
                ratio=ratio,
                error=error(ours[0](), ref),
            )


@triton.jit
def read_kernel(w_ptr, out_ptr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads WORDS consecutive 32-bit words a program, asking for all of them at once."""
    at = tl.program_id(0) * WORDS + tl.arange(0, 1024)
    seen = tl.load(w_ptr + at)
    for i in tl.static_range(1, WORDS // 1024):
        seen ^= tl.load(w_ptr + at + i * 1024)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(seen, 0))


def reading(dense: list[torch.Tensor]) -> None:
    """What no product by packed weights of these bytes can pass: reading them (without scales), 16 rows a program."""
    n, k = dense[0].shape
    x = randn(1, k)
    out = torch.empty(n // 16, device="cuda", dtype=torch.int32)
    for bits in (4, 8):
        packed = [w.view(torch.int32).flatten()[: n * k * bits // 32].clone() for w in dense]
        for state, count in (("cold", 8), ("warm", 1)):
            ours = [lambda w=w: read_kernel[(n // 16,)](w, out, k * bits // 2) for w in packed[:count]]
            peer = [lambda w=w: functional.linear(x, w) for w in dense[:count]]
            us, other, ratio = alternate(ours, peer, 24, 2)
            note(
                "weight-only",
                f"reading {bits}-bit weights alone, L2 {state}",
                shape=f"1x{n}x{k}",
                us=us,
                bf16_cublas_us=other,
                ratio=ratio,
                gb_per_s=packed[0].nbytes / us / 1e3,
            )


def weight_only(rows: tuple[int, ...]) -> None:
    n, k = 7168, 4096
    dense = [randn(n, k) for _ in range(8)]
    if 1 in rows:
        reading(dense)
    for recipe in (
        breccia.NVFP4BlockScaling(),
        breccia.MXFP4BlockScaling(),
        breccia.INT4Scaling(),
        breccia.Float8BlockScaling(block_m=128),
        breccia.MXFP8BlockScaling(),
        breccia.INT8Scaling(),
    ):
        weights = [kernels.cast(w, recipe) for w in dense]
        operands = [recipes.operand(w) for w in weights]
        exact = kernels.dequantize(weights[0]).double()
        for m in rows:
            x = randn(m, k)
            top = min(m, 256)
            for state, count in (("cold", 8), ("warm", 1))[: 2 if m <= 16 else 1]:
                ours = [lambda w=w: products.weight_only(x, w, torch.bfloat16, None) for w in operands[:count]]
                peer = [lambda w=w: functional.linear(x, w) for w in dense[:count]]
                us, other, ratio = alternate(ours, peer, 24 if m <= 64 else 8, 2)
                note(
                    "weight-only",
                    f"{type(recipe).__name__}, L2 {state}",
                    shape=f"{m}x{n}x{k}",
                    us=us,
                    bf16_cublas_us=other,
                    ratio=ratio,
                    error=error(ours[0]()[:top], x[:top].double() @ exact.T),
                )


def grouped() -> None:
    experts, n, k, rows = 16, 4096, 2048, 2048
    stack = randn(experts, n, k)
    offsets = torch.arange(0, rows + 1, rows // experts, device="cuda", dtype=torch.int32)
    x = randn(rows, k)
    peer = [lambda: torch._grouped_mm(x, stack.transpose(1, 2), offs=offsets[1:])]
    for recipe, quantized in (
        (breccia.Float8BlockScaling(block_m=128), True),
        (breccia.Float8BlockScaling(block_m=128), False),
        (breccia.NVFP4BlockScaling(), False),
        (breccia.MXFP4BlockScaling(), False),
        (breccia.INT4Scaling(), False),
    ):
        w = kernels.cast(stack, recipe)
        given = kernels.cast(x, breccia.Float8BlockScaling()) if quantized else x
        try:
            us, other, ratio = alternate([lambda: kernels.grouped_matmul(given, w, offsets)], peer, 8, 2)
        except (RuntimeError, AttributeError):
            us, other, ratio = replay_time([lambda: kernels.grouped_matmul(given, w, offsets)], 8), None, None
        note(
            "grouped",
            f"{type(recipe).__name__} by {'FP8' if quantized else 'bf16'}",
            shape=f"{experts} experts, {rows}x{n}x{k}",
            us=us,
            bf16_grouped_us=other,
            ratio=ratio,
        )


def accuracy() -> None:
    for k in (1024, 4096, 16384):
        ac, sa, bc, sb = block_operands(256, 256, k)
        ref = values(ac, sa, (1, 128)) @ values(bc, sb, (128, 128)).T
        one = torch.tensor(0.01, device="cuda")
        unit = ac.double() @ bc.double().T * 1e-4
        out = torch.float32
        note(
            "accuracy",
            f"K={k}, float32 output",
            block=error(dense_matmul.dense_matmul(ac, bc, sa, sb, out, block=True), ref),
            tensor_promoted=error(dense_matmul.dense_matmul(ac, bc, one, one, out), unit),
            tensor_fast=error(dense_matmul.dense_matmul(ac, bc, one, one, out, fast=True), unit),
        )
