# SPDX-License-Identifier: Apache-2.0
"""Whether llama.cpp computes with our GGUF files what the models are, and transformers with what comes back of them.

    python benchmarks/gguf_programs.py --json benchmarks/results/gguf_programs.json   # needs llama-cpp-python

Tiny models with random weights of every decoder architecture, written as `gguf:f16`, and one wider model in every kind.
A token is a row of logits; its error is a part of the norm. The median token tells whether the model is right: where
experts are chosen, one token may get another expert of nearly the same score. BERT is a real MiniLM, of which a
sentence's vector is compared; transformers makes no model of its file.

"transformers" compares the model in float32 with the directory that `breccia convert model.gguf out/ --to fp32` makes;
"llama.cpp" compares that directory with llama.cpp, which rounds activations to 8 bits for quantized kinds.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("f16", "bf16", "q8_0", "q4_0", "mxfp4", "nvfp4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
TOKENS = list(range(3, 43))
# What llama.cpp leaves out of a model, so that there is nothing to compare: it gives Phi-3 no window.
WITHOUT: dict[str, dict[str, Any]] = {"phi3": {"sliding_window": None}, "phi3-long": {"sliding_window": None}}
# It rounds the ends of YaRN's ramp, as transformers does where a config asks for it; gpt-oss' own does not.
WITHOUT["gpt-oss"] = {"truncate": True}
VOCABULARY = 500  # of the tokenizer
SENTENCE = "A breccia is a rock of broken fragments, cemented together by a fine-grained matrix."


def models() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → transformers' class, and what its config has beside the sizes."""
    from test_checkpoint_gguf_models import MODELS

    plain = {name: (name.capitalize(), {}) for name in ("llama", "qwen2", "qwen3")}
    return {**plain, "mistral": ("Mistral", {"sliding_window": None}), **{n: (k, m) for n, (k, m, _) in MODELS.items()}}


def save(name: str, folder: Path, **sizes: int) -> None:
    """A model with random weights and a tokenizer."""
    from tiny_models import random_model

    kind, more = models()[name]
    said = copy.deepcopy({**more, **WITHOUT.get(name, {}), **sizes, "vocab_size": VOCABULARY})
    if "truncate" in said:
        said["rope_parameters"]["truncate"] = said.pop("truncate")
    random_model(kind, said, norms=1).save_pretrained(folder)
    pieces = json.loads((ROOT / "tests_py" / "data" / "sentencepiece.json").read_text())["model"]
    (folder / "tokenizer.model").write_bytes(base64.b64decode(pieces))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')


def of_transformers(folder: Path) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].numpy()


def of_llama_cpp(file: Path) -> Any:
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=2)
    model.eval(TOKENS)
    return np.array(model.scores[: len(TOKENS)])


def sentence_row(folder: Path) -> dict[str, Any]:
    """MiniLM, a real BERT: llama.cpp's vector of a sentence and that of the same 16-bit values in transformers."""
    import llama_cpp
    import numpy as np
    import torch
    import transformers
    from breccia.checkpoint import convert
    from checkpoints import minilm

    convert(minilm(), folder / "tiny-f16.gguf", "gguf:f16")
    convert(minilm(), folder / "values", "fp16")
    sizes = {"n_ctx": 128, "n_batch": 128, "n_ubatch": 128, "n_threads": 2}
    model = llama_cpp.Llama(str(folder / "tiny-f16.gguf"), embedding=True, verbose=False, **sizes)
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder / "values")(SENTENCE)["input_ids"]])
    theirs = transformers.AutoModel.from_pretrained(folder / "values", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(tokens).last_hidden_state[0].mean(0).numpy()
    return {
        "model": "bert (MiniLM)",
        "kind": "f16",
        "llama.cpp": errors(np.array([model.embed(SENTENCE)]), wanted[None]),
    }


def errors(found: Any, wanted: Any) -> dict[str, float]:
    import numpy as np

    each = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return {"median": round(float(np.median(each)), 6), "largest": round(float(each.max()), 6)}


def row(name: str, kind: str, source: Path, folder: Path) -> dict[str, Any]:
    """One file: what both programs make of it."""
    import transformers
    from breccia.checkpoint import convert

    made: dict[str, Any] = {"model": name, "kind": kind}
    file = folder / f"tiny-{kind}.gguf"  # llama.cpp has rules for some models by their names
    convert(source, file, f"gguf:{kind}")
    convert(file, f"{folder}/back-{kind}/", "fp32")
    back = of_transformers(folder / f"back-{kind}")
    if name == "gpt-oss":  # see WITHOUT; the directory has what the makers' config says
        config = transformers.AutoConfig.from_pretrained(source)
        config.save_pretrained(folder / f"back-{kind}")
        back = of_transformers(folder / f"back-{kind}")
    made["transformers"] = errors(back, of_transformers(source))
    try:
        made["llama.cpp"] = errors(of_llama_cpp(file), back)
    except ValueError as error:
        made["fails"] = str(error).replace(str(folder), "")[:200]
    return made


def main() -> int:
    sys.path[:0] = [str(ROOT / "tests_py")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in models():
            source = Path(place) / name / "in"
            save(name, source)
            rows.append(row(name, "f16", source, source.parent))
            print(rows[-1], flush=True)
        (Path(place) / "bert").mkdir()
        rows.append(sentence_row(Path(place) / "bert"))
        print(rows[-1], flush=True)
        source = Path(place) / "wide" / "in"
        save("llama", source, hidden_size=256, intermediate_size=512, head_dim=64)
        for kind in KINDS:
            rows.append(row("llama, wider", kind, source, source.parent))
            print(rows[-1], flush=True)
    versions = {name: version(name).partition("+")[0] for name in ("gguf", "llama-cpp-python", "torch", "transformers")}
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
