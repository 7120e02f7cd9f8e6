# SPDX-License-Identifier: Apache-2.0
"""MLX checkpoints that breccia wrote, opened by mlx-lm: every target, of a dense model and of models with experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
pytest.importorskip("torch")
import mlx.core as mx
import mlx_lm.utils as mlx_lm
from breccia import bridges
from breccia.checkpoint import convert
from tiny_models import EXPERTS, MODELS, random_model, transformers

TOKENS = list(range(3, 40))
GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1}
TRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": MODELS["llama"],
    "qwen3-moe": MODELS["qwen3-moe"],
    "mixtral": ("Mixtral", EXPERTS),
    "gpt-oss": MODELS["gpt-oss"],
    "glm4-moe": ("Glm4Moe", {**GLM, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
}
EXACT = {"gpt-oss": 3e-3}  # whose sinks and biases mlx-lm keeps in bfloat16


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's directory by name, in bfloat16, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def source(name: str) -> Path:
        if name not in made:
            made[name] = folder / name
            random_model(*TRIED[name]).save_pretrained(made[name])
        return made[name]

    return source


def in_transformers(path: Path) -> Any:
    import torch

    model = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits.numpy()


def in_mlx_lm(path: Path) -> Any:
    model, _ = mlx_lm.load_model(path)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


@pytest.mark.in_turn
@pytest.mark.parametrize("key", bridges.bridge("mlx").recipes)
@pytest.mark.parametrize("name", TRIED)
def test_it_computes_with_the_weights_that_were_written(name: str, key: str, sources: Any, tmp_path: Path) -> None:
    source, out = sources(name), tmp_path / "out"
    report = convert(source, out, f"mlx:{key}")
    assert report["tensors"]["cast"] >= 14, "experts are quantized, too"
    convert(out, tmp_path / "floats", "fp32")
    wanted, got = in_transformers(tmp_path / "floats"), in_mlx_lm(out)
    off = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert off < EXACT.get(name, 2e-5), off
    lost = np.linalg.norm(wanted - in_transformers(source)) / np.linalg.norm(wanted)
    assert lost > 1e-3, "nothing was quantized"
