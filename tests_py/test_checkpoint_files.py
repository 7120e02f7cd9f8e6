# SPDX-License-Identifier: Apache-2.0
"""Files that are read: every dtype in place, hostile and cut ones, breccia's own of every version."""

import json
import struct
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import frameworks
from breccia.checkpoint import (
    Checkpoint,
    SafetensorsFile,
    SafetensorsWriter,
    convert,
    save_arrays,
    verify,
)
from breccia.checkpoint.files.dtypes import DTYPES
from checkpoints import modelopt_nvfp4, weight

RNG = np.random.default_rng(0)


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


# What a framework has no type of that width for by default.
NARROWED = {"torch": set(), "jax": {"F64", "I64", "U64"}, "mlx": {"F64"}}


@pytest.mark.parametrize("framework", NARROWED)
def test_every_dtype_in_every_framework(framework: str, tmp_path: Path) -> None:
    """The file's bytes, in the framework's own type where it has one."""
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    raw = RNG.integers(0, 256, 48, dtype=np.uint8)
    plan = {
        name: (name, (2, 48 * 8 // row.bits // 2)) for name, row in DTYPES.items() if name not in NARROWED[framework]
    }
    with SafetensorsWriter(tmp_path / "a.safetensors", plan) as writer:
        for name in plan:
            writer.write(name, raw % 2 if name == "BOOL" else raw)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name in plan:
        array = file.load(name, framework)
        assert frameworks.of(array).__name__ == f"breccia.frameworks.{framework}"
        dtype = str(array.dtype).rpartition(".")[2]
        if framework == "torch" and DTYPES[name].torch:
            assert dtype == DTYPES[name].torch
        if framework == "jax" and DTYPES[name].bits >= 8:
            assert dtype == DTYPES[name].numpy
        assert raw_bytes(array, framework) == (raw % 2 if name == "BOOL" else raw).tobytes(), name


def raw_bytes(array: Any, framework: str) -> bytes:
    if framework == "torch":
        import torch

        return array.contiguous().view(torch.uint8).numpy().tobytes()
    if framework == "mlx":
        import mlx.core as mx

        return np.array(array if array.dtype == mx.bool_ else array.view(mx.uint8)).tobytes()
    return np.asarray(array).tobytes()


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


def test_an_index_may_not_leave_its_directory(tmp_path: Path) -> None:
    path = modelopt_nvfp4(tmp_path / "m")
    index = path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["model.layers.0.norm.weight"] = "../m/model-00001-of-00002.safetensors"
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="must be names in its directory"):
        Checkpoint(path)


@pytest.mark.parametrize("indexed", [(), ("model",), ("consolidated", "model")])
def test_the_model_is_there_once(indexed: tuple[str, ...], tmp_path: Path) -> None:
    """Mistral's folders have the model a second time, under its makers' names, in consolidated.safetensors."""
    (tmp_path / "in").mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"
    for stem, one in (("model", name), ("consolidated", "layers.0.attention.wq.weight")):
        file = tmp_path / "in" / f"{stem}.safetensors"
        save_arrays({one: weight(64, 64)}, file)
        if stem in indexed:
            file.with_suffix(".safetensors.index.json").write_text(json.dumps({"weight_map": {one: file.name}}))
    convert(tmp_path / "in", tmp_path / "out", "mxfp8")
    assert [one.name for one in Checkpoint(tmp_path / "out").found] == [name]
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


@pytest.mark.parametrize("first", [0, 1])
def test_a_numbered_file_that_is_not_there_is_named(first: int, tmp_path: Path) -> None:
    """A download that was stopped has files without the index, which comes with them in no order."""
    names = [f"model-{n:05}-of-00003.safetensors" for n in range(first, first + 3)]
    for n, name in enumerate([*names, "other.safetensors"]):
        save_arrays({f"layers.{n}.weight": weight(64, 64)}, tmp_path / name)
    assert len(Checkpoint(tmp_path).found) == 4
    for name in names[1:]:
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=rf"must have all 3 files of 'model', {name} is not there"):
            Checkpoint(tmp_path)
        save_arrays({"layers.7.weight": weight(64, 64)}, tmp_path / name)
    save_arrays({"layers.8.weight": weight(64, 64)}, tmp_path / "m-00001-of-99999999999999999.safetensors")
    with pytest.raises(ValueError, match="must have all 99999999999999999 files of 'm', m-00000000000000002-of"):
        Checkpoint(tmp_path)


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


def test_the_file_that_breccia_0_1_3_wrote(tmp_path: Path) -> None:
    """Its own bytes (data/make_breccia_0_1_3.py), to the values that it made of them."""
    from breccia.bridges import load_safetensors

    data = Path(__file__).parent / "data"
    wanted = np.load(data / "breccia_0_1_3.npz")
    tensors = load_safetensors(data / "breccia_0_1_3.safetensors")
    assert tensors.keys() == set(wanted.files)
    for name, scaled in tensors.items():
        np.testing.assert_array_equal(breccia.dequantize(scaled), wanted[name], name)
    assert SafetensorsFile(data / "breccia_0_1_3.safetensors").metadata["note"] == "by breccia 0.1.3"
    convert(data / "breccia_0_1_3.safetensors", tmp_path / "new.safetensors", "breccia")
    assert verify(data / "breccia_0_1_3.safetensors", tmp_path / "new.safetensors", min_sqnr_db=1e9)["ok"]
    for name, scaled in load_safetensors(tmp_path / "new.safetensors").items():
        np.testing.assert_array_equal(breccia.dequantize(scaled), wanted[name], name)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)]
)
def test_what_the_library_of_the_format_does_not_read_without_torch(dtype: str, bits: int, tmp_path: Path) -> None:
    """The first reason of docs/design/0007-safetensors-reader.md. Where this fails, that page wants another look."""
    library = pytest.importorskip("safetensors")
    size = 32 * bits // 8
    text = json.dumps({"w": {"dtype": dtype, "shape": [4, 8], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(size)))
    with (
        pytest.raises((AttributeError, library.SafetensorError), match=r"no attribute|not understood"),
        library.safe_open(path, "np") as file,
    ):
        file.get_tensor("w")
    assert SafetensorsFile(path)["w"].tobytes() == bytes(range(size))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_was_closed_says_so(framework: str, tmp_path: Path) -> None:
    """A descriptor of -1 would be of memory that is all zeros."""
    pytest.importorskip(framework)
    breccia.save(
        {"w": breccia.cast(np.ones((4, 32), np.float32), "mxfp8"), "b": np.ones(4)}, tmp_path / "f.safetensors"
    )
    with breccia.open(tmp_path / "f.safetensors", framework) as opened:
        assert opened["w"].shape == (4, 32)
    for read in (lambda: opened["w"], lambda: opened["b"], lambda: list(opened)):
        with pytest.raises(ValueError, match=r"f\.safetensors: must be open to be read, it was closed"):
            read()
    file = SafetensorsFile(tmp_path / "f.safetensors")
    file.close()
    for read in (lambda: file["b"], lambda: file.file.private(0, 8), lambda: file.file.read(0, 8)):
        with pytest.raises(ValueError, match="must be open to be read, it was closed"):
            read()
