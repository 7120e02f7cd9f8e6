# SPDX-License-Identifier: Apache-2.0
"""The bound of `verify`: every target that `convert` writes passes it on honest weights, and what is worse does not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, verify
from breccia.checkpoint.judging.verify import bits_of, least
from breccia.cli import main

clients = pytest.importorskip("clients")  # a source archive has no benchmarks

BITS = {"fp32": None, "gguf:f16": None, "gguf:bf16": None, "fp16": None, "bf16": None, "delayed": 8, "current": 8}
BITS |= {"block": 8, "expanded": 8, "deepseek:block": 8, "deepseek:block-ue8m0": 8, "gguf:q8_0": 8}
# Of a mix those of the layers here: the mixes take more for others.
BITS |= {to: int(to[6]) for to in clients.targets() if to.startswith("gguf:q") and to not in BITS}
BITS["gguf:q5_1"] = 6  # with a scale and a minimum of 16 bits each for 32 codes
NAME = "model.layers.0.self_attn.q_proj.weight"


def bits(to: str) -> int | None:
    """What the name of a target says."""
    return BITS.get(to, 8 if "8" in to else 6 if "6" in to else 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Gaussian weights, of one layer and of experts in one tensor."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = {
        NAME: rng.normal(0, 0.02, (256, 256)).astype(np.float32),
        "model.layers.0.mlp.experts.gate_up_proj": rng.normal(0, 0.02, (2, 256, 256)).astype(np.float32),
    }
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "test"}))
    return folder


def written(source: Path, to: str, **options: Any) -> Path:
    out = source.parent / ("out.gguf" if to.startswith("gguf") else "out.safetensors" if "comfy" in to else "out")
    convert(source, out, to, **options)
    return out


@pytest.mark.parametrize("to", [name for name in clients.targets() if name != "deepseek:mxfp4"])
def test_every_target_passes_by_the_bound_of_its_bits(to: str, source: Path) -> None:
    out = written(source, to)
    report = verify(source, out)
    assert report["ok"], report
    assert report["min_sqnr_db"] is None
    checkpoint = Checkpoint(out)
    quantized = [found for found in checkpoint.found if found.format != "plain"]
    assert {bits_of(checkpoint, found, checkpoint.load(found)) for found in quantized} == ({bits(to)} - {None})
    bounds = {t["name"].removesuffix(".weight"): t["bound_db"] for t in report["tensors"]}
    for found in quantized:
        assert bounds[found.name.removesuffix(".weight")] == 3 * (bits(to) or 4)
    # Between the bound and what such weights reach there is room for weights that are less kind.
    for t in report["tensors"]:
        assert t["equal"] or float(t["sqnr_db"]) > t["bound_db"] + 5


def test_eight_bits_of_few_digits_pass(source: Path) -> None:
    assert verify(source, written(source, "mxfp8:e5m2"))["ok"]


def test_experts_apart_have_the_bits_of_all(tmp_path: Path) -> None:
    """Of experts that share a stored tensor each has its part of the bytes."""
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    experts = {
        f"model.layers.0.mlp.experts.{i}.{name}_proj.weight": rng.normal(0, 0.02, (256, 256)).astype(np.float32)
        for i in range(4)
        for name in ("gate", "up", "down")
    }
    save_arrays(experts, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "test"}))
    convert(tmp_path / "in", tmp_path / "mlx", "mlx:int4")
    report = verify(tmp_path / "in", tmp_path / "mlx")
    assert report["ok"]
    assert {t["bound_db"] for t in report["tensors"]} == {12}


def test_eight_bits_with_the_error_of_four_fail(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(source, source.parent / "four", "mxfp4")
    convert(source.parent / "four", source.parent / "eight", "fp8-row")
    arguments = ["verify", str(source), str(source.parent / "eight")]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert f"! failed: {NAME} (" in said
    assert "dB, below 24 dB" in said
    assert said.endswith("lowest SQNR allowed: 24 dB; 2 below\nnot ok (failed its bound, not the same, or missing)\n")
    # One bound for all in its place.
    assert main([*arguments, "--min-sqnr", "15"]) == 0
    assert capsys.readouterr().out.endswith("lowest SQNR allowed: 15 dB; none below\nok\n")
    # Floats are no form of codes: where the reference is the quantized one, the two were swapped.
    assert main(["verify", str(source.parent / "four"), str(source)]) == 1
    assert "dB, below 48 dB)" in capsys.readouterr().out


def test_two_bits_fail_by_their_own_bound(source: Path) -> None:
    out = written(source, "gguf:q2_k")
    assert verify(source, out)["ok"]
    assert not verify(source, out, min_sqnr_db=12)["ok"]
    raw = bytearray(out.read_bytes())
    checkpoint = Checkpoint(out)
    at = next(checkpoint.entries[found.parts["blocks"]].start for found in checkpoint.found if found.name == NAME)
    checkpoint.close()
    for block in range(256):  # the scales of a row's blocks are those of another row
        begin = at + 84 * block
        raw[begin : begin + 16] = raw[begin : begin + 16][::-1]
    out.write_bytes(raw)
    report = verify(source, out)
    assert report["failed"] == [NAME]


def test_the_bound_is_that_of_the_fewer_bits() -> None:
    assert [least(None, bits) for bits in (2, 3, 4, 8)] == [6, 9, 12, 24]
    assert (least(8, 4), least(4, 8), least(8, None), least(2, None), least(None, None)) == (12, 12, 48, 48, 12)
