# SPDX-License-Identifier: Apache-2.0
"""The casts of 16-bit words against the kernels for any input, on tensors large enough to meet every rare quotient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from breccia.kernels.triton.casts import cast_block, cast_nvfp4
from breccia.kernels.triton.device import word_tiles
from breccia.kernels.triton.recipes import Plan
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FLOATS = (torch.bfloat16, torch.float16)
BLOCKS = [
    *(("e2m1", (1, 32), rule, torch.float32) for rule in ("rceil", "floor", "ceil", "even")),
    *((fmt, (1, 32), rule, torch.float32) for fmt in ("e2m3", "e3m2") for rule in ("rceil", "floor", "ceil", "even")),
    *((fmt, (1, 128), "divide", dtype) for fmt in ("int4", "uint4") for dtype in (torch.float32, *FLOATS)),
    *((fmt, block, "divide", torch.float32) for fmt in ("e4m3", "e5m2") for block in ((1, 128), (128, 128))),
    ("e4m3", (1, 128), "divide", torch.float16),
    ("e4m3", (1, 32), "rceil", torch.float32),
]


def large(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Numbers around 1, with every mantissa; numbers of every size, infinities and NaNs, with a few wild rows."""
    generator = torch.Generator("cuda").manual_seed(7)
    if kind == "normal":
        return torch.randn(2048, 4096, device="cuda", generator=generator).to(dtype)
    if kind == "rows":
        spread = torch.randn(2048, 1, device="cuda", generator=generator) * 4
        return (torch.randn(2048, 4096, device="cuda", generator=generator) * spread.exp2()).to(dtype)
    bits = torch.randint(-(2**15), 2**15, (2048, 4096), device="cuda", generator=generator, dtype=torch.int32)
    return bits.to(torch.int16).view(dtype)


def equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", ["normal", "rows", "bits"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("fmt", "block", "rule", "scale"), BLOCKS, ids=str)
def test_blocks(
    fmt: str, block: tuple[int, int], rule: str, scale: torch.dtype, dtype: torch.dtype, kind: str, monkeypatch: Any
) -> None:
    x = large(kind, dtype)
    plan = Plan("block", fmt, rule, block, scale, packed=fmt in ("e2m1", "int4", "uint4"))
    ours = cast_block.cast_block(x, plan)
    monkeypatch.setattr(cast_block, "takes", lambda *_: False)
    equal(ours, cast_block.cast_block(x, plan))


@pytest.mark.parametrize("kind", ["normal", "rows", "bits"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("two_level", "rule"), [(True, "transformer_engine"), (True, "torchao"), (False, "")])
def test_nvfp4(two_level: bool, rule: str, dtype: torch.dtype, kind: str, monkeypatch: Any) -> None:
    for factor in (1.0, 1e-30, 1e30):
        x = large(kind, dtype) * factor
        ours = cast_nvfp4.cast_nvfp4(x, two_level, rule)
        with monkeypatch.context() as patched:
            patched.setattr(cast_nvfp4, "takes", lambda *_: False)
            equal(ours, cast_nvfp4.cast_nvfp4(x, two_level, rule))


@gluon.jit
def invert_kernel(x_ptr, out_ptr):
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(out_ptr + at, word_tiles.invert(gl.load(x_ptr + at), False))


def test_short_reciprocal_is_exact() -> None:
    """Of every significand."""
    for exponent in (127, 40, 200):
        x = torch.arange(1 << 23, device="cuda", dtype=torch.int32).add(exponent << 23).view(torch.float32)
        made = torch.empty_like(x)
        invert_kernel[(x.numel() // 1024,)](x, made, num_warps=4)
        assert torch.equal(made, 1 / x)
