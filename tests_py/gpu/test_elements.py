# SPDX-License-Identifier: Apache-2.0
"""The rows of element formats: those of the core, and new ones, which are one row and no line of a kernel."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
from breccia import formats
from breccia.kernels.triton.casts import cast_block, cast_tensor
from breccia.kernels.triton.conversions import dequant
from breccia.kernels.triton.device.elements import BY_FORMAT, ELEMENTS, Element
from breccia.kernels.triton.products import gemm, gemv
from breccia.kernels.triton.recipes import Plan, Source

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPE = (20, 512)


def test_a_name_is_of_one_format() -> None:
    """float8_e4m3 and float8_e4m3fn are two."""
    assert len(ELEMENTS) == len(BY_FORMAT)
    assert ELEMENTS["e4m3"] is BY_FORMAT["float8_e4m3fn"]


def ml_values(name: str) -> np.ndarray[Any, Any]:
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)


def both_signs(*magnitudes: float) -> np.ndarray[Any, Any]:
    return np.array([*magnitudes, *(-float(m) for m in magnitudes)], np.float32)


# Formats that the core does not have, with the values of their codes from elsewhere.
NEW = {
    "8 bits, IEEE": (Element("e3m4", 8, 3, 4, -2, 15.5, nan=0x78, infinity=0x70), ml_values("float8_e3m4")),
    "8 bits, E4M3 with infinities": (
        Element("e4m3_ieee", 8, 4, 3, -6, 240.0, nan=0x7C, infinity=0x78),
        ml_values("float8_e4m3"),
    ),
    "4 bits, E1M2": (Element("e1m2", 4, 1, 2, 0, 1.75), both_signs(0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75)),
    "4 bits, E3M0": (Element("e3m0", 4, 3, 0, -2, 16.0), both_signs(0, 0.25, 0.5, 1, 2, 4, 8, 16)),
    "8 bits, unsigned": (Element("uint8", 8, max=255.0, lo=0, hi=255), np.arange(256, dtype=np.float32)),
}
new = pytest.mark.parametrize(("row", "values"), NEW.values(), ids=NEW.keys())


def nearest(y: Any, values: Any) -> Any:
    """Codes of the values nearest to y, of two the one with the even code, the sign kept."""
    finite = np.where(np.isfinite(values), values, np.inf).astype(np.float64)
    distance = np.abs(y.astype(np.float64)[..., None] - finite)
    codes = np.arange(len(values))
    wrong_sign = (np.signbit(values) != np.signbit(y)[..., None]) & bool(np.signbit(values).any())
    best = np.where(distance == distance.min(-1, keepdims=True), 0, 4) + wrong_sign + 2 * (codes % 2)
    return best.argmin(-1).astype(np.uint8)


def numbers(row: Element) -> Any:
    x = cases.normal(SHAPE, 3, 2.0)
    x[2] = 0
    return np.abs(x) if row.is_integer and row.lo == 0 else x


def unpacked(codes: Any, row: Element) -> Any:
    codes = np.asarray(codes.cpu())
    return formats.unpack(codes) if row.packed else codes


@pytest.mark.offline
def test_every_format_with_a_sign_and_two_zeros_has_a_row() -> None:
    """A row cannot say that the code of -0 is NaN, nor that there is no sign."""
    without = {fmt for fmt in formats.names() if formats.finfo(fmt).name.endswith(("fnuz", "e8m0fnu"))}
    assert without == set(formats.names()) - BY_FORMAT.keys()
    assert {recipe.element for recipe in cases.RECIPES.values()} <= BY_FORMAT.keys() | without
    for fmt, row in BY_FORMAT.items():
        info = formats.finfo(fmt)
        assert (row.bits, row.max, row.has_nan) == (info.bits, info.max, info.has_nan)
        assert row.is_integer or (row.mantissa, row.emax) == (info.mantissa_bits, info.max_exponent)


@pytest.mark.offline
@new
def test_the_values_of_a_new_row(row: Element, values: Any) -> None:
    np.testing.assert_array_equal(row.values(), values)


@pytest.mark.interpreted
@new
@pytest.mark.parametrize("rule", ["divide", "rceil"])
def test_blocks_of_a_new_row(
    row: Element, values: Any, rule: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if rule == "rceil" and row.is_integer:
        pytest.skip("powers of two are scales of floats")
    monkeypatch.setitem(ELEMENTS, row.name, row)
    x = numbers(row)
    codes, scale = cast_block.cast_block(
        torch.from_numpy(x).to(device), Plan("block", row.name, rule, (1, 32), packed=row.packed)
    )
    blocks = x.reshape(SHAPE[0], -1, 32)
    amax = np.abs(blocks).max(-1)
    if rule == "divide":
        factor = np.where(amax == 0, np.float32(1), amax / np.float32(row.max))
        np.testing.assert_array_equal(np.asarray(scale.cpu()), factor)
        sfmt = "float"
    else:
        mantissa, exponent = np.frexp(amax / np.float32(row.max))
        expected = np.where(amax == 0, 0, exponent - (mantissa == 0.5) + 127)
        np.testing.assert_array_equal(np.asarray(scale.cpu()), expected)
        factor = np.where(amax == 0, 1, np.ldexp(np.float32(1), expected - 127)).astype(np.float32)
        sfmt = "e8m0"
    wanted = nearest(blocks / factor[..., None], values)
    np.testing.assert_array_equal(unpacked(codes, row).reshape(blocks.shape), wanted)
    source = Source(codes, scale, row.name, sfmt, SHAPE, (1, 32), row.packed)
    made = dequant.dequantize(source)
    decoded = (values[wanted] * np.where(amax == 0, np.float32(1), factor)[..., None]).reshape(SHAPE)
    np.testing.assert_array_equal(np.asarray(made.cpu()), decoded)
    w = decoded.astype(np.float64)
    a = torch.from_numpy(cases.normal((3, SHAPE[1]), 7)).bfloat16().to(device)
    exact = a.cpu().double().numpy() @ w.T
    y = gemm.gemm(a, source, torch.float32)
    np.testing.assert_allclose(np.asarray(y.cpu()), exact, rtol=2e-2, atol=2e-2 * np.abs(exact).max())
    thin = gemv.gemv if row.packed else gemv.gemv8
    y = thin(a, source, torch.float32)
    np.testing.assert_allclose(np.asarray(y.cpu()), exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.interpreted
@new
def test_a_tensor_of_a_new_row(row: Element, values: Any, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if row.packed:
        pytest.skip("whole tensors store a code to a byte")
    monkeypatch.setitem(ELEMENTS, row.name, row)
    x = numbers(row)
    codes, scale = cast_tensor.cast_tensor(torch.from_numpy(x).to(device), row.name)
    assert float(scale) == float(np.abs(x).max() / np.float32(row.max))
    np.testing.assert_array_equal(np.asarray(codes.cpu()), nearest(x / np.float32(float(scale)), values))


@pytest.mark.interpreted
@new
def test_what_is_not_a_number_in_a_new_row(
    row: Element, values: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setitem(ELEMENTS, row.name, row)
    x = numbers(row)
    x[0, 3], x[1, 40] = np.nan, np.inf
    codes, scale = cast_block.cast_block(
        torch.from_numpy(x).to(device), Plan("block", row.name, "divide", (1, 32), packed=row.packed)
    )
    codes = unpacked(codes, row)
    assert values[codes[1, 40]] == row.max
    assert np.isnan(values[codes[0, 3]]) == row.has_nan
    assert np.isnan(float(scale[0, 0])) != row.has_nan
    every = torch.arange(1 << row.bits, dtype=torch.uint8).reshape(1, -1).to(device)
    every = torch.cat([every] * (512 >> row.bits), 1)
    made = dequant.dequantize(Source(every, torch.ones((1, 1), device=device), row.name, "float", (1, 512), (0, 0)))
    np.testing.assert_array_equal(np.asarray(made.cpu())[0], np.concatenate([values] * (512 >> row.bits)))
