# SPDX-License-Identifier: Apache-2.0
"""Looking at checkpoints: inspect, verify and the classic mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import common
from breccia.checkpoint import (
    Checkpoint,
    SafetensorsFile,
    convert,
    inspect,
    save_arrays,
    verify,
)
from breccia.checkpoint.judging.verify import diagnose
from breccia.cli import main
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
    ml_dtypes = pytest.importorskip("ml_dtypes")
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
        "swizzled scale": broken(nvfp4, scale=common.swizzle(scale).reshape(scale.shape)),
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


MANY = 100_000


@pytest.fixture(scope="module")
def many_tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is nearly all header."""
    header = {
        f"layers.{i // 100}.experts.{i % 100}.weight": {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [4 * i, 4 * i + 4],
        }
        for i in range(MANY)
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    path = tmp_path_factory.mktemp("many") / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4 * MANY))
    return path


# Linux keeps the peak of the process that a program was started from; the mark starts anew.
_PEAK = """
import re, sys
from pathlib import Path
from breccia.cli import main
def status(name): return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
main(["inspect", sys.argv[1]])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
main(["inspect", *sys.argv[2:]])
print(status("VmHWM") - before, file=sys.stderr)
"""


@pytest.mark.in_turn
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="measures memory by /proc")
@pytest.mark.parametrize("options", [[], ["--all"], ["--json"], ["--summary"]], ids=str)
def test_inspect_takes_four_bytes_of_memory_a_byte_of_header(
    many_tensors: Path, tmp_path: Path, options: list[str]
) -> None:
    save_arrays({"a.weight": np.zeros(4, np.float32)}, tmp_path / "small.safetensors")
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "small.safetensors"), str(many_tensors), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{MANY:,}" in done.stdout or str(MANY) in done.stdout
    assert int(done.stderr) <= 4 * (many_tensors.stat().st_size - 4 * MANY)


def test_the_report_is_the_same_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_arrays(
        {
            "model.a.experts.gate_up_proj": np.zeros((2, 4, 4), np.float32),
            "model.b.weight": np.zeros((4, 4), np.float32),
            "model.c.weight": np.zeros((0, 4), np.float32),
            "zzz": np.zeros((), np.uint8),
        },
        tmp_path / "a.safetensors",
    )
    assert main(["inspect", "--json", str(tmp_path / "a.safetensors")]) == 0
    assert json.loads(capsys.readouterr().out) == inspect(tmp_path / "a.safetensors")
    checkpoint = Checkpoint(tmp_path / "a.safetensors")
    every = list(checkpoint.found)
    assert len(checkpoint.found) == len(every) == 4
    assert [checkpoint.found[i] for i in range(4)] == every
    assert list(checkpoint.found[1:]) == every[1:]
    assert [t["name"] for t in inspect(tmp_path / "a.safetensors")["tensors"]] == [f.name for f in every]
