# SPDX-License-Identifier: Apache-2.0
"""AMD's FP8 against ml_dtypes' dtypes of these names, and checkpoints of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import from_compressed_tensors, from_fnuz, to_fnuz
from breccia.bridges.fp8 import fnuz_values
from breccia.checkpoint import Checkpoint, convert, save_arrays

ml_dtypes = pytest.importorskip("ml_dtypes")

KINDS = ["E4M3", "E5M2"]
F = breccia.Float8CurrentScaling
RECIPES = {
    "tensor": lambda kind: F(fp8_format=kind),
    "row": lambda kind: F(fp8_format=kind, granularity="row"),
    "blocks": lambda kind: breccia.Float8BlockScaling(fp8_format=kind),
    "tiles": lambda kind: breccia.Float8BlockScaling(fp8_format=kind, block_m=128),
}


def dtype_of(kind: str) -> Any:
    return getattr(ml_dtypes, f"float8_{kind.lower()}fnuz")


def weight() -> Any:
    return np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code(kind: str) -> None:
    scale = np.float32(0.37)
    codes = np.arange(256, dtype=np.uint8).view(dtype_of(kind)).reshape(16, 16)
    first = {"E4M3": 0x7F, "E5M2": 0x7C}[kind]
    plain = codes.view(np.uint8) & 0x7F < first
    shared = np.where(plain, codes.view(np.uint8), 0).view(dtype_of(kind))
    made = from_fnuz(shared, scale.reshape(1))
    np.testing.assert_array_equal(breccia.dequantize(made), shared.astype(np.float32) * scale)
    with pytest.raises(ValueError, match=rf"codes of float8_{kind.lower()}fnuz from {first:#04x} on, .* got "):
        from_fnuz(codes, scale.reshape(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_there_and_back(name: str, kind: str) -> None:
    scaled = breccia.cast(weight(), RECIPES[name](kind))
    codes, scale = to_fnuz(scaled)
    assert codes.dtype == dtype_of(kind)
    back = from_fnuz(codes, scale)
    assert back.layout == scaled.layout
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(scaled))
    same = breccia.formats.decode(scaled.data, scaled.recipe.element)
    np.testing.assert_array_equal(codes.astype(np.float32), same / 2)


def test_without_dtypes_for_them() -> None:
    """Codes are bytes and bfloat16 scales words where there is no ml_dtypes: checkpoints are read all the same."""
    one = np.array([0x3F80], np.uint16)
    values = fnuz_values(np.full((4, 4), 0x38, np.uint8), one, "E4M3")
    np.testing.assert_array_equal(values, np.full((4, 4), 0.5, np.float32))
    with pytest.raises(TypeError, match="scale must be float32 or float16 where the package ml_dtypes is missing"):
        from_fnuz(np.full((4, 4), 0x38, np.uint8), one, "E4M3")


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind: str) -> None:
    x = np.array([[np.nan, -0.0, 0.0, 1.0]], np.float32)
    codes, scale = to_fnuz(breccia.cast(x, F(fp8_format=kind)))
    np.testing.assert_array_equal(codes.view(np.uint8)[0, :3], [0x80, 0, 0])
    np.testing.assert_array_equal(np.isnan(breccia.dequantize(from_fnuz(codes, scale))), [[True, False, False, False]])
    infinite = breccia.ScaledTensor(
        np.full((1, 4), 0x7C, np.uint8), np.float32(1), F(fp8_format="E5M2"), breccia.PerTensor()
    )
    with pytest.raises(ValueError, match="scaled must have no infinity"):
        to_fnuz(infinite)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="fp8_format must be 'E4M3' or 'E5M2', as the dtype of data is, got None"):
        from_fnuz(np.zeros((4, 4), np.uint8), np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"scale must stay exact when it is multiplied by 0\.5"):
        from_fnuz(np.zeros((4, 4), np.uint8), np.full(1, 1e-45, np.float32), "E4M3")
    with pytest.raises(ValueError, match="scaled must not be a transposed view"):
        to_fnuz(breccia.cast(weight(), "fp8").mT)
    with pytest.raises(TypeError, match="scale must be float32, float16 or bfloat16, got uint8"):
        from_fnuz(np.zeros((4, 4), np.uint8), np.full(1, 127, np.uint8), "E4M3")
    fnuz = np.zeros((4, 4), dtype_of("E4M3"))
    with pytest.raises(ValueError, match=r"got float8_e4m3fnuz: breccia\.bridges\.from_fnuz reads it"):
        from_compressed_tensors({"weight": fnuz, "weight_scale": np.ones(1, np.float32)})
    with pytest.raises(TypeError, match="scaled must be FP8 with scales of 16 or 32 bits"):
        to_fnuz(breccia.cast(weight(), "mxfp8"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (256, 1), (2, 2)])
def test_checkpoints(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    """Every code but NaN's has its value, those that `from_fnuz` refuses too; a conversion casts them."""
    codes = np.arange(65536, dtype=np.uint32).astype(np.uint8).reshape(256, 256)
    codes[codes == 0x80] = 0
    codes = codes.view(dtype_of(kind))
    scale = np.random.default_rng(1).uniform(0.5, 2, shape).astype(np.float32)
    per = [256 // n for n in (shape if len(shape) == 2 else (1, 1))]
    values = codes.astype(np.float32) * np.repeat(np.repeat(scale.reshape(-1, shape[-1]), per[0], 0), per[1], 1)
    source = tmp_path / "model.safetensors"
    said = {"quantization_config": {"quant_method": "quark"}}
    save_arrays({"a.weight": codes, "a.weight_scale": scale}, source)
    (tmp_path / "config.json").write_text(json.dumps(said))
    [found] = Checkpoint(source).found
    assert (found.kind, found.shape, found.findings) == ("fp8-fnuz", (256, 256), ())
    np.testing.assert_array_equal(Checkpoint(source).load(found), values)
    convert(source, tmp_path / "out.safetensors", "mxfp8")
    written = Checkpoint(tmp_path / "out.safetensors")
    assert written.load(written.found[0]) == breccia.cast(values, "mxfp8")
