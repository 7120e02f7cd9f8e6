# SPDX-License-Identifier: Apache-2.0
"""Weights of infinities, NaN, the largest and the smallest floats go through every target without a warning."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from breccia.checkpoint import convert, inspect, save_arrays, target_names, verify
from checkpoints import weight

TARGETS = [name for name in target_names() if name not in ("awq", "breccia", "gguf", "deepseek:mxfp4")]
# GGUF types whose scales are float16.
NARROW = tuple(
    name for name in TARGETS if name.startswith(("gguf:q", "gguf:iq")) and name not in ("gguf:q8_0", "gguf:q4_0")
)
LARGEST = np.finfo(np.float32).max


def odd_weights() -> dict[str, np.ndarray]:
    plain = weight(256, 256)
    infinite, partly = plain.copy(), plain.copy()
    infinite[0, 0], infinite[1, 1], infinite[2] = np.inf, -np.inf, np.nan
    partly[:, 0] = LARGEST
    made = {
        "infinite": infinite,
        "huge": plain / np.abs(plain).max() * LARGEST,
        "tiny": plain * np.float32(1e-42),
        "zero": np.zeros_like(plain),
        "partly": partly,
    }
    return {f"model.layers.{i}.mlp.up_proj.weight": array for i, array in enumerate(made.values())}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("all", "small"):
        made[name] = tmp_path_factory.mktemp(name)
        arrays = {key: array for key, array in odd_weights().items() if name == "all" or np.abs(array).max() < 1}
        save_arrays(arrays, made[name] / "model.safetensors")
        (made[name] / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return made


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.in_turn
def test_every_target_takes_them(to: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["small" if to in NARROW else "all"]
    out, back = (tmp_path / f"{name}{'.gguf' if to.startswith('gguf') else ''}" for name in ("out", "back"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(source, out, to)
        assert not verify(source, out)["missing"]
        assert inspect(out)["total"]["tensors"] == (2 if to in NARROW else 5)
        convert(out, back.with_suffix(".safetensors") if out.is_file() else back, "bf16")
