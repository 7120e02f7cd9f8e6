# SPDX-License-Identifier: Apache-2.0
"""Looking at checkpoints: inspect, verify and the classic mistakes, plot."""

import json
from pathlib import Path
from typing import Any

import breccia
import ml_dtypes
import numpy as np
import pytest
from breccia.bridges import _common
from breccia.checkpoint import (
    SafetensorsFile,
    convert,
    inspect,
    save_arrays,
    verify,
)
from breccia.checkpoint.verify import diagnose
from checkpoints import MAKERS, deepseek_v3, weight


def test_inspect_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in MAKERS.items():
        source = make(tmp_path / name)
        monkeypatch.setattr(SafetensorsFile, "raw", None)
        report = inspect(source)
        monkeypatch.undo()
        quantized = [t for t in report["tensors"] if t["format"] == name]
        assert quantized
        assert all(t["recipe"] and t["scales"] for t in quantized)
        assert 4 < quantized[0]["bits_per_weight"] < 8.1
        json.dumps(report)


def test_inspect_finds_what_looks_wrong(tmp_path: Path) -> None:
    fp8 = weight(64, 64).astype(ml_dtypes.float8_e4m3fn)
    save_arrays({"a.weight": fp8, "b.weight": np.zeros((128, 64), np.int8)}, tmp_path / "a.safetensors")
    findings = " ".join(inspect(tmp_path / "a.safetensors")["findings"])
    assert "a.weight: FP8 without a scale" in findings
    assert "b.weight: I8 bytes whose meaning nothing says" in findings


def broken(scaled: Any, **changes: Any) -> Any:
    fields = {"data": scaled.data, "scale": scaled.scale, "zero_point": scaled.zero_point, **changes}
    return breccia.ScaledTensor(
        fields["data"],
        fields["scale"],
        scaled.recipe,
        scaled.layout,
        fields["zero_point"],
        global_scale=changes.get("global_scale", scaled.global_scale),
        shape=scaled.shape,
    )


def test_mistakes_are_named() -> None:
    # rows of very different size, so that a scale in the wrong place matters
    w = weight(256, 256) * np.exp(np.random.default_rng(1).normal(0, 1.5, (256, 1))).astype(np.float32)
    nvfp4 = breccia.cast(w, breccia.NVFP4BlockScaling())
    tiles = breccia.cast(w, breccia.Float8BlockScaling(block_k=16, block_m=16))
    int4 = breccia.cast(w, breccia.INT4Scaling(group_size=64, signed=False, symmetric=False))
    data, scale = nvfp4.data.view(np.uint8), nvfp4.scale.view(np.uint8)
    cases = {
        "reciprocal scale": broken(tiles, scale=1 / tiles.scale),
        "reciprocal global scale": broken(nvfp4, global_scale=1 / nvfp4.global_scale),
        "swapped nibbles": broken(nvfp4, data=(data >> 4) | (data << 4)),
        "transposed scale": broken(tiles, scale=np.ascontiguousarray(tiles.scale.T)),
        "swizzled scale": broken(nvfp4, scale=_common.swizzle(scale).reshape(scale.shape)),
        "missing or wrong global scale": broken(nvfp4, global_scale=np.float32(1)),
        "zero point too high by one": broken(int4, zero_point=int4.zero_point.astype(np.float32) + 1),
        "zero point too low by one": broken(int4, zero_point=int4.zero_point.astype(np.float32) - 1),
    }
    for mistake, tensor in cases.items():
        assert diagnose(w, tensor) == mistake
    for good in (nvfp4, tiles, int4):
        assert diagnose(w, good) == ""


def test_verify_names_the_mistake_in_a_checkpoint(tmp_path: Path) -> None:
    source = deepseek_v3(tmp_path / "in")
    convert(source, tmp_path / "out", "deepseek")
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        arrays = {name: np.array(array) for name, array in SafetensorsFile(file).items()}
        arrays |= {name: 1 / array for name, array in arrays.items() if name.endswith("_scale_inv")}
        save_arrays(arrays, file)
    report = verify(source, tmp_path / "out")
    assert not report["ok"]
    assert len(report["failed"]) == 3
    assert {t["mistake"] for t in report["tensors"] if not t["equal"]} == {"reciprocal scale"}
