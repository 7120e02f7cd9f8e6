# SPDX-License-Identifier: Apache-2.0
"""A model of one block with attention and two experts, largest magnitudes of its inputs, and ten kinds of quantized
models."""

import json
import sys

import numpy as np
import pytest
from breccia.checkpoint import convert, save_arrays
from breccia.moments import Moments, save_moments
from checkpoints import deepseek_v3, gpt_oss_20b, weight

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

N, K = 64, 256
ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
EXPERTS = [f"model.layers.0.mlp.experts.{i}.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]
MODULES = [*ATTENTION, *EXPERTS]
OTHERS = ["model.embed_tokens", "lm_head", "model.layers.0.mlp.gate"]
CONFIG = {"model_type": "llama", "hidden_size": K}
# Name → the format it is of, its rules, and what else it is made with.
MADE = {
    "NVFP4 × NVFP4 local": ("compressed-tensors", ["*=nvfp4,inputs=local"], {}),
    "FP8 per row × FP8 per token dynamic": ("compressed-tensors", ["*=fp8-row,inputs=dynamic"], {}),
    "FP8 × FP8 static": ("modelopt", ["*=fp8,inputs=static"], {}),
    "INT4 g128, KV FP8": ("compressed-tensors", ["*=int4:128,inputs=none"], {"kv": "fp8"}),
    "attention FP8 static, experts NVFP4 local, KV FP8": (
        "modelopt",
        ["*.self_attn.*=fp8,inputs=static", "*.experts.*=nvfp4,inputs=local"],
        {"kv": "fp8"},
    ),
    "INT8 × INT8 per token dynamic": ("compressed-tensors", ["*=int8,inputs=dynamic"], {}),
    "MLX of 4 and 8 bits": ("mlx", ["*.o_proj=int8:64", "*=int4:64"], {}),
    "GGUF Q4_K with Q6_K": ("gguf", ["*.v_proj=q6_k", "*=q4_k"], {}),
}
OF_CHECKPOINTS = {"MXFP4 experts (gpt-oss)": gpt_oss_20b, "FP8 128 × 128, powers of two (DeepSeek)": deepseek_v3}
SOURCES = [*MADE, *OF_CHECKPOINTS]


def write_model(folder, modules=None):
    """In high precision."""
    folder.mkdir()
    arrays = {f"{name}.weight": weight(N, K) for name in [*(modules or MODULES), *OTHERS]}
    arrays["model.norm.weight"] = np.ones(K, np.float32)
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_moments(path):
    """Of every layer another one; the text never chose one expert."""
    made = {}
    for i, module in enumerate(MODULES):
        amax = 0.0 if "experts.1.up" in module else 2.0 + i
        made[module] = Moments(np.ones(K, np.float32), np.int64(4), amax=np.float32(amax))
    save_moments(made, path)
    return path


def write_source(name, folder):
    """One of the ten kinds, in a folder of them: where it is."""
    place = folder / str(SOURCES.index(name))
    if name in OF_CHECKPOINTS:
        OF_CHECKPOINTS[name](place)
        if name.startswith("FP8"):
            config = json.loads((place / "config.json").read_text())
            config["quantization_config"]["scale_fmt"] = "ue8m0"
            (place / "config.json").write_text(json.dumps(config))
        return place
    to, rules, options = MADE[name]
    model = write_model(folder / f"{place.name}-bf16", ATTENTION if to in ("mlx", "gguf") else None)
    out = place.with_suffix(".gguf") if to == "gguf" else place
    convert(model, out, to, rules=rules, amax=_moments_for(rules, folder), **options)
    return out


def _moments_for(rules, folder):
    """A file of magnitudes where a static scale needs one."""
    needed = any(rule.endswith(("=static", "=local")) for rule in rules)
    return write_moments(folder / "m.safetensors") if needed else None
