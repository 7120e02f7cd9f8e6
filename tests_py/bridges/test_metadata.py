# SPDX-License-Identifier: Apache-2.0
"""What files say of their tensors, one field at a time made missing, of another type, huge, negative or nested: each
file is refused with one line, or its tensors have the values that they had."""

import copy
import json
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import breccia
import hostile.methods
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges import OutsideTensor
from breccia.checkpoint import convert, save_arrays
from breccia.checkpoint.reading.source import Checkpoint

MISSING = object()
DEEP: Any = json.loads("[" * 60 + "]" * 60)
ODD = [MISSING, None, True, False, "x", "", -1, 0, 1, 7, 2**31, 2**70, -(2**70), 0.5, float("inf"), [], {}, DEEP]


def weights() -> dict[str, Any]:
    random = np.random.default_rng(5)
    return {
        "model.layers.0.mlp.down_proj.weight": random.normal(0, 0.1, (128, 256)).astype(np.float32),
        "model.layers.0.input_layernorm.weight": np.ones(256, np.float32),
    }


def experts() -> dict[str, Any]:
    random = np.random.default_rng(6)
    return {"model.layers.0.mlp.experts.down_proj": random.normal(0, 0.1, (2, 64, 64)).astype(np.float32)}


def written(folder: Path, target: str) -> Path:
    """A small model in a format."""
    source = folder / "source"
    source.mkdir()
    save_arrays(experts() if target.startswith("gpt-oss") else weights(), source / "model.safetensors")
    (source / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v4" if target.startswith("deepseek") else "test"})
    )
    convert(source, folder / "good", target)
    return folder / "good"


def targets() -> Iterator[str]:
    """Every recipe that a format of safetensors files has; breccia's own, by the recipes' names."""
    for name, bridge in bridges.registry().items():
        if bridge.writes and not bridge.container.whole:
            yield from (f"{name}:{key}" for key in bridge.recipes)
    yield from ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8-block", "int8", "int4", "int4:asym:32")


READ_ONLY = {name: getattr(hostile.methods, name) for name in ("NF4", "NESTED")}


def read_only(folder: Path, name: str) -> Path:
    """A file of a format that is not written here."""
    good = folder / "good"
    good.mkdir()
    (good / "model.safetensors").write_bytes(hostile.methods.tensors(READ_ONLY[name]))
    (good / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    return good


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of JSON, that of the whole first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    whole = copy.deepcopy(value)
    *outer, last = path
    inner = whole
    for key in outer:
        inner = inner[key]
    if to is MISSING:
        del inner[last]
    else:
        inner[last] = to
    return whole


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    for path in places(value):
        there = at(value, path)
        for to in ODD:
            if isinstance(to, bool) and isinstance(there, bool):
                continue  # another statement of the same kind, which no reader can tell from a true one
            if path or to is not MISSING:
                name = "missing" if to is MISSING else "deep" if to is DEEP else repr(to)
                yield f"{'.'.join(map(str, path))} = {name}", changed(value, path, to)


def parsed(text: str | bytes) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, UnicodeDecodeError):
        return None
    return value if isinstance(value, (dict, list)) else None


