# SPDX-License-Identifier: Apache-2.0
"""Models of quantized layers, as transformers' own loader opens them, and what they compute."""

import warnings
from pathlib import Path
from typing import Any

import breccia
from breccia.checkpoint import Checkpoint
from tiny_models import transformers

BOUND = 1e-5  # of the logits' norm, all in float32: sums in another order


def load(path: Path, **options: Any) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = transformers().AutoModelForCausalLM
        model, info = loader.from_pretrained(path, dtype=torch.float32, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def run(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits.float()


def layers(model: Any) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, breccia.nn.QuantizedLinear)}


def close(got: Any, wanted: Any) -> None:
    assert not got.isnan().any()
    assert float((got - wanted).norm() / wanted.norm()) <= BOUND


def weights(checkpoint: Path) -> dict[str, Any]:
    opened = Checkpoint(checkpoint)
    return {found.name: opened.load(found) for found in opened.found if found.format != "plain"}
