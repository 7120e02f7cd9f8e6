# SPDX-License-Identifier: Apache-2.0
"""The ``breccia`` command: what it prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import save_arrays
from breccia.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.weight": rng.normal(0, 0.02, (128, 256)).astype(np.float32) for i in range(2)}
    save_arrays(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def run(*argv: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_version_and_module() -> None:
    out = subprocess.run([sys.executable, "-m", "breccia", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"breccia {breccia.__version__}"


def test_convert_verify_inspect_plot(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", model, tmp_path / "q", "--to", "modelopt:nvfp4", capsys=capsys)
    assert code == 0
    assert "2 cast" in out
    code, out, _ = run("verify", model, tmp_path / "q", capsys=capsys)
    assert code == 0
    assert out.rstrip().endswith("ok")
    code, out, _ = run("verify", model, tmp_path / "q", "--min-sqnr", "40", "--json", capsys=capsys)
    assert code == 1
    assert len(json.loads(out)["failed"]) == 2
    code, out, _ = run("inspect", tmp_path / "q", capsys=capsys)
    assert code == 0
    assert "modelopt nvfp4" in out
    code, out, _ = run("inspect", tmp_path / "q", "--json", capsys=capsys)
    assert json.loads(out)["total"]["formats"] == {"modelopt nvfp4": 2}
    page = tmp_path / "p.html"
    code, out, _ = run("plot", tmp_path / "q", "--reference", model, "--out", page, "--json", capsys=capsys)
    assert code == 0
    assert all(15 < row["sqnr_db"] < 25 for row in json.loads(out)["tensors"])
    text = page.read_text()
    assert text.count('fill="#557"') > 20  # scales
    assert text.count('fill="#a66"') > 20  # errors
    rows = json.loads(out)["tensors"]
    assert [sum(row["errors"]) for row in rows] == [128 * 256] * 2
    assert [sum(row["scales"]) for row in rows] == [128 * 16] * 2


def test_targets_are_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", model, "none", "--to", "list", "--json", capsys=capsys)
    assert code == 0
    assert "compressed-tensors:nvfp4" in json.loads(out)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("doctor", "--json", capsys=capsys)
    assert code == 0
    report = json.loads(out)
    assert report["cpu"]["backend"] == breccia.cpu_info()["backend"]
    assert report["peers"]["numpy"] == np.__version__
    assert run("doctor", capsys=capsys)[1].startswith(f"breccia {breccia.__version__}")


@pytest.mark.parametrize("command", ["inspect", "plot"])
def test_errors_are_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    code, out, err = run(command, tmp_path / "bad.safetensors", "--json", capsys=capsys)
    assert code == 2
    assert "header must fit" in json.loads(out)["error"]
    assert err.startswith(f"breccia {command}: ")
    assert len(err.splitlines()) == 1


def test_png_without_matplotlib_names_the_extra(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run("convert", model, tmp_path / "q", "--to", "mxfp8", capsys=capsys)
    code, _, err = run("plot", tmp_path / "q", "--out", tmp_path / "p.png", capsys=capsys)
    assert code == 2
    assert "pip install breccia[plot]" in err


def test_every_command_has_json() -> None:
    for command in ("demo", "convert", "inspect", "verify", "plot", "doctor"):
        out = subprocess.run(
            [sys.executable, "-m", "breccia", command, "--help"], capture_output=True, text=True, check=True
        )
        assert "--json" in out.stdout


def test_png_is_a_picture(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    run("convert", model, tmp_path / "q", "--to", "modelopt:nvfp4", capsys=capsys)
    out = tmp_path / "p.png"
    code, _, _ = run("plot", tmp_path / "q", "--reference", model, "--out", out, capsys=capsys)
    assert code == 0
    assert out.read_bytes()[:16] == b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    with image.open(out) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape == (int(120 * (1.5 + 0.24 * 2)), 120 * 18, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    third = pixels.shape[1] // 3
    for part in range(3):  # scales, errors, bars: something is drawn in each
        assert pixels[:, part * third : (part + 1) * third].std() > 20
