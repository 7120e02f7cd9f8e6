# SPDX-License-Identifier: Apache-2.0
"""What files of SmolLM2-135M lose as programs run them: inputs quantized as the file says, embeddings and heads too.

    python benchmarks/quality_files.py --json benchmarks/results/quality_files.json

Each file is written by `convert` with moments of the text to calibrate with, and judged as `breccia evaluate
--activations file` does, on tokens of the text to judge with. Model and texts are those of `benchmarks/quality.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from comparison.quality_models import smollm2, texts  # noqa: E402

CALIBRATE, JUDGE, LENGTH = 8192, 1024, 512
GPTQ, NEAREST = {"method": "gptq"}, {"method": "nearest"}
STATIC, TOKENS = {"activations": "local"}, {"activations": "dynamic"}
ALONE = {"exclude": ["*_proj.weight"]}  # all but the embedding, whose weight the head has
# What is written, how → the target, and options of `convert`.
FILES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("INT8 × INT8", "nearest"): ("compressed-tensors:int8", NEAREST | TOKENS),
    ("INT8 × INT8", "nearest, smoothed"): ("compressed-tensors:int8", NEAREST | TOKENS | {"smooth": True}),
    ("NVFP4 × NVFP4", "GPTQ"): ("compressed-tensors:nvfp4", GPTQ | STATIC),
    ("NVFP4 × NVFP4", "GPTQ, smoothed"): ("compressed-tensors:nvfp4", GPTQ | STATIC | {"smooth": True}),
    ("embedding in NVFP4", "nearest, importance"): ("nvfp4", NEAREST | ALONE | {"embeddings": "nvfp4"}),
    ("embedding in NVFP4", "GPTQ"): ("nvfp4", GPTQ | ALONE | {"embeddings": "nvfp4"}),
    ("embedding in INT8", "nearest, importance"): ("nvfp4", NEAREST | ALONE | {"embeddings": "int8"}),
    ("NVFP4", "GPTQ"): ("nvfp4", GPTQ),
    ("NVFP4, embedding in INT8", "GPTQ"): ("nvfp4", GPTQ | {"embeddings": "int8"}),
    ("NVFP4, embedding in NVFP4", "GPTQ"): ("nvfp4", GPTQ | {"embeddings": "nvfp4"}),
    ("MLX NVFP4, embedding in NVFP4", "GPTQ"): ("mlx:nvfp4", GPTQ | {"embeddings": "nvfp4"}),
}


def run(options: argparse.Namespace, keep: Any) -> None:
    import numpy as np
    import torch
    from breccia.calibration.folder import calibrate_folder
    from breccia.checkpoint import convert
    from breccia.checkpoint.progress import Progress
    from breccia.evaluation import figures_of
    from breccia.evaluation.inputs import OF_FILE, quantized_inputs
    from breccia.evaluation.models import load_model, load_tokenizer, rows_of_text
    from breccia.evaluation.predictions import compared, kept

    torch.set_grad_enabled(False)
    options.cache.mkdir(parents=True, exist_ok=True)
    _, folder = smollm2(options.cache)
    text, unseen = texts(options.cache)
    moments = options.cache / f"{text.stem}-{CALIBRATE}.safetensors"
    if not moments.exists():
        calibrate_folder(folder, [text], moments, tokens=CALIBRATE, dtype="float32")
    rows = rows_of_text([unseen], load_tokenizer(folder), LENGTH, JUDGE).rows
    line = Progress(1, False, "tokens/s", 1)
    with tempfile.TemporaryDirectory(dir=options.cache) as scratch:
        reference = kept(load_model(folder, "float32"), rows, None, Path(scratch), line)
        for (kind, way), (to, asked) in FILES.items():
            if options.files and not any(f"{kind}, {way}".startswith(name) for name in options.files):
                continue
            out, start = Path(scratch) / "out", time.process_time()
            amax = {"amax": moments} if asked.get("activations") == "local" else {}
            report = convert(folder, out, to, moments=moments, force=True, **amax, **asked)
            seconds = time.process_time() - start
            model, inputs = load_model(folder, "float32", out), OF_FILE if "activations" in asked else None
            with quantized_inputs(model, out, inputs) as layers:
                found = figures_of(reference.loss, compared(model, rows, reference, line))
            named = {"file": kind, "method": way, "to": to, "layers": len(layers), "bytes": report["bytes_written"]}
            keep({**named, "perplexity": float(np.exp(reference.loss.mean())), **found, "seconds": round(seconds, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=[], metavar="F", help="files whose names begin so")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/quality", help="for models and moments")
    parser.add_argument("--json", type=Path, help="keep rows there, beside those of other runs")
    options = parser.parse_args()
    report: dict[str, Any] = {"rows": []}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report["torch"] = importlib.metadata.version("torch")

    def keep(row: dict[str, Any]) -> None:
        old = [one for one in report["rows"] if (one["file"], one["method"]) != (row["file"], row["method"])]
        report["rows"] = [*old, row]
        kld = row["kld"]["mean"]
        print(f"{row['file']:32} {row['method']:20} {kld['value']:.4f} ± {kld['error']:.4f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    run(options, keep)


if __name__ == "__main__":
    main()
