# SPDX-License-Identifier: Apache-2.0
"""Conversions of whole checkpoints: every target on a real model, the layouts of real producers, and what can go
wrong on the way."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import modelopt
from breccia.bridges import parts as _parts
from breccia.checkpoint import (
    Checkpoint,
    SafetensorsFile,
    SafetensorsWriter,
    convert,
    save_arrays,
    target_names,
    verify,
)
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.planning.targets import parse_target
from checkpoints import MAKERS, deepseek_v3, first_layer_of_minilm, gpt_oss_20b, modelopt_nvfp4, weight, write_shards

PLAIN = ("bf16", "fp16", "fp32")
OWN = tuple(r.name for r in breccia.recipes.all_recipes())
FIRST = [name for name in target_names() if ":" in name or name in PLAIN + OWN]


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layer_of_minilm(tmp_path_factory.mktemp("minilm") / "in")


@pytest.mark.parametrize("to", [name for name in FIRST if name not in ("gpt-oss:mxfp4", "deepseek:mxfp4")])
@pytest.mark.in_turn
def test_a_real_model_to_every_target_and_back(to: str, minilm: Path, tmp_path: Path) -> None:
    source = minilm
    report = convert(source, tmp_path / "q", to)
    said = ("left out: GGUF has no place", "NVFP4 has one level", "_K takes 256 columns at a time, there are 384")
    assert all(any(text in note for text in said) for note in report["notes"])
    assert not report["notes"] or to.startswith("gguf")
    result = verify(source, tmp_path / "q")
    assert result["ok"], result["failed"]
    convert(tmp_path / "q", tmp_path / "back", "fp32")
    back = verify(tmp_path / "q", tmp_path / "back", min_sqnr_db=1e9)
    assert back["ok"]
    assert all(t["equal"] for t in back["tensors"])
    if to in PLAIN or parse_target(to).bridge.container.whole:
        return
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "quantization_config" in config
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    found = {f.name: f for f in Checkpoint(tmp_path / "q").found}
    quantized = [f for f in found.values() if f.format != "plain"]
    assert len(quantized) == 6
    assert all(f.format == to.split(":", maxsplit=1)[0] for f in quantized if ":" in to)


def test_folders_of_a_sentence_model_come_along(tmp_path: Path) -> None:
    """How it pools, and the weights of its further layers; other programs' copies of the model do not."""
    source = first_layer_of_minilm(tmp_path / "in")
    files = {
        "1_Pooling/config.json": "{}",
        "2_Dense/model.safetensors": "weights",
        "2_Dense/config.json": "{}",
        "onnx/model.onnx": "the whole model once more",
        "onnx/config.json": "{}",
        ".git/config": "",
        "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
    }
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "linked").symlink_to(tmp_path)
    convert(source, tmp_path / "out", "mxfp8")
    there = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    kept = set(files) - {"onnx/model.onnx", ".git/config"}
    assert there == kept | {"model.safetensors", "config.json", "tokenizer.json", "breccia.json"}


def test_a_model_without_a_place_in_the_format_stays_and_is_told(minilm: Path, tmp_path: Path) -> None:
    """GPT-OSS' format has experts alone, DeepSeek's MXFP4 is V4's."""
    with pytest.raises(ValueError, match=r"MXFP4 is the form of DeepSeek V4's experts, .*, got 'bert'"):
        convert(minilm, tmp_path / "q", "deepseek:mxfp4")
    report = convert(minilm, tmp_path / "q", "gpt-oss:mxfp4")
    assert set(report["tensors"]) == {"copy"}
    assert report["notes"] == ["no tensor is quantized: none of the source has a place in gpt-oss:mxfp4"]
    assert "quantization_config" not in json.loads((tmp_path / "q" / "config.json").read_text())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("to", ["bf16", "fp32", "compressed-tensors", "torchao", "breccia", "mlx", "deepseek", "gguf"])
