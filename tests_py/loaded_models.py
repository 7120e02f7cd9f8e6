# SPDX-License-Identifier: Apache-2.0
"""Models of quantized layers, as transformers' own loader opens them, and what they compute."""

import warnings
from pathlib import Path
from typing import Any

import breccia
from breccia.checkpoint import Checkpoint
from tiny_models import transformers

BOUND = 1e-5  # of the logits' norm, all in float32: sums in another order
# A program that loads two models and prints how much the second one raised its peak of memory, in bytes.
MEASURE = """
import re, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
import breccia.transformers
transformers.utils.logging.disable_progress_bar()
def peak():  # of this program; getrusage would go on with the peak of the one that started it
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
before = peak()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
with torch.no_grad():
    model(torch.arange(3, 5)[None])
print(peak() - before)
"""


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
