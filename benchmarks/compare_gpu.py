# SPDX-License-Identifier: Apache-2.0
"""GPU benchmark: every kernel against its peers in the same run. Writes JSON, prints a table.

    python benchmarks/compare_gpu.py --out benchmarks/results/gpu_h200.json

Times are medians of CUDA graph replays, so that launch costs count for nobody. Products alternate between ours and
the peer. "cold" rotates eight weights, more than the L2 cache holds. Errors are relative, against float64 of the
dequantized operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import breccia
import torch
import triton
import triton.language as tl
from breccia.frameworks import _torch_ops
from breccia.kernels import triton as kernels
from breccia.kernels.triton import cast_block, cast_nvfp4, cast_tensor, dequant, fp8_matmul, products, recipes
from breccia.options import CastOptions
from torch.nn import functional

Fn = Callable[[], Any]
FP8 = torch.float8_e4m3fn
ROWS: list[dict[str, Any]] = []


def replay_time(functions: list[Fn], calls: int, repeats: int = 7) -> float:
    """Median microseconds per call, over replays of a graph of `calls` calls that take the functions in turn."""
    for f in functions:
        f()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        functions[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                functions[i % len(functions)]()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def call_time(f: Fn) -> float:
    """Median microseconds of a call that a CUDA graph cannot hold."""
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def alternate(ours: list[Fn], peer: list[Fn], calls: int, rounds: int = 3) -> tuple[float, float, float]:
    """(ours, peer, ratio): medians over alternating measurements."""
    pairs = [(replay_time(peer, calls, 3), replay_time(ours, calls, 3)) for _ in range(rounds)]
    return (
        statistics.median(o for _, o in pairs),
        statistics.median(p for p, _ in pairs),
        statistics.median(p / o for p, o in pairs),
    )


def error(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def note(group: str, name: str, **values: Any) -> None:
    row = {
        "group": group,
        "name": name,
        **{k: (float(f"{v:.4g}") if isinstance(v, float) else v) for k, v in values.items()},
    }
    ROWS.append(row)
    print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


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
        c, s = cast_block.cast_block(x, fmt, block, rule, scale, packed)
        size = x.nbytes + c.nbytes + s.nbytes
        bandwidth("cast", name, lambda: cast_block.cast_block(x, fmt, block, rule, scale, packed), size)
        sfmt = "float" if rule == "divide" else "e8m0"

        def back() -> torch.Tensor:
            return dequant.dequantize(c, s, fmt, sfmt, (n, n), block, packed, torch.bfloat16)

        bandwidth("dequantize", name, back, size)
    scale = torch.empty((), device="cuda")
    stats = cast_tensor.statistics(x, "nvfp4", 6.0, 1.0, scale)
    c, s, g = cast_nvfp4.cast_nvfp4(x)
    size = x.nbytes + c.nbytes + s.nbytes
    bandwidth("cast", "NVFP4, maximum known", lambda: cast_nvfp4.cast_nvfp4(x, stats=stats), size)
    bandwidth("cast", "NVFP4, both passes (x counted twice)", lambda: cast_nvfp4.cast_nvfp4(x), size + x.nbytes)

    def back() -> torch.Tensor:
        return dequant.dequantize(c, s, "e2m1", "e4m3", (n, n), (1, 16), True, torch.bfloat16, None, g)

    bandwidth("dequantize", "NVFP4", back, size)
    bandwidth("cast", "FP8 per row", lambda: cast_tensor.cast_row(x, "e4m3"), x.nbytes * 3 // 2)
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

    def row(group: str, name: str, ours: Fn, size: int, peer: Fn | None) -> None:
        us = replay_time([ours], 8, 3)
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
            lambda: _torch_ops.vectorized_requantize(scaled, goal),
        )
    searched = [replace(recipe, scale_search="mse") for recipe in (mxfp8, mxfp4, nvfp4, int4)]
    for recipe in (*searched, breccia.INT4Scaling(symmetric=False, signed=False)):
        name = f"{recipe.name} {'mse' if recipe.scale_search == 'mse' else 'asymmetric'}"
        size = x.nbytes + kernels.cast(x, recipe).nbytes

        def peer() -> Any:
            return _torch_ops.vectorized_cast(x, recipe, CastOptions())

        row("search", name, lambda: kernels.cast(x, recipe), size, peer)

    def plain(c: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = (c.view(n, n // 128, 128).float() * s[:, :, None]).view(n, n // 32, 32)
        e = torch.ceil(torch.log2(v.abs().amax(-1, keepdim=True) / 448.0))
        return (v * torch.exp2(-e)).to(FP8).view(n, n), (e + 127).to(torch.uint8).squeeze(-1)

    compiled, given = torch.compile(plain), kernels.cast(x, fp8)
    row("requantize", "torch.compile block to mxfp8", lambda: compiled(given.data, given.scale), 2 * n * n, None)


def block_operands(m: int, n: int, k: int) -> Any:
    a, b = randn(m, k), randn(n, k)
    ac, sa = cast_block.cast_block(a, "e4m3", (1, 128))
    bc, sb = cast_block.cast_block(b, "e4m3", (128, 128))
    return ac.view(FP8), sa.T.contiguous().T, bc.view(FP8), sb


def values(c: torch.Tensor, s: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return dequant.dequantize(c.view(torch.uint8), s, "e4m3", "float", tuple(c.shape), block, False).double()


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
            lambda: fp8_matmul.fp8_matmul(ac, bc, sa, sb, block=True),
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
                lambda: fp8_matmul.fp8_matmul(ac, bc, one, one, fast=fast),
                lambda: torch._scaled_mm(
                    ac, bc.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
                ),
                unit,
            )
        row(
            "per row",
            "fast",
            lambda: fp8_matmul.fp8_matmul(ac, bc, rows_a, rows_b, fast=True),
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
            ours = [lambda w=w: fp8_matmul.fp8_matmul(ac, w[0], sa, w[1], block=True) for w in used]
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


def weight_only() -> None:
    n, k = 7168, 4096
    dense = [randn(n, k) for _ in range(8)]
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
        for m in (1, 2, 4, 8, 16, 64, 512, 4096):
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
            block=error(fp8_matmul.fp8_matmul(ac, bc, sa, sb, out, block=True), ref),
            tensor_promoted=error(fp8_matmul.fp8_matmul(ac, bc, one, one, out), unit),
            tensor_fast=error(fp8_matmul.fp8_matmul(ac, bc, one, one, out, fast=True), unit),
        )


def machine() -> dict[str, Any]:
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):
        told = []
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "breccia": breccia.__version__,
        **dict(zip(fields.split(","), told, strict=False)),
    }


SECTIONS: dict[str, Fn] = {
    "casts": casts,
    "conversions": conversions,
    "large": lambda: products_large(
        [(2048, 2048, 2048), (4096, 4096, 4096), (4096, 7168, 2048), (4096, 4096, 7168), (8192, 8192, 8192)]
    ),
    "small": products_small,
    "weight_only": weight_only,
    "grouped": grouped,
    "accuracy": accuracy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    options = parser.parse_args()
    torch.manual_seed(0)
    about: dict[str, Any] = {"before": machine()}
    print(about["before"])
    for name in options.only:
        SECTIONS[name]()
    about["after"] = machine()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": about, "results": ROWS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
