# SPDX-License-Identifier: Apache-2.0
"""Which of a serving program's classes a layer is to get, by the scheme of the checkpoint alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import to_compressed_tensors
from breccia.checkpoint import Checkpoint, convert, save_arrays
from breccia.schemes import Activations
from checkpoints import weight
from scheme_models import ATTENTION, SOURCES, K, N, write_source

torch = pytest.importorskip("torch")

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def said_of(name: str, to: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json says of one of the ten kinds in a format, and the rule of each quantized matrix; names of parts
    that a program fuses stand for the whole, too."""
    source = write_source(name, folder)
    convert(source, folder / "out", to)
    checkpoint, scheme = Checkpoint(folder / "out"), breccia.load_scheme(folder / "out")
    found = [one for one in checkpoint.found if one.format != "plain" and len(one.shape) == 2]
    rules = {one.name.removesuffix(".weight"): scheme.rule(one.name.removesuffix(".weight")) for one in found}
    for module, rule in list(rules.items()):
        at, _, last = module.rpartition(".")
        whole = next((whole for whole, parts in FUSED.items() if last == parts[0] and "experts" not in at), None)
        if whole is not None and all(f"{at}.{part}" in rules for part in FUSED[whole]):
            rules[f"{at}.{whole}"] = rule
    return checkpoint.quantization, rules


def when_of(rule: Any) -> str:
    """How a rule's inputs are: "static", "dynamic", "local" or ""."""
    return rule.inputs.when if isinstance(rule.inputs, Activations) else ""


def stand_ins(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a module's classes of layers, which choose kernels of a GPU: the same names, which keep what they are
    called with."""
    for name in [name for name in vars(module) if name.startswith("CompressedTensorsW")]:
        inside = {"__init__": _keep, "get_min_capability": classmethod(lambda cls: 70)}
        monkeypatch.setattr(module, name, type(name, (), inside))


def _keep(self: Any, *args: Any, **named: Any) -> None:
    self.__dict__.update(named)


def wanted(rule: Any) -> tuple[str, dict[str, Any]]:
    """The class for such a layer in compressed-tensors' scheme, and what tells it from others of the class."""
    match rule.weights:
        case breccia.NVFP4BlockScaling():
            return ("W4A4Fp4" if when_of(rule) else "W4A16Fp4"), {}
        case breccia.Float8CurrentScaling() | breccia.Float8BlockScaling() if when_of(rule):
            return "W8A8Fp8", {"is_static_input_scheme": when_of(rule) == "static"}
        case breccia.INT8Scaling() if when_of(rule):
            return "W8A8Int8", {"is_static_input_scheme": when_of(rule) == "static"}
        case breccia.INT4Scaling() | breccia.INT8Scaling():
            return "WNA16", {"num_bits": 4 if isinstance(rule.weights, breccia.INT4Scaling) else 8}
    raise AssertionError(rule)


def same(chosen: Any, rule: Any) -> None:
    """Whether a chosen stand-in is the class that a rule means."""
    name, details = wanted(rule)
    assert type(chosen).__name__ == f"CompressedTensors{name}"
    for key, value in details.items():
        assert getattr(chosen, key) == value, (name, key)


def linear() -> Any:
    return torch.nn.Linear(64, 64, device="meta")


LINEAR = [name for name in SOURCES if not name.startswith("MXFP4")]  # whose experts are one parameter of each layer


def check_names_of_caches(remap: Callable[[str, dict[str, Any]], Any], to: str, folder: Path) -> None:
    """A program's loader turns the names of scales of keys and values into those of its layer of attention."""
    convert(quark_with_a_cache(folder / "quark"), folder / "cache", to)
    names = [one.name for one in breccia.load_scheme(folder / "cache").scales if one.of in ("k", "v")]
    layer = "model.layers.0.self_attn.attn"
    known = dict.fromkeys((f"{layer}.k_scale", f"{layer}.v_scale"))
    assert len(names) == 2
    assert {remap(name, known) for name in names} == set(known)


def quark_with_a_cache(folder: Path) -> Path:
    """A model of one attention in FP8 whose keys and values have scales, as AMD Quark writes it."""
    folder.mkdir()
    one = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    stored: dict[str, Any] = {}
    for module in ATTENTION:
        parts = to_compressed_tensors(breccia.cast(weight(N, K), "fp8"))
        stored |= {f"{module}.{role}": array for role, array in parts.items()}
        stored[f"{module}.input_scale"] = np.full((), 0.5, np.float32)
    stored |= {f"{module}.output_scale": np.full((), 0.25, np.float32) for module in ATTENTION[1:3]}
    save_arrays(stored, folder / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "quark", "global_quant_config": {"weight": one, "input_tensors": one}}
    said["kv_cache_quant_config"] = {f"*{name}_proj": {"output_tensors": one} for name in "kv"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    return folder
