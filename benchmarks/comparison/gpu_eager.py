# SPDX-License-Identifier: Apache-2.0
"""Eager calls of the public verbs: the time from one call to the next, Python and launches included.

Each time is the median over rounds that alternate with the peer, `torch.nn.functional.linear` of bfloat16, whose own
eager time is the unit. Errors are relative, against float64 of the dequantized operands.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import breccia
import torch
from breccia import nn

from .gpu_timing import Fn, alternate, error, note, randn

RECIPES: dict[str, Any] = {
    "fp8": breccia.Float8CurrentScaling(),
    "fp8 rows": breccia.Float8CurrentScaling(granularity="row"),
    "fp8 1x128": breccia.Float8BlockScaling(),
    "fp8 128x128": breccia.Float8BlockScaling(block_m=128),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "int4": breccia.INT4Scaling(),
    "int8": breccia.INT8Scaling(),
}
FP8_ACTIVATIONS = {"fp8": "fp8", "fp8 rows": "fp8 rows", "fp8 1x128": "fp8 1x128", "fp8 128x128": "fp8 1x128"}

# Weights and activations of `quantize_`.
BOTH = {"fp8 rows": "fp8 rows", "fp8 128x128": "fp8 1x128", "int8": "int8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def host_time(f: Fn, calls: int) -> float:
    """Microseconds from one call to the next when nothing waits for the GPU but at the end."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def against(ours: Fn, peer: Fn, rounds: int = 21, calls: int = 50) -> tuple[float, float, float]:
    """(ours, peer, ours / peer), medians over rounds of a few calls each: the host's own speed drifts."""
    for f in (ours, peer):
        for _ in range(5):
            f()
    pairs = [(host_time(ours, calls), host_time(peer, calls)) for _ in range(rounds)]
    return (
        statistics.median(o for o, _ in pairs),
        statistics.median(p for _, p in pairs),
        statistics.median(o / p for o, p in pairs),
    )


def eager_verbs(m: int = 16, n: int = 4096, k: int = 4096) -> None:
    """linear of bfloat16 and of quantized activations, cast and dequantize, one call after the other."""
    x, w = randn(m, k), randn(n, k)

    def peer() -> Any:
        return torch.nn.functional.linear(x, w)

    for name, recipe in RECIPES.items():
        q = breccia.cast(w, recipe)
        values = breccia.dequantize(q).double()
        layer = nn.QuantizedLinear(q)
        calls: dict[str, Fn] = {
            "linear": lambda: breccia.linear(x, q, out_dtype=torch.bfloat16),
            "QuantizedLinear": lambda: layer(x),
            "cast": lambda: breccia.cast(x, recipe),
            "dequantize": lambda: breccia.dequantize(q, torch.bfloat16),
        }
        errors = {"linear": error(calls["linear"](), x.double() @ values.T)}
        if name in FP8_ACTIVATIONS:
            qx = breccia.cast(x, RECIPES[FP8_ACTIVATIONS[name]])
            calls["linear(q, q)"] = lambda: breccia.linear(qx, q, out_dtype=torch.bfloat16)
            exact = breccia.dequantize(qx).double() @ values.T
            errors["linear(q, q)"] = error(calls["linear(q, q)"](), exact)
        for verb, call in calls.items():
            ours, theirs, ratio = against(call, peer)
            note("eager", f"{verb} {name}", m=m, n=n, k=k, us=ours, bf16_linear_us=theirs, of_bf16=ratio,
                 error=errors.get(verb, 0.0))  # fmt: skip


