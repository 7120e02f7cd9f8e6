# SPDX-License-Identifier: Apache-2.0
"""How many Python functions of the package a warm call goes through: what a small product spends its time in."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import checkpoint

HOME = str(Path(breccia.__file__).parent)
RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 256), dtype=np.float32)
X = RNG.standard_normal((4, 256), dtype=np.float32)


def frames(call: Callable[[], Any], warm: int = 2) -> list[str]:
    """The package's functions in the order in which a call enters them."""
    for _ in range(warm):
        call()
    entered: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            entered.append(f"{frame.f_code.co_filename[len(HOME) + 1 :]}:{frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def given(framework: str) -> tuple[Any, Any]:
    """The activations and the quantized weight in a framework."""
    if framework == "numpy":
        return X, breccia.cast(W, "nvfp4")
    if framework == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(X), breccia.cast(torch.from_numpy(W), "nvfp4")
    if framework == "jax":
        jnp = pytest.importorskip("jax.numpy")
        return jnp.asarray(X), breccia.cast(jnp.asarray(W), "nvfp4")
    mx = pytest.importorskip("mlx.core")
    return mx.array(X), breccia.cast(mx.array(W), "nvfp4")


@pytest.mark.parametrize(("framework", "most"), [("numpy", 17), ("torch", 26), ("jax", 27), ("mlx", 18)])
def test_linear(framework: str, most: int) -> None:
    x, q = given(framework)
    entered = frames(lambda: breccia.linear(x, q))
    assert 0 < len(entered) <= most, entered


@pytest.mark.parametrize(("framework", "most"), [("numpy", 50), ("torch", 70)])
def test_matmul_of_a_turned_weight(framework: str, most: int) -> None:
    x, q = given(framework)
    breccia.linear(x, q)
    entered = frames(lambda: breccia.matmul(x, q.T))
    assert 0 < len(entered) <= most, entered


def test_a_slice() -> None:
    _, q = given("numpy")
    entered = frames(lambda: q[:32])
    assert 0 < len(entered) <= 21, entered


def test_a_layer() -> None:
    torch = pytest.importorskip("torch")
    layer = breccia.quantize_layer(torch.nn.Linear(256, 64), "nvfp4")
    with torch.no_grad():
        entered = frames(lambda: layer(torch.from_numpy(X)))
    assert 0 < len(entered) <= 18, entered


def test_a_compiled_layer_asks_for_the_core_tensor_once() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64))
    breccia.quantize_(layer, "nvfp4")
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        entered = frames(lambda: compiled(torch.from_numpy(X)))
    assert 0 < len(entered) <= 20, entered
    assert not [one for one in entered if one.endswith(":make_core")]


def test_a_compiled_layer_follows_its_weight() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    breccia.quantize_(layer, "nvfp4")
    compiled, x = torch.compile(layer, backend="aot_eager"), torch.from_numpy(X)
    with torch.no_grad():
        compiled(x)
        for _ in range(3):
            fresh = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
            breccia.quantize_(fresh, "nvfp4")
            layer.load_state_dict(fresh.state_dict())
            torch.testing.assert_close(compiled(x), fresh(x), rtol=0, atol=0)


def test_a_conversion(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"model.layers.0.mlp.up_proj.weight": W, "model.norm.weight": np.ones(256, np.float32)}
    checkpoint.save_arrays(tensors, source / "model.safetensors", {"format": "pt"})
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(model))
    numbers = itertools.count()
    to = "compressed-tensors:nvfp4"
    entered = frames(lambda: checkpoint.convert(source, tmp_path / str(next(numbers)), to, threads=1))
    assert 0 < len(entered) <= 782