def test_producers_layouts(kind: str, to: str, tmp_path: Path) -> None:
    source = MAKERS[kind](tmp_path / "in")
    assert {f.format for f in Checkpoint(source).found} == {kind, "plain"}
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    report = convert(source, out, to)
    result = verify(source, out, min_sqnr_db=10 if to in ("mlx", "gguf", "deepseek") else 30)
    assert result["ok"], (result["failed"], result["missing"])
    if report["tensors"].get("repack"):
        assert all(t["equal"] or t["sqnr_db"] > 120 for t in result["tensors"])  # a divisor's last bit at most
    if to != "gguf":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            assert name in SafetensorsFile(out / file).entries
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


CHAINS = {
    "nvfp4": (modelopt_nvfp4, ["compressed-tensors", "torchao", "breccia", "gguf", "modelopt"]),
    "mxfp4": (gpt_oss_20b, ["compressed-tensors", "mlx", "torchao", "gguf", "breccia", "gpt-oss"]),
    "fp8": (deepseek_v3, ["compressed-tensors", "torchao", "modelopt", "breccia", "deepseek"]),
}


@pytest.mark.parametrize("grid", CHAINS)
def test_repacks_lose_no_byte(grid: str, tmp_path: Path) -> None:
    """Through every format that shares the value grid, and back: the bytes one began with."""
    make, chain = CHAINS[grid]
    source = make(tmp_path / "0")
    last = source
    for i, to in enumerate(chain):
        out = tmp_path / f"{i + 1}{'.gguf' if to == 'gguf' else ''}"
        report = convert(last, out, to)
        kept = {"copy", "repack", "divide", "multiply"}  # the last two of scales of inputs
        assert set(report["tensors"]) <= kept, (to, report["tensors"])
        last = out
    a, b = Checkpoint(source), Checkpoint(last)
    for name in a.entries:
        if not name.endswith("input_scale"):
            assert a.array(name).tobytes() == b.array(name).tobytes(), name


def test_int4_repacks(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "1.safetensors", "awq")
    first = Checkpoint(tmp_path / "1.safetensors")
    for i, to in enumerate(["compressed-tensors", "torchao", "gptq", "breccia", "awq"]):
        report = convert(tmp_path / f"{i + 1}.safetensors", tmp_path / f"{i + 2}.safetensors", to)
        assert report["tensors"] == {"repack": 1}
    last = Checkpoint(tmp_path / "6.safetensors")
    for name in first.entries:
        assert first.array(name).tobytes() == last.array(name).tobytes(), name


@pytest.mark.parametrize("shape", [(640, 1024), (3, 96, 1024)])
def test_pieces_make_the_whole(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format's bytes are the same whether a tensor is moved at once or in runs of rows."""
    repack_module = importlib.import_module("breccia.checkpoint.writing.repack")
    save_arrays({"a.weight": weight(*shape)}, tmp_path / "a.safetensors")
    for i, to in enumerate(name for name in target_names() if ":" in name):
        suffix = ".gguf" if to.startswith("gguf") else ".safetensors"
        outs = [tmp_path / f"{i}-{kind}{suffix}" for kind in ("pieces", "whole")]
        for piece, out in zip((1 << 14, 1 << 40), outs, strict=True):
            monkeypatch.setattr(repack_module, "_PIECE", piece)
            convert(tmp_path / "a.safetensors", out, to)
        assert outs[0].read_bytes() == outs[1].read_bytes(), to


def test_e8m0_tiles_become_float_tiles_without_loss(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(300, 520)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "deepseek:block-ue8m0")
    report = convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "compressed-tensors:fp8-block")
    assert report["tensors"] == {"requantize": 1}
    assert verify(tmp_path / "b.safetensors", tmp_path / "c.safetensors", min_sqnr_db=1e9)["ok"]


def test_options_are_checked_before_any_work(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    for to, options, argument in [
        ("nope", {}, "to"),
        ("modelopt:nope", {}, "to"),
        ("mxfp8", {"group_size": 64}, "group_size"),
    ]:
        with pytest.raises(ValueError, match=f"^{argument} must "):
            convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to, **options)
    (tmp_path / "there").touch()
    with pytest.raises(FileExistsError, match="must not be there"):
        convert(tmp_path / "a.safetensors", tmp_path / "there", "bf16")
    with pytest.raises(FileNotFoundError, match="there is no"):
        convert(tmp_path / "none", tmp_path / "b.safetensors", "bf16")


