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
from breccia.checkpoint.device import Device
from breccia.checkpoint.planning.plan import Planner
from breccia.checkpoint.planning.request import Request
from breccia.checkpoint.planning.targets import target_names
from checkpoints import weight, write_shards


@pytest.mark.parametrize("said", [{}, {"metadata": {"total_size": 1, "by": 'ü"\n'}, "other": [1, {"a": None}]}])
def test_an_index_is_written_as_pythons_encoder_does(said: dict[str, Any], tmp_path: Path) -> None:
    shards = [{f"l.{shard}.ü.{i}.weight": weight(64, 64) for i in range(3)} for shard in range(2)]
    index = write_shards(tmp_path / "in", shards, {}) / "model.safetensors.index.json"
    index.write_text(json.dumps(said | {"weight_map": json.loads(index.read_text())["weight_map"]}))
    breccia.checkpoint.convert(tmp_path / "in", tmp_path / "out", "nvfp4")
    text = (tmp_path / "out" / index.name).read_text(encoding="utf-8")
    made = json.loads(text)
    assert text == json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    assert made.pop("weight_map").keys() == breccia.checkpoint.Checkpoint(tmp_path / "out").entries.keys()
    assert made.pop("metadata").items() >= {**said.get("metadata", {}), "total_size": made_bytes(tmp_path)}.items()
    assert made == {key: value for key, value in said.items() if key != "metadata"}


def made_bytes(folder: Path) -> int:
    """Of the tensors of an output."""
    with breccia.checkpoint.Checkpoint(folder / "out") as made:
        return sum(entry.nbytes for entry in made.entries.values())


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


MODELS = {
    "unknown": {},
    "mixture": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    "deepseek": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    "turned": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "eyes": {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {"a": 1}},
}
LAYER = (
    *("self_attn.q_proj", "self_attn.kv_b_proj", "mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.12.down_proj"),
    *("attn.c_attn", "input_layernorm", "eh_proj", "mlp.shared_expert.gate_proj", "block_sparse_moe.input_linear"),
)


@pytest.mark.parametrize("model", MODELS)
def test_tensors_of_one_kind_become_what_each_alone_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every target: a plan that remembers what becomes of tensors whose names differ by numbers, and one that does
    not. Layers 2 and 3 are past the last, and one layer has other shapes."""
    arrays: dict[str, Any] = {"model.embed_tokens.weight": (64, 128), "lm_head.weight": (64, 128)}
    for start in ("model", "language_model.model", "vision_tower"):
        for layer in range(4):
            columns = 144 if layer == 1 else 256
            arrays |= {f"{start}.layers.{layer}.{part}.weight": (128, columns) for part in LAYER}
            arrays |= {f"{start}.layers.{layer}.input_layernorm.weight": (64,), f"{start}.{layer}.mlp1.3.bias": (16,)}
    arrays = {name: np.zeros(shape, np.float16) for name, shape in arrays.items()}
    config = {**MODELS[model], "num_hidden_layers": 2}
    source = write_shards(tmp_path / "in", [arrays], config)
    remember = Planner._remember_for
    plans: list[Any] = []
    for alike in (True, False):

        def look(self: Planner, target: Any, alike: bool = alike) -> None:
            remember(self, target)
            self._alike &= alike

        monkeypatch.setattr(Planner, "_remember_for", look)
        plans.append({})
        for to in target_names():
            request = Request(to)
            try:
                with request.opened(source, request.target(Device())) as (checkpoint, target):
                    made = Planner(checkpoint, target).plan(tmp_path / "out.gguf")
                    said = [
                        (c.found, c.action, c.outputs, c.recipe, c.metadata, c.note, c.turned) for c in made.choices
                    ]
                    plans[-1][to] = made.notes, made.config, said, made.nbytes
            except ValueError as error:
                plans[-1][to] = str(error)
    assert plans[0] == plans[1]
    assert sum(isinstance(one, tuple) for one in plans[0].values()) > 40