class File:
    """A safetensors file and config.json, to be written again with one thing changed."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.header = json.loads(raw[8 : 8 + length])
        self.metadata = self.header.pop("__metadata__", {})
        self.tensors = {n: raw[8 + length :][slice(*spec["data_offsets"])] for n, spec in self.header.items()}
        self.config = json.loads((folder / "config.json").read_text())

    def write(self, folder: Path, metadata: Any, tensors: dict[str, bytes], config: Any) -> None:
        header, data = {"__metadata__": metadata}, b""
        for name, raw in tensors.items():
            spec = {**self.header[name], "data_offsets": [len(data), len(data) + len(raw)]}
            if raw != self.tensors[name]:
                spec["shape"] = [len(raw)]
            header[name] = spec
            data += raw
        text = json.dumps(header).encode()
        for name, content in (
            ("model.safetensors", struct.pack("<Q", len(text)) + text + data),
            ("config.json", json.dumps(config).encode()),
        ):
            (folder / name).unlink(missing_ok=True)  # a file that is cut and written again goes to the disk at once
            (folder / name).write_bytes(content)

    def bad(self, folder: Path) -> Iterator[str]:
        """Write each bad file and say what is wrong with it."""
        for key, text in self.metadata.items():
            if (value := parsed(text)) is not None:
                for what, odd in variants(value):
                    self.write(folder, {**self.metadata, key: json.dumps(odd)}, self.tensors, self.config)
                    yield f"metadata {key}: {what}"
            without = {k: v for k, v in self.metadata.items() if k != key}
            for what, metadata in (("missing", without), ("no JSON", {**self.metadata, key: "{"})):
                self.write(folder, metadata, self.tensors, self.config)
                yield f"metadata {key} {what}"
        for name, raw in self.tensors.items():
            if self.header[name]["dtype"] == "U8" and (value := parsed(raw)) is not None:
                for what, odd in variants(value):
                    self.write(folder, self.metadata, {**self.tensors, name: json.dumps(odd).encode()}, self.config)
                    yield f"tensor {name}: {what}"
        for what, config in variants(self.config):
            if isinstance(config, dict):
                self.write(folder, self.metadata, self.tensors, config)
                yield f"config.json: {what}"


def values(folder: Path) -> dict[str, Any]:
    """The tensors that a bridge reads, as float32. Only ValueError may come out."""
    checkpoint = Checkpoint(folder)
    result = {}
    for found in checkpoint.found:
        if found.format == "plain":
            continue
        loaded = checkpoint.load(checkpoint.refined(found))
        if isinstance(loaded, breccia.ScaledTensor):
            loaded = breccia.dequantize(loaded)
        elif isinstance(loaded, OutsideTensor):
            loaded = loaded.dequantize()
        result[found.name] = np.asarray(loaded, np.float32)
    checkpoint.close()
    return result


# A GPTQ checkpoint that does not say so is of the first version, as those of its first program are.
SAYS_NOTHING = ("quantization_config.checkpoint_format", "quantization_config", "")
CONVENTIONS = {
    "gptq:int4-asym": {f"config.json: {key} = {odd}" for key in SAYS_NOTHING for odd in ("missing", "None", "{}")}
}


def check(good: Path, bad: Path, part: str, turn: int, conventions: Collection[str] = ()) -> None:
    """Some of the changes, one of every four, or the whole; which ones, depends on the turn."""
    wanted, file, count = values(good), File(good), 0
    assert wanted
    bad.mkdir()
    wrong = []
    for i, what in enumerate(file.bad(bad)):
        if part == "some" and (i + i // 4 + turn) % 4:
            continue
        count += 1
        try:
            got = values(bad) if what not in conventions else {}
        except ValueError as error:
            text = str(error)
            if not text or "\n" in text or not text.isprintable():
                wrong.append(f"{what}: says {text!r}")
            continue
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        for name, array in got.items():
            same = name in wanted and array.shape == wanted[name].shape
            if not (same and np.array_equal(array, wanted[name], equal_nan=True)):
                wrong.append(f"{what}: other values")
    assert i > 20 and count >= i // 4
    assert not wrong, "\n" + "\n".join(wrong[:60]) + f"\n{len(wrong)} of {count}"


PART = pytest.mark.parametrize("part", ["some", pytest.param("whole", marks=pytest.mark.slow)])


@pytest.mark.in_turn
@PART
@pytest.mark.parametrize(("turn", "target"), list(enumerate(targets())))
def test_odd_metadata_is_refused_or_read_right(turn: int, target: str, part: str, tmp_path: Path) -> None:
    check(written(tmp_path, target), tmp_path / "bad", part, turn, CONVENTIONS.get(target, ()))


@pytest.mark.in_turn
@PART
@pytest.mark.parametrize(("turn", "name"), list(enumerate(READ_ONLY)))
def test_odd_metadata_of_formats_that_are_read_only(turn: int, name: str, part: str, tmp_path: Path) -> None:
    check(read_only(tmp_path, name), tmp_path / "bad", part, turn)


def test_every_format_of_safetensors_files_is_tried() -> None:
    tried = {target.partition(":")[0] for target in targets()} | {"breccia", "bitsandbytes"}
    assert tried >= {
        name for name, bridge in bridges.registry().items() if bridge.writes and not bridge.container.whole
    }


@pytest.mark.parametrize("kind", [{}, [], None, 5])
def test_an_odd_model_type_is_none_that_is_known(kind: Any, tmp_path: Path) -> None:
    """Beside experts in one tensor, whose order of axes follows from it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = np.zeros((2, 64, 128), ml_dtypes.float8_e4m3fn)
    save_arrays({name: codes, f"{name}_weight_scale": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}, "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps({**said, "text_config": {"model_type": kind}}))
    assert {one.name: one.kind for one in Checkpoint(tmp_path).found}[name] == "fp8"
