# SPDX-License-Identifier: Apache-2.0
"""llama.cpp itself, as cyllama's wheel has it: it opens and runs every target of GGUF, and its own `llama-quantize`
makes the same mixes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archive import needs_benchmarks
from breccia.bridges.gguf import KINDS, RECIPES
from breccia.checkpoint import convert
from breccia.gguf.container import GgufFile

ROOT = Path(__file__).parents[2]
llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
pytest.importorskip("transformers")
pytestmark = needs_benchmarks
sys.path.insert(0, str(ROOT / "benchmarks"))

# Sizes by which rows are whole super-blocks, and of models that mixes tell apart.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "experts": ("mixtral", WIDE),
    "8 experts": ("mixtral", {**WIDE, "num_local_experts": 8}),
    "18 layers": ("llama", {**WIDE, "num_hidden_layers": 18, "intermediate_size": 256}),
    "tied": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "narrow": ("llama", {}),
    "fused": ("phi3", {**WIDE, "num_hidden_layers": 10}),
}
# Numbers of `llama_ftype`.
MIXES = {"q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of `MODELS` with random weights, by its name."""
    import gguf_programs

    place = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        folder = place / name.replace(" ", "-")
        if not folder.exists():
            kind, sizes = MODELS[name]
            gguf_programs.save(kind, folder, **sizes)
        return folder

    return made


class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
    """cyllama's, with what its own `get_logits_ith` asks of it."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


def logits(file: Path, tokens: list[int]) -> np.ndarray:
    params = llama_cpp.LlamaContextParams()
    params.n_ctx, params.n_threads = 64, 2
    context = llama_cpp.LlamaContext(
        Model(str(file), llama_cpp.LlamaModelParams(), verbose=False), params, verbose=False
    )
    batch = llama_cpp.LlamaBatch(n_tokens=64, embd=0, n_seq_max=1)
    for place, token in enumerate(tokens):
        batch.add(token, place, [0], True)
    context.decode(batch)
    return np.array([context.get_logits_ith(place) for place in range(len(tokens))])


def lost(file: Path, folder: Path) -> float:
    """How far llama.cpp's logits of the median token are from those of the same values in transformers."""
    import gguf_programs as programs

    convert(file, f"{folder}/", "fp32")
    return programs.errors(logits(file, programs.TOKENS), programs.of_transformers(folder))["median"]


@pytest.mark.parametrize("key", [*RECIPES, *KINDS])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_it_computes_with_every_target(name: str, key: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside quantized weights it rounds inputs to 8 bits, and beside bfloat16 to that; another layout costs all."""
    convert(model(name), tmp_path / "a.gguf", f"gguf:{key}")
    assert lost(tmp_path / "a.gguf", tmp_path / "values") < (0.015 if key in ("f16", "bf16") else 0.1)


def test_it_computes_with_codes_by_gptq(model: Callable[[str], Path], tmp_path: Path) -> None:
    from breccia import calibrate
    from transformers import AutoModelForCausalLM

    torch = pytest.importorskip("torch")
    source = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)
    batches = torch.randint(3, 500, (40, 64), generator=torch.Generator().manual_seed(0))
    calibrate(source, batches.split(1)).save(tmp_path / "moments.safetensors")
    moments = {"moments": tmp_path / "moments.safetensors"}
    convert(model("llama"), tmp_path / "a.gguf", "gguf:q4_k_m", method="gptq", **moments)
    convert(model("llama"), tmp_path / "b.gguf", "gguf:q4_k_m", **moments)
    assert (tmp_path / "a.gguf").read_bytes() != (tmp_path / "b.gguf").read_bytes()
    assert (tmp_path / "a.gguf").stat().st_size == (tmp_path / "b.gguf").stat().st_size
    assert lost(tmp_path / "a.gguf", tmp_path / "values") < 0.1


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_its_own_mixes_are_the_same(name: str, mix: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    convert(model(name), tmp_path / "f16.gguf", "gguf:f16")
    params = llama_cpp.LlamaModelQuantizeParams()
    params.ftype, params.nthread = MIXES[mix], 2
    llama_cpp.model_quantize(str(tmp_path / "f16.gguf"), str(tmp_path / "theirs.gguf"), params)
    convert(model(name), tmp_path / "ours.gguf", f"gguf:{mix}")
    ours, theirs = GgufFile(tmp_path / "ours.gguf"), GgufFile(tmp_path / "theirs.gguf")
    instead = {"Q4_0": "IQ4_NL"}  # for rows that are no whole blocks of Q3_K; of as many bytes
    wanted = {one: instead.get(kind, kind) for one, kind in theirs.kinds.items() if kind != "F32"}
    assert {one: kind for one, kind in ours.kinds.items() if kind != "F32"} == wanted
    if name not in ("narrow", "fused"):  # of which most matrices are of another type
        said = "general.file_type"
        assert ours.fields[said][1] == theirs.fields[said][1]
