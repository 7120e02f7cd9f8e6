# SPDX-License-Identifier: Apache-2.0
"""Write every table and picture of README and docs that comes from benchmarks/results.

    python benchmarks/make_docs.py            # rewrite what has changed
    python benchmarks/make_docs.py --check    # exit 1 where something would change, or a result is not of this program

A table, or a sentence, stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. Pictures and
the full tables of a machine are whole files.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import measure
from comparison import report
from documents import accuracy, clients, front, kernels, overview, pictures, quality, speed, stages, training
from documents.markdown import load

ROOT = Path(__file__).parents[1]
TABLES = {
    "clients": clients.matrix,
    "programs": clients.programs,
    "gguf programs": clients.gguf_programs,
    "recipes": accuracy.recipes,
    "accuracy": accuracy.every_recipe,
    "accuracy of small values": accuracy.small_values,
    "sentences": accuracy.sentences,
    "cpu": speed.cpu_summary,
    "cast options": speed.cast_options,
    "small tensors": speed.calls,
    "cpu backends": speed.cpu_backends,
    "cpu int8": speed.cpu_int8,
    "gpu": speed.gpu_summary,
    "gpu accuracy": speed.gpu_accuracy,
    "gpu casts": speed.gpu_casts,
    "gpu layers": speed.gpu_layers,
    "gpu pairs": speed.gpu_pairs,
    "gpu experts": speed.gpu_experts,
    "gpu moe": speed.gpu_moe,
    "gpu peers": speed.gpu_peers,
    "distributed": speed.distributed,
    "training step": speed.training_step,
    "frameworks": speed.frameworks,
    "gptq, gpu": speed.gptq_gpu,
    "optimizer": speed.optimizer,
    "optimizer, gpu": speed.optimizer_gpu,
    "decode step": speed.decode_step,
    "convert": speed.convert,
    "first calls": speed.first_calls,
    "large header": speed.large_header,
    "fuzzing": speed.fuzzing,
    "import time": speed.import_time,
    "gguf speed": speed.gguf_speed,
    "model size": speed.model_size,
    "front": front.front,
    "training, draw": training.draw,
    "lora step": training.lora_step,
    "lora gpu": training.lora_gpu,
    "lora merge": training.lora_merge,
    "stages": stages.stages,
    "kernels": kernels.rules,
    "paths": kernels.paths,
    "quality": quality.ways,
    "quality, files": quality.files,
}
FILES = {
    "docs/images/overview.svg": overview.overview,
    "docs/images/accuracy.svg": pictures.accuracy,
    "docs/images/gpu.svg": pictures.gpu,
    "docs/images/quality.svg": quality.bits_and_kld,
    "docs/images/cpu.svg": lambda: report.svg(load("cpu"), 1),
    "benchmarks/results/cpu.md": lambda: report.markdown(load("cpu")),
    "benchmarks/results/cpu_avx2.md": lambda: report.markdown(load("cpu_avx2")),
    "benchmarks/results/cpu_avx512.md": lambda: report.markdown(load("cpu_avx512")),
    "benchmarks/results/gpu.md": speed.gpu_full,
    "benchmarks/results/special_values.md": accuracy.specials,
}
BLOCK = re.compile(r"(<!-- table: (?P<name>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages(pictures: bool = True) -> Iterator[tuple[Path, str]]:
    """Every file with something generated in it, perhaps without the pictures, and its text as it should be."""
    for name, make in FILES.items():
        if pictures or not name.endswith(".svg"):
            yield ROOT / name, make()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        yield page, BLOCK.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = 0
    for path, text in pages():
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    old = measure.stale() if check else []
    print(*(f"not of this program: {line}" for line in old), sep="\n", end="\n" * bool(old))
    return 1 if check and (stale or old) else 0


if __name__ == "__main__":
    sys.exit(main())
