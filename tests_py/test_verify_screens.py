# SPDX-License-Identifier: Apache-2.0
"""What `breccia verify` prints: layers that are alike share a line, and the summary is last."""

import re
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, save_arrays, verify
from breccia.checkpoint.judging.verify_lines import render
from checkpoints import weight
from test_cli import run

NAMES = [f"model.layers.{i}.{name}.weight" for i in range(20) for name in ("q_proj", "down_proj")]
BAD = "model.layers.3.q_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one made of it of which a layer is wrong."""
    folder = tmp_path_factory.mktemp("pair")
    arrays: dict[str, Any] = {name: weight(32, 64) for name in NAMES}
    save_arrays(arrays, folder / "good.safetensors")
    save_arrays({**arrays, BAD: arrays[BAD] + weight(32, 64)[::-1]}, folder / "other.safetensors")
    convert(folder / "other.safetensors", folder / "bad.safetensors", "nvfp4")
    return folder / "good.safetensors", folder / "bad.safetensors"


def test_layers_that_are_alike_share_a_line(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run("verify", *pair, capsys=capsys)
    lines = said.splitlines()
    assert code == 1
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["count", "SQNR", "dB", "cosine", "max", "error", "tensor"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "20", "19"] or [
        line.split()[0] for line in lines[1:4]
    ] == ["1", "19", "20"]
    assert BAD in lines[1]  # the worst first, alone: it failed, the others did not
    assert {line.split()[-1] for line in lines[2:4]} == {
        "model.layers.*.q_proj.weight",
        "model.layers.*.down_proj.weight",
    }
    report = verify(*pair)
    of_group = [float(t["sqnr_db"]) for t in report["tensors"] if "down" in t["name"]]
    (line,) = (line for line in lines if line.endswith("layers.*.down_proj.weight"))
    assert float(line.split()[1]) == pytest.approx(min(of_group), abs=6e-3)
    assert "lowest" in lines[-3]
    assert BAD in said.split("found: median")[1]
    assert lines[-2] == "lowest SQNR allowed: 12 dB; 1 below"
    assert lines[-1].startswith("not ok")
    assert re.search(rf"! failed: {re.escape(BAD)}\s+\(-?\d+\.\d\d dB, below 12 dB", said.replace("\n", " "))


def test_all_has_a_line_for_each(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("verify", *pair, "--all", capsys=capsys)
    rows = [line for line in said.splitlines() if re.match(r" +1 +-?[\d.]+ ", line)]
    assert len(rows) == len(NAMES)
    assert sorted(rows, key=lambda line: float(line.split()[1])) == rows


def test_many_failures_are_not_a_wall(pair: tuple[Path, Path]) -> None:
    report = verify(*pair, min_sqnr_db=90)
    text = render(report)
    assert text.count("! failed") == 12
    assert "! and 28 more, which --json has" in text
    assert "; 40 below" in text


def test_a_likely_mistake_stands_beside_the_name(tmp_path: Path) -> None:
    w = weight(64, 64)
    save_arrays({"a.0.weight": w}, tmp_path / "a.safetensors")
    q = breccia.cast(w, "mxfp4")
    data = np.asarray(q.data)
    swapped = breccia.ScaledTensor((data >> 4) | (data << 4), q.scale, q.recipe, q.layout, shape=q.shape)
    breccia.save({"a.0.weight": swapped}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (mistake,) = (t["mistake"] for t in report["tensors"])
    assert "nibbles" in mistake
    assert f"below 12 dB: {mistake}?)" in " ".join(render(report).split())
