# SPDX-License-Identifier: Apache-2.0
"""The PTX that decodes packed weights, run by a small interpreter: every code, with every scale where it has one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from breccia.kernels.triton.device import decode

pytestmark = pytest.mark.offline
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
VALUES = {
    "e2m1": np.concatenate([E2M1, -E2M1]),
    "int4": np.array([*range(8), *range(-8, 0)], np.float64),
    "int8": np.array([*range(128), *range(-128, 0)], np.float64),
}


def halves(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.uint32).view(np.int16).copy()).view(torch.bfloat16)


def words(x: torch.Tensor) -> np.ndarray:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint32).copy()


def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def gather(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both = [(x >> np.uint32(8 * i)) & np.uint32(255) for x in (a, b) for i in range(4)]
    parts = [both[selector >> 4 * i & 7] << np.uint32(8 * i) for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def run(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    regs = dict(operands)
    size = len(next(iter(operands.values())))

    def value(name: str) -> np.ndarray:
        return np.full(size, int(name, 0), np.uint32) if name[0].isdigit() else regs[name]

    for line in re.sub(r"[{}]|\.reg [^;]*;", "", text).split(";"):
        if not line.strip():
            continue
        op, rest = line.split(None, 1)
        out, *names = (name.strip() for name in rest.split(","))
        a = [value(name) for name in names]
        does: dict[str, Any] = {
            "mov.b32": lambda: a[0],
            "and.b32": lambda: a[0] & a[1],
            "shr.b32": lambda: a[0] >> a[1],
            "shl.b32": lambda: a[0] << a[1],
            "mul.lo.u32": lambda: a[0] * a[1],
            "lop3.b32": lambda: look_up(a[0], a[1], a[2], int(names[3], 0)),
            "prmt.b32": lambda: gather(a[0], a[1], int(names[2], 0)),
            "sub.f32": lambda: (a[0].view(np.float32) - a[1].view(np.float32)).view(np.uint32),
            "cvt.rn.bf16x2.f32": lambda: both_halves(a[0].view(np.float32), a[1].view(np.float32)),
            "mul.bf16x2": lambda: words(halves(a[0]).double() * halves(a[1]).double()),
            "sub.bf16x2": lambda: words(halves(a[0]).double() - halves(a[1]).double()),
            "fma.rn.bf16x2": lambda: words(halves(a[0]).double() * halves(a[1]).double() + halves(a[2]).double()),
        }
        regs[out] = does[op]()
    return regs


def both_halves(high: np.ndarray, low: np.ndarray | None = None) -> np.ndarray:
    return words(torch.from_numpy(np.stack([high if low is None else low, high], axis=1).ravel()))


@pytest.mark.parametrize(
    ("fmt", "snippet"),
    [
        ("e2m1", decode.E2M1_ASM),
        ("e2m1", decode.E2M1_ONCE_ASM),
        ("int4", decode.INT4_ASM),
        ("int4", decode.INT4_FMA_ASM),
        ("int8", decode.INT8_ASM),
    ],
)
def test_every_code(fmt: str, snippet: Any) -> None:
    rng = np.random.default_rng(0)
    bits, per = (8, 4) if fmt == "int8" else (4, 8)
    codes = rng.integers(0, 1 << bits, (100_000, per)).astype(np.uint32)
    packed = np.bitwise_or.reduce(codes << (np.arange(per, dtype=np.uint32) * np.uint32(bits)), axis=1)
    word, scale = f"${per // 2}", f"${per // 2 + 1}"
    exponents = rng.integers(-127, 128, len(packed)) if snippet is decode.E2M1_ASM else np.zeros(len(packed), int)
    once = snippet is decode.E2M1_ONCE_ASM
    if once:  # an E4M3 scale times 2^112 in, and 2^-14 out
        exponents = rng.integers(-9, 9, len(packed)) + 112
    scales = both_halves(np.exp2(exponents.astype(np.float64)))
    twice = both_halves(np.exp2(exponents.astype(np.float64) + 1))
    regs = run(snippet.value, {word: packed, scale: scales, "$6": twice})
    power = np.exp2(exponents.astype(np.float64) - (126 if once else 0))[:, None]
    for p in range(per // 2):
        pair = codes[:, [p, p + 4]] if bits == 4 else codes[:, [2 * p, 2 * p + 1]]
        got = halves(regs[f"${p}"]).double().numpy().reshape(-1, 2)
        got = got / 2 if once and p > 1 else got  # its second scale
        with np.errstate(over="ignore"):  # 6 times 2^127 is infinite in float32 too
            assert np.array_equal(got, (VALUES[fmt][pair] * power).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_int4_by_float_scales(dtype: type) -> None:
    """Codes times scales, rounded to bf16: once where scales are float16, else 2^-7 of a place beyond half of one."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (100_000, 8)).astype(np.uint32)
    packed = np.bitwise_or.reduce(codes << (np.arange(8, dtype=np.uint32) * np.uint32(4)), axis=1)
    scales = (rng.standard_normal(len(codes)) * np.exp2(rng.integers(-12, 12, len(codes)))).astype(dtype)
    parts = run(decode.TWO_PARTS_ASM.value, {"$2": scales.astype(np.float32).view(np.uint32)})
    regs = run(decode.SCALED_INT4_ASM.value, {"$4": packed, "$5": parts["$0"], "$6": parts["$1"]})
    for p in range(4):
        exact = VALUES["int4"][codes[:, [p, p + 4]]] * scales.astype(np.float64)[:, None]
        got = halves(regs[f"${p}"]).double().numpy().reshape(-1, 2)
        rounded = torch.from_numpy(exact).bfloat16().double().numpy()
        if dtype is np.float16:
            assert np.array_equal(got, rounded)
        place = np.exp2(np.floor(np.log2(np.abs(exact), where=exact != 0, out=np.zeros_like(exact))) - 7)
        assert np.all(np.abs(got - exact) <= place * (0.5 + 2**-7))


@pytest.mark.parametrize(("bits", "snippet"), [(4, decode.TURN_NIBBLES_ASM), (8, decode.TURN_PAIRS_ASM)])
def test_turned_words(bits: int, snippet: Any) -> None:
    """Every place of 16 bytes goes to the thread and the place that the decoding, which takes pairs (p, p + 4) of 4-bit
    codes and neighbours of 8-bit ones, brings back into the order of K."""
    per = 32 // bits
    places = np.arange(4 * per, dtype=np.uint32)
    pieces = [places >> np.uint32(bits * i) & np.uint32((1 << bits) - 1) for i in range(-(-7 // bits))]
    turned = []
    for piece in pieces:  # what moves is a few bits of each place's number at a time
        packed = np.bitwise_or.reduce(
            piece.reshape(4, per) << (np.arange(per, dtype=np.uint32) * np.uint32(bits)), axis=1
        )
        regs = run(snippet.value, {f"${4 + i}": packed[i : i + 1] for i in range(4)})
        words = np.concatenate([regs[f"${t}"] for t in range(4)])
        turned.append(words[:, None] >> np.arange(per, dtype=np.uint32) * np.uint32(bits) & np.uint32((1 << bits) - 1))
    came_from = sum(part << np.uint32(bits * i) for i, part in enumerate(turned))
    for t in range(4):
        for pair in range(per // 2):
            # Threads hold elements 2t, 2t + 1 of every eight.
            expected = [8 * pair + 2 * t, 8 * pair + 2 * t + 1]
            at = [pair, pair + 4] if bits == 4 else [2 * pair, 2 * pair + 1]
            assert came_from[t, at].tolist() == expected
