# SPDX-License-Identifier: Apache-2.0
"""Which of a serving program's classes a layer is to get, by the scheme of the checkpoint alone."""

from pathlib import Path
from typing import Any

import breccia
import pytest
import torch
from breccia.checkpoint import Checkpoint, convert
from breccia.schemes import Activations
from scheme_models import SOURCES, write_source

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def said_of(name: str, to: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json says of one of the ten kinds in a format, and the rule of each quantized matrix; names of parts
    that a program fuses stand for the whole, too."""
    source = write_source(name, folder)
    convert(source, folder / "out", to)
    checkpoint, scheme = Checkpoint(folder / "out"), breccia.scheme(folder / "out")
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
