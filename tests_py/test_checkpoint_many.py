# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many small tensors."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, plan
from breccia.checkpoint.writing import outputs

VALUES: list[Any] = [
    {},
    {"metadata": {"total_size": 12}, "weight_map": {"a.weight": "x.safetensors", 'ü"\n': "y"}},
    {"a": {"b": [1, 2.5, None, True, {"c": []}], "d": {}}, "e": (1, 2), "f": 1e-06, "g": float("inf"), "h": "\u2028"},
]


@pytest.mark.always
@pytest.mark.parametrize("value", VALUES)
def test_json_is_written_as_pythons_encoder_does(value: Any) -> None:
    assert outputs._indented(value) == json.dumps(value, indent=2, ensure_ascii=False)


def sparse(path: Path, shards: int, each: int, shape: tuple[int, int]) -> Path:
    """A checkpoint whose tensors are holes of its files but for the first of each, which is random."""
    path.mkdir()
    size, weights = 2 * shape[0] * shape[1], {}
    for shard in range(shards):
        names = [f"model.layers.{shard}.mlp.experts.{i}.up_proj.weight" for i in range(each)]
        header: dict[str, Any] = {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        bits = np.random.default_rng(shard).normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16
        with (path / file).open("wb") as raw:
            raw.write(struct.pack("<Q", len(text)) + text + bits.astype(np.uint16).tobytes())
            raw.truncate(8 + len(text) + each * size)
        weights |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.slow
def test_parts_of_a_terabyte(tmp_path: Path) -> None:
    """91,128 tensors in 163 files, in as many parts: three are run, and each plans all, in bounded time."""
    source = sparse(tmp_path / "in", 163, 559, (64, 64))
    pieces = plan(source, tmp_path / "out", "nvfp4", 163)
    assert sum(piece.tensors for piece in pieces) == 163 * 559
    assert max(piece.cost for piece in pieces) <= 1.02 * min(piece.cost for piece in pieces)
    for piece in (pieces[0], pieces[81], pieces[162]):
        begin = time.process_time()
        assert piece.run(threads=1)["tensors"] == piece.tensors
        assert time.process_time() - begin < 60
        made = next((tmp_path / ".out.parts" / f"{piece.part}-of-163").glob("model-*.safetensors"))
        with SafetensorsFile(made) as file, SafetensorsFile(source / made.name) as raw:
            (name, *_) = [
                name.removesuffix(".data") for name in file if name.endswith(".experts.0.up_proj.weight.data")
            ]
            wanted = breccia.cast((raw[name].view(np.uint16).astype(np.uint32) << 16).view(np.float32), "nvfp4")
            assert np.array_equal(file[f"{name}.data"], wanted.data)