@pytest.mark.parametrize(
    "to", ["bf16", "fp32", "compressed-tensors:nvfp4", "compressed-tensors:fp8", "int8", "comfyui"]
)
def test_a_scale_of_the_input_is_multiplied_into_the_weight(to: str, tmp_path: Path) -> None:
    scaled = breccia.cast(weight(64, 256), breccia.NVFP4BlockScaling())
    parts = _parts.materialize(modelopt.lay_out(scaled))
    factor = np.random.default_rng(0).uniform(0.5, 2, 256).astype(np.float32)
    arrays = {f"a.{role}": array for role, array in parts.items()} | {"a.input_scale": np.float32(0.5).reshape(())}
    source = tmp_path / "a.safetensors"
    save_arrays({**arrays, "a.pre_quant_scale": factor}, source)
    report = convert(source, tmp_path / "b.safetensors", to)
    assert "scales of the inputs of 1 layers (pre_quant_scale) are multiplied into their weights" in report["notes"]
    made = Checkpoint(tmp_path / "b.safetensors")
    (found,) = made.found
    wanted = breccia.dequantize(scaled) * factor
    got = values(made.load(found))
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert error <= {"bf16": 3e-3, "fp32": 0, "int8": 0.02}.get(to, 0.12)
    assert verify(source, tmp_path / "b.safetensors")["ok"]
    save_arrays({"a.weight": wanted}, tmp_path / "floats.safetensors")
    assert verify(tmp_path / "floats.safetensors", source, min_sqnr_db=100)["ok"]


def test_a_scale_of_the_input_is_not_lost(tmp_path: Path) -> None:
    parts = _parts.materialize(modelopt.lay_out(breccia.cast(weight(64, 256), breccia.NVFP4BlockScaling())))
    arrays = {f"a.{role}": array for role, array in parts.items()}
    save_arrays({**arrays, "a.pre_quant_scale": np.ones(256, np.float32)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "modelopt")
    assert "a.pre_quant_scale" in SafetensorsFile(tmp_path / "b.safetensors")
    save_arrays({**arrays, "a.pre_quant_scale": np.ones(255, np.float32)}, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"'a.weight': pre_quant_scale must have 256 entries, got shape \(255,\)"):
        convert(tmp_path / "odd.safetensors", tmp_path / "c.safetensors", "bf16")
    floats = {"a.weight": weight(64, 256), "a.pre_quant_scale": np.ones(256, np.float32)}
    save_arrays(floats, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"'a.pre_quant_scale' must be absent, or --to modelopt"):
        convert(tmp_path / "plain.safetensors", tmp_path / "d.safetensors", "bf16")
    assert not (tmp_path / "c.safetensors").exists()
    assert not (tmp_path / "d.safetensors").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = modelopt_nvfp4(tmp_path / "in")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space left"):
                convert(source, tmp_path / "out", "bf16")
        assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_killed_conversion_goes_on(tmp_path: Path) -> None:
    arrays = {f"layers.{i}.weight": weight(256, 512) for i in range(8)}
    source = write_shards(tmp_path / "in", [arrays, {"z.weight": weight(64, 64)}], {})
    code = (
        "import sys, os, signal;"
        "import importlib; m = importlib.import_module('breccia.checkpoint.writing.convert');"
        "m._SYNC_EVERY = 1; real = m.execute; n = [0]\n"
        "def slow(*a):\n"
        "    n[0] += 1\n"
        "    if n[0] == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(*a)\n"
        "m.execute = slow; m.convert(sys.argv[1], sys.argv[2], 'mxfp8')"
    )
    run = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "out")], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial" / "journal").read_bytes().count(b'["tensor"') == 4
    import breccia.checkpoint.writing.execute as execute_module

    calls = []
    real = execute_module.repack_pieces

    def count(*args: Any) -> None:
        calls.append(args)
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "repack_pieces", count)
        convert(source, tmp_path / "out", "mxfp8")
    assert len(calls) == 5  # four of nine were there
    assert verify(source, tmp_path / "out")["ok"]
    convert(source, tmp_path / "again", "mxfp8")
    for file in (tmp_path / "again").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    assert not (tmp_path / ".out.partial").exists()


