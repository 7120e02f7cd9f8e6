# SPDX-License-Identifier: Apache-2.0
"""Numbers of a source that are infinite or NaN are counted, said, and refused where that is asked for."""

import importlib
import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, finish, plan, save_arrays, target_names, verify
from breccia.checkpoint.files import disk
from breccia.checkpoint.workers import PIECE, Workers
from breccia.checkpoint.writing.losses import counted, in_piece
from breccia.cli import main
from checkpoints import weight, write_shards

ml_dtypes = pytest.importorskip("ml_dtypes")
convert_module = importlib.import_module("breccia.checkpoint.writing.convert")
FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
BAD = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", FLOATS)
def test_counts_are_numpys(dtype: str) -> None:
    """On every code of 16 bits, and on the borders of the others."""
    kind = np.dtype(FLOATS[dtype])
    if kind.itemsize == 2:
        values = np.arange(1 << 16, dtype=np.uint16).view(kind)
    else:
        last = np.finfo(kind).max
        values = np.array([0.0, -0.0, last, -last, np.finfo(kind).tiny, *BAD, *BAD], kind)
    with np.errstate(invalid="ignore"):
        wanted = int(np.count_nonzero(~np.isfinite(values.astype(np.float64))))
    assert wanted > 5
    assert in_piece(values, dtype) == counted(values, Workers(2)) == counted(values) == wanted
    assert counted(values[::-1]) == counted(np.stack([values, values], -1)[:, 0]) == wanted
    assert in_piece(values[:0], dtype) == counted(values[:0]) == 0
    assert counted(np.resize(values, 3 * PIECE // kind.itemsize + 7)) > wanted


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4", "int8"])
def test_codes_are_counted_by_their_values(recipe: str) -> None:
    scaled = breccia.cast(weight(32, 64), recipe)
    assert counted(scaled) == 0
    if scaled.scale.dtype == np.float32:
        scale = scaled.scale.copy()
        scale.reshape(-1)[0] = np.nan
        broken = breccia.ScaledTensor(scaled.data, scale, scaled.recipe, scaled.layout, scaled.zero_point)
        assert counted(broken) == np.count_nonzero(~np.isfinite(breccia.dequantize(broken))) > 0


def source(path: Path, dtype: str = "F32") -> Path:
    a, b, c = weight(128, 256), weight(128, 256), weight(128, 256)
    a[3, 5] = np.inf
    b[:] = np.nan
    arrays = {"layers.0.q_proj.weight": a, "layers.1.q_proj.weight": b, "layers.2.q_proj.weight": c}
    norm = np.ones(256, np.float32)
    norm[:2] = -np.inf
    arrays["layers.0.norm.weight"] = norm
    said = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256}
    return write_shards(path, [{name: array.astype(FLOATS[dtype]) for name, array in arrays.items()}], said)


COUNTS = {"layers.0.q_proj.weight": 1, "layers.1.q_proj.weight": 128 * 256, "layers.0.norm.weight": 2}
# K-quants refuse such numbers.
TARGETS = sorted({name.partition(":")[0] for name in target_names()} | {"gguf:q4_0", "gguf:q8_0", "mlx:int4"})


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_every_target_says_how_many(to: str, dtype: str, tmp_path: Path) -> None:
    report = convert(source(tmp_path / "in", dtype), tmp_path / "out", to)
    assert report["not_finite"] == COUNTS
    assert "layers.0.q_proj.weight: 1 element is not finite" in report["notes"]
    assert "layers.1.q_proj.weight: 32768 elements are not finite" in report["notes"]
    with pytest.raises(ValueError, match=r"^strict: there must be nothing to note, there is: "):
        convert(tmp_path / "in", tmp_path / "strict", to, strict=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("via", ["nvfp4", "deepseek", "mlx:int4", "gptq", "gguf:q8_0"])
def test_codes_that_are_made_anew_are_counted_too(via: str, tmp_path: Path) -> None:
    """From codes whose scales are not finite; what the first conversion made finite is finite."""
    convert(source(tmp_path / "in"), tmp_path / "codes", via)
    convert(tmp_path / "codes", tmp_path / "floats", "fp32")
    wanted = {}
    for name, array in load(tmp_path / "floats").items():
        if bad := int(np.count_nonzero(~np.isfinite(array))):
            wanted[name] = bad
    for to in ("fp32", "mxfp8", "int8"):
        assert convert(tmp_path / "codes", tmp_path / to, to)["not_finite"] == wanted, to


def load(path: Path) -> dict[str, Any]:
    from breccia.checkpoint import SafetensorsFile

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: array for file in files for name, array in SafetensorsFile(file).items()}


def test_the_command_says_it_and_refuses(tmp_path: Path, capsys: Any) -> None:
    words = ["convert", str(source(tmp_path / "in")), str(tmp_path / "out"), "--to", "nvfp4", "--quiet"]
    assert main([*words, "--strict"]) == 2
    assert "strict: there must be nothing to note, there is: layers.0" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    assert main(words) == 0
    assert "! layers.0.q_proj.weight: 1 element is not finite\n" in capsys.readouterr().out
    words[2] += "2"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] == COUNTS
    save_arrays({"a.weight": weight(32, 64)}, tmp_path / "good.safetensors")
    assert main(["convert", str(tmp_path / "good.safetensors"), str(tmp_path / "q"), "--to", "mxfp8", "--strict"]) == 0


def test_what_parts_and_earlier_runs_counted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source(tmp_path / "in")
    for piece in plan(path, tmp_path / "parts", "nvfp4", 3):
        piece.run(threads=1)
    with pytest.raises(ValueError, match="strict"):
        finish(path, tmp_path / "parts", "nvfp4", strict=True)
    assert finish(path, tmp_path / "parts", "nvfp4")["not_finite"] == COUNTS
    monkeypatch.setattr(convert_module, "_SYNC_EVERY", 1)
    seen = [0]

    def stop(what: str, at: Path) -> None:
        seen[0] += what == "write" and at.name == "journal"
        if seen[0] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", "nvfp4")
    monkeypatch.setattr(disk, "before", None)
    assert convert(path, tmp_path / "out", "nvfp4")["not_finite"] == COUNTS


def test_tensors_of_nan_alone_are_not_equal(tmp_path: Path) -> None:
    save_arrays({"a": np.full((4, 8), np.nan, np.float32), "b": weight(4, 8)}, tmp_path / "a.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert not report["ok"] and report["failed"] == ["a"]
    assert [(one["name"], one["equal"]) for one in report["tensors"]] == [("a", False), ("b", True)]
    assert report["tensors"][0]["mistake"] == "every element is NaN"
    one = weight(4, 8)
    one[0, 0] = np.nan
    save_arrays({"a": one, "b": np.empty((0, 4), np.float32)}, tmp_path / "b.safetensors")
    assert verify(tmp_path / "b.safetensors", tmp_path / "b.safetensors")["ok"]
