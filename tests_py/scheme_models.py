# SPDX-License-Identifier: Apache-2.0
"""A model of one block with attention and two experts, and largest magnitudes of its inputs."""

import json
import sys

import numpy as np
import pytest
from breccia.checkpoint import save_arrays
from breccia.moments import Moments, save_moments
from checkpoints import weight

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

N, K = 64, 256
ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
EXPERTS = [f"model.layers.0.mlp.experts.{i}.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]
MODULES = [*ATTENTION, *EXPERTS]
OTHERS = ["model.embed_tokens", "lm_head", "model.layers.0.mlp.gate"]
CONFIG = {"model_type": "llama", "hidden_size": K}


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