def peak_of_converting(source: Path, out: Path, to: str) -> int:
    """Bytes that a conversion takes in a process of its own, beyond what it had after its imports."""
    code = (
        "import sys, resource; from breccia.checkpoint import convert;"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "convert(*sys.argv[1:], threads=1);"
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base))"
    )
    command = [sys.executable, "-c", code, str(source), str(out), to]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kB there")
def test_memory_is_bounded(tmp_path: Path) -> None:
    largest = 4096 * 4096 * 4
    one_tensor = np.zeros((4096, 4096), np.float32)
    one_tensor[:] = weight(1, 4096)
    save_arrays({f"layers.{i}.weight": one_tensor for i in range(6)}, tmp_path / "a.safetensors")
    for i, to in enumerate(["compressed-tensors:nvfp4", "bf16", "gptq:int4"]):
        assert peak_of_converting(tmp_path / "a.safetensors", tmp_path / f"o{i}", to) < 2 * largest + (256 << 20), to


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kB there")
@pytest.mark.parametrize("shape", [(16, 2048, 8192), (32768, 8192)])
def test_a_tensor_may_be_larger_than_memory(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Experts in one tensor, and a matrix: 512 MiB take less than half of that, to codes and from codes."""
    values = (np.random.default_rng(0).standard_normal((2048, 8192), np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    name = "model.layers.0.mlp.experts.gate_up_proj" if len(shape) == 3 else "model.layers.0.mlp.up_proj.weight"
    writer = SafetensorsWriter(tmp_path / "in.safetensors", {name: ("BF16", shape)})
    for i in range(16):
        writer.write(name, values, i * values.nbytes)
    writer.commit()
    writer.close()
    steps = [("in", to) for to in ("nvfp4", "fp8", "mxfp8", "int4", "gguf:q8_0")]
    steps += [("mxfp8", to) for to in ("nvfp4", "bf16", "compressed-tensors:mxfp8")] + [("fp8", "bf16")]
    for source, to in steps:
        suffix = ".gguf" if "gguf" in to else ".safetensors"
        out = tmp_path / (f"{source}-{to}{suffix}" if source != "in" else f"{to}{suffix}")
        peak = peak_of_converting(tmp_path / f"{source}.safetensors", out, to)
        assert peak < 256 << 20, f"{source} to {to} takes {peak >> 20} MiB"


def test_numpy_alone_is_enough(tmp_path: Path) -> None:
    """Without ml_dtypes, torch and every other peer: BF16 and FP8 in, BF16 and FP8 out, the same bytes."""
    source = deepseek_v3(tmp_path / "in")
    code = (
        "import sys\n"
        "for name in ('ml_dtypes', 'torch', 'jax', 'mlx', 'safetensors', 'gguf'): sys.modules[name] = None\n"
        "from breccia.checkpoint import convert, verify, inspect\n"
        "a, *outs = sys.argv[1:]\n"
        "targets = ('bf16', 'compressed-tensors:int4', 'modelopt:fp8-block', 'mxfp8')\n"
        "for to, out in zip(targets, outs): convert(a, out, to)\n"
        "assert verify(a, outs[0])['ok'] and inspect(outs[1])['tensors']\n"
    )
    for run in ("bare", "full"):
        outs = [str(tmp_path / f"{run}{i}") for i in range(4)]
        text = code if run == "bare" else code.replace("sys.modules[name] = None", "pass")
        subprocess.run([sys.executable, "-W", "error", "-c", text, str(source), *outs], check=True)
    for i in range(4):
        for file in sorted((tmp_path / f"full{i}").glob("*.safetensors")):
            assert file.read_bytes() == (tmp_path / f"bare{i}" / file.name).read_bytes()