class Decoder(torch.nn.Module):
    """One layer as Llama-8B has them: grouped queries, RMS norms, SwiGLU; attention over the tokens given."""

    def __init__(self, hidden: int = 4096, inner: int = 14336, heads: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        kw: dict[str, Any] = dict(bias=False, device="cuda", dtype=torch.bfloat16)  # noqa: C408
        self.q = torch.nn.Linear(hidden, hidden, **kw)
        self.k = torch.nn.Linear(hidden, groups * self.size, **kw)
        self.v = torch.nn.Linear(hidden, groups * self.size, **kw)
        self.o = torch.nn.Linear(hidden, hidden, **kw)
        self.gate = torch.nn.Linear(hidden, inner, **kw)
        self.up = torch.nn.Linear(hidden, inner, **kw)
        self.down = torch.nn.Linear(inner, hidden, **kw)
        self.before = torch.nn.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16)
        self.between = torch.nn.RMSNorm(hidden, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(-2, -3).flatten(-2))
        h = self.between(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def decoder(tokens: int, recipe: Any = None, activations: Any = None, layers: int = 4) -> tuple[Any, Any]:
    """(four layers, their input); weights, and inputs of linear layers, quantized where a recipe is given."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Decoder() for _ in range(layers))).eval()
    if recipe is not None:
        breccia.quantize_(model, recipe, activations=activations)
    return model, randn(1, tokens, 4096)


def eager_decoder(tokens: int = 1) -> None:
    """Four layers, eager, against the same in bfloat16."""
    plain, x = decoder(tokens)
    for name in ("fp8", "fp8 128x128", "mxfp8", "nvfp4", "int4"):
        layers, _ = decoder(tokens, RECIPES[name])
        with torch.no_grad():
            ours, theirs, ratio = against(functools.partial(layers, x), functools.partial(plain, x))
        note("eager decoder", name, tokens=tokens, ms=ours / 1e3, bf16_ms=theirs / 1e3, times_bf16=1 / ratio)
        del layers


def compiled_decoder(tokens: int, rows: dict[str, tuple[Any, Any]]) -> None:
    """The same compiled and in a CUDA graph; `rows`: name to recipes of weights and activations."""
    plain, x = decoder(tokens)
    with torch.no_grad():
        reference = plain(x).double()
        peer = functools.partial(torch.compile(plain), x)
        for name, (recipe, activations) in rows.items():
            torch._dynamo.reset()
            layers, _ = decoder(tokens, recipe, activations)
            call = functools.partial(torch.compile(layers), x)
            off = error(call(), reference)
            ours, theirs, ratio = alternate([call], [peer], 4)
            note("compiled decoder", name, tokens=tokens, ms=ours / 1e3, bf16_ms=theirs / 1e3, times_bf16=ratio,
                 error=off)  # fmt: skip
            del layers, call


def quantized_decoder(tokens: int) -> None:
    """Four layers whose activations are quantized too, eager, against the same in bfloat16."""
    plain, x = decoder(tokens)
    for name, activations in BOTH.items():
        layers, _ = decoder(tokens, RECIPES[name], RECIPES[activations])
        with torch.no_grad():
            ours, theirs, ratio = against(functools.partial(layers, x), functools.partial(plain, x), 11, 20)
        note("eager decoder, both quantized", f"{name} by {activations}", tokens=tokens, ms=ours / 1e3,
             bf16_ms=theirs / 1e3, times_bf16=1 / ratio)  # fmt: skip
        del layers


def torchao_decoder(tokens: int = 2048) -> None:
    """What torchao does with the same layers, where it is installed; the peer is bfloat16."""
    try:
        from torchao import quantization
    except ImportError:
        return
    plain, x = decoder(tokens)
    rows = {
        "int8": quantization.Int8DynamicActivationInt8WeightConfig(),
        "fp8 rows": quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow()),
    }
    for name, config in rows.items():
        torch._dynamo.reset()
        layers, _ = decoder(tokens)
        quantization.quantize_(layers, config)
        with torch.no_grad():
            eager_ms, _, _ = against(functools.partial(layers, x), functools.partial(plain, x), 5, 10)
            call = functools.partial(torch.compile(layers), x)
            peer = functools.partial(torch.compile(plain), x)
            ours, theirs, ratio = alternate([call], [peer], 4)
        note("torchao decoder", name, tokens=tokens, eager_ms=eager_ms / 1e3, ms=ours / 1e3, bf16_ms=theirs / 1e3,
             times_bf16=ratio)  # fmt: skip
        del layers, call


def eager() -> None:
    eager_verbs()
    eager_decoder()
    for tokens in (16, 2048):
        quantized_decoder(tokens)


def compiled() -> None:
    """Weight-only layers for one token, FP8 activations by FP8 weights for many."""
    rows, block, tiles = RECIPES["fp8 rows"], RECIPES["fp8 1x128"], RECIPES["fp8 128x128"]
    compiled_decoder(1, {"fp8": (RECIPES["fp8"], None), "nvfp4": (RECIPES["nvfp4"], None)})
    compiled_decoder(
        2048,
        {
            "fp8 rows W8A8": (rows, rows),
            "fp8 128x128 W8A8": (tiles, block),
            "int8 W8A8": (RECIPES["int8"], RECIPES["int8"]),
            "mxfp8 W8A8": (RECIPES["mxfp8"], RECIPES["mxfp8"]),
            "fp8 rows, weights only": (rows, None),
        },
    )
