# SPDX-License-Identifier: Apache-2.0
"""Measure what README and docs show, and record of what program: every file of benchmarks/results is made here.

    python benchmarks/measure.py --list          # the results, their groups and commands
    python benchmarks/measure.py cpu             # a group: what CPU tables need, in ten minutes on a quiet machine
    python benchmarks/measure.py call_cost cpu_avx2
    python benchmarks/measure.py gpu --commit 1a2b3c4   # where there is no git

Each result is recorded with the version, the commit, the date, the machine, the command, and a digest of the code
that decides it, and how long it took, which --list says beforehand of the next time. `make_docs.py --check` fails where
the version is of an earlier minor one or such a source has changed.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/results"
BENCHMARKS = "benchmarks/"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Parts of the core by the sources that they begin with (patterns from the root). What those include is theirs, too, so
# that an edit of a kernel for products leaves figures of casts as they are.
WHEREVER = ("cpp/src/backends/*/target.hpp", "cpp/src/kernels/vocabulary.inl.hpp", "cpp/src/runtime/*.cpp")
KERNELS_OF_PRODUCTS = (
    "cpp/src/kernels/gemm.inl.hpp",
    "cpp/src/backends/codes_f32.cpp",
    "cpp/src/backends/integer.cpp",
    "cpp/src/backends/*/*.cpp",
    "cpp/src/backends/*/code_units.inl.hpp",  # these are included by names that are macros
    "cpp/src/backends/*/integer_*.inl.hpp",
    "cpp/src/contract/kernel_interface.hpp",
    "cpp/src/contract/kernel_interface/*.hpp",
)
PARTS = {
    "encoding in the core": (*WHEREVER, "cpp/src/kernels/quantize_kernels.inl.hpp"),
    "comparing in the core": (
        *WHEREVER,
        "cpp/src/kernels/compare_kernels.inl.hpp",
        "cpp/src/quantize/compare.cpp",
        "cpp/src/quantize/paired_rows.cpp",
    ),
    "casts of the core": (
        *WHEREVER,
        "cpp/src/kernels/quantize_kernels.inl.hpp",
        "cpp/src/kernels/dequantize.inl.hpp",
        "cpp/src/kernels/compare_kernels.inl.hpp",
        "cpp/src/backends/importance.cpp",
        "cpp/src/quantize/*.cpp",
    ),
    "optimizers in the core": (*WHEREVER, "cpp/src/kernels/adamw_kernels.inl.hpp", "cpp/src/quantize/adamw.cpp"),
    "ways to multiply": (*WHEREVER, *KERNELS_OF_PRODUCTS, "cpp/src/matmul/paths/*.cpp"),
    "products of the core": (*WHEREVER, *KERNELS_OF_PRODUCTS, "cpp/src/matmul/**/*.cpp", "cpp/src/matmul/rules.inl"),
}
CASTS = ("casts of the core", "cpp/src/backends/kernels.cpp")
PRODUCTS = ("products of the core", "cpp/src/backends/kernels.cpp")
# What casts give, by class of input and option, as tests hold it: figures of codes alone are as old as these bytes.
BYTES = "tests_py/data/golden.json"
GPTQ = "python/breccia/calibration/error_feedback.py"
COMPARED = (f"{BENCHMARKS}compare_cpu.py", *(f"{BENCHMARKS}comparison/{name}.py" for name in (
    "converting", "ggml", "limits", "products", "timing", "torch_convert")))  # fmt: skip
TRITON = ("python/breccia/kernels/triton/",)
GPU = (f"{BENCHMARKS}comparison/gpu_timing.py", *TRITON)
CHECKPOINTS = ("python/breccia/checkpoint/", "python/breccia/bridges/")
TORCH = ("python/breccia/frameworks/torch/", "python/breccia/nn/")


# What makes torch's products those of a CPU without AVX-512.
TORCH_BY_AVX2 = (
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("DNNL_MAX_CPU_ISA", "AVX2"),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
)

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """A file of benchmarks/results.

    Attributes:
        group: what is measured with it.
        command: what makes it, where {out} stands for the file.
        sources: files and folders, from the root, and names of PARTS, that decide what it says, beside the script.
        environment: variables of the command.
    """

    group: str
    command: str
    sources: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def script(self) -> str:
        return next(BENCHMARKS + word for word in self.command.split() if word.endswith(".py"))


def _cpu(name: str, *sources: str, options: str = "") -> Result:
    return Result("cpu", f"python {name}.py {options}--json {{out}}", sources)


def _gpu(sections: str, *modules: str) -> Result:
    sources = (*GPU, *(f"{BENCHMARKS}comparison/{module}.py" for module in modules))
    return Result("gpu", f"python compare_gpu.py --only {sections} --out {{out}}", sources)


def _ranks(name: str) -> Result:
    sources = (f"{BENCHMARKS}comparison/ranks.py", "python/breccia/distributed/", *TRITON)
    return Result("ranks", f"torchrun --nproc-per-node 2 {name}.py --out {{out}}", sources)


def _backend(name: str, options: str = "--rows 1", *variables: tuple[str, str]) -> Result:
    command = f"python compare_cpu.py --threads 1 --only matmul {options} --json {{out}}"
    return Result("cpu", command, (*COMPARED, *PRODUCTS), (("BRECCIA_CPU", name), *variables))


RESULTS = {
    # times on a CPU
    "cpu": _cpu("compare_cpu", *COMPARED, *CASTS, *PRODUCTS[:1], options="--threads 1 --seconds 0.1 "),
    "cpu_avx2": _backend("avx2"),
    "cpu_avx512": _backend("avx512"),
    "cpu_int8": _backend("", "--activations INT8"),
    "cpu_int8_avx2": _backend("avx2", "--activations INT8", *TORCH_BY_AVX2),
    "call_cost": _cpu(
        "call_cost", "python/breccia/verbs/__init__.py", "python/breccia/scaled_tensor.py", "python/src/"
    ),
    "cast_options": _cpu("cast_options", *CASTS),
    "convert": _cpu("compare_convert", *CHECKPOINTS, *CASTS, options="--gib 0.25 "),
    "gguf_speed": _cpu("gguf_speed", "python/breccia/bridges/gguf/quantize.py"),
    "decode_step": _cpu("decode_step", *PRODUCTS, *TORCH, options="--size 1b --rounds 24 "),
    "lora_step": _cpu("lora_step", *PRODUCTS, *TORCH, "python/breccia/peft.py", "python/breccia/autograd.py"),
    "optimizer": _cpu(
        "optimizer", "python/breccia/optim/", "examples/13_coat_optimizer.py", "optimizers in the core", *CASTS[1:]
    ),
    "frameworks": _cpu("frameworks", *CASTS, "python/breccia/frameworks/"),
    "import_time": _cpu("import_time", "python/breccia/__init__.py"),
    "large_header": _cpu("large_header", "python/breccia/checkpoint/files/"),
    "verify_speed": _cpu("verify_speed", "comparing in the core"),
    # times by which the core chooses: this result writes cpp/src/matmul/rules.inl
    "kernel_paths": Result(
        "paths",
        "python kernel_paths.py --json {out}",
        (f"{BENCHMARKS}cpp/measure_paths.cpp", f"{BENCHMARKS}cpp/operands.hpp", "ways to multiply"),
    ),
    # numbers that are the same on every machine
    "accuracy": Result("values", "python accuracy.py --json {out}", (BYTES,)),
    "accuracy_sigma0.002": Result("values", "python accuracy.py --sigma 0.002 --json {out}", (BYTES,)),
    "special_values": Result("values", "python special_values.py --json {out}", (BYTES,)),
    "model_size": Result("values", "python model_size.py --json {out}", CHECKPOINTS),
    "sentence_embeddings": Result("values", "python sentence_embeddings.py --json {out}", (BYTES,)),
    "quality": Result(
        "values",
        "python quality.py --json {out}",
        (BYTES, GPTQ, *(f"{BENCHMARKS}comparison/quality_{name}.py" for name in ("methods", "models", "peers"))),
    ),
    "quality_files": Result(
        "values",
        "python quality_files.py --json {out}",
        (
            *(BYTES, GPTQ, f"{BENCHMARKS}comparison/quality_models.py", "python/breccia/evaluation/inputs.py"),
            "python/breccia/checkpoint/planning/smoothing.py",
        ),
    ),
    "training": Result("values", "python training.py --json {out}", (BYTES, "examples/02_recipe_portable_train.py")),
    "lora_merge": Result(
        "values",
        "python lora_merge.py --json {out}",
        (BYTES, "python/breccia/peft.py", "python/breccia/checkpoint/lora/"),
    ),
    "exhaustive_encode": Result("values", "python exhaustive_encode.py --json {out}", ("encoding in the core",)),
    # other programs, and time without end: their scripts add to the file
    "clients": Result("programs", "python clients.py", CHECKPOINTS),
    "programs": Result("programs", "python program_runs.py", (*CHECKPOINTS, "python/breccia/vllm/")),
    "gguf_programs": Result("programs", "python gguf_programs.py --json {out}", CHECKPOINTS),
    "fuzzing": Result(
        "fuzzing",
        "python fuzzing.py 300 --json {out}",
        ("tests_cpp/fuzz/", "tests_py/fuzz_files.py", "tests_py/fuzz_coverage.py"),
    ),
    # GPUs
    "gpu": _gpu("small decode casts conversions large prefill grouped accuracy", "gpu_products", "gpu_conversions"),
    "gpu_eager": _gpu("eager compiled", "gpu_eager"),
    "gpu_fused": _gpu("fused", "gpu_fused"),
    "gpu_pairs": _gpu("pairs --slow-too", "gpu_pairs", "gpu_eager"),
    "gpu_experts": _gpu("experts", "gpu_experts", "gpu_eager"),
    "gpu_moe": _gpu("moe", "gpu_moe"),
    "gpu_peers": _gpu("peers", "gpu_peers"),
    "gpu_weights": _gpu("weights", "gpu_weight_peers"),
    "gptq_gpu": Result(
        "gpu",
        "python gptq_gpu.py --json {out}",
        ("python/breccia/frameworks/torch/error_feedback.py", f"{TRITON[0]}casts/cast_feedback.py"),
    ),
    "lora_gpu": Result("gpu", "python lora_gpu.py --json {out}", (*TRITON, *TORCH)),
    "optimizer_gpu": Result(
        "gpu", "python optimizer.py --device cuda --json {out}", ("python/breccia/optim/", *TRITON)
    ),
    "first_call": Result("gpu", "python first_call.py --device cuda --json {out}", TRITON),
    "distributed": _ranks("distributed"),
    "distributed_training": _ranks("distributed_training"),
}


def version() -> str:
    """Of the package, as pyproject.toml says it."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("version = "))


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def included(part: str) -> list[Path]:
    """Sources of the core that belong to one of PARTS. Of what they include, public headers but for codecs and the
    interface of kernels for products are not counted: they declare, and hold the comments of the documents.

    Raises:
        FileNotFoundError: there is no file of a pattern or of an include.
    """
    cpp, found = ROOT / "cpp", set[Path]()
    folders = [cpp / "src", cpp / "include", *(path for path in (cpp / "src/backends").iterdir() if path.is_dir())]
    waiting = [(pattern, sorted(ROOT.glob(pattern))) for pattern in PARTS[part]]
    while waiting:
        asked, files = waiting.pop()
        if not files:
            raise FileNotFoundError(f"benchmarks/measure.py: there is no {asked}")
        for file in files:
            if file in found:
                continue
            found.add(file)
            for name in INCLUDE.findall(file.read_text()):
                # target.hpp and vec.hpp are those of the backend that is compiled: all of them.
                there = {(folder / name).resolve() for folder in (file.parent, *folders) if (folder / name).is_file()}
                if "kernel_interface" not in name:
                    waiting.append((f"{name}, which {file} includes", sorted(there)))
    counted = (cpp / "src", cpp / "include/breccia/codecs")
    return sorted(file for file in found if any(file.is_relative_to(folder) for folder in counted))


def code(file: Path) -> bytes:
    """What decides of a source: its lines without docstrings, comments and blanks. Of any other file, all of it. (Of a
    string that holds what looks like a comment, less is compared.)"""
    content = file.read_bytes()
    if file.suffix == ".py":
        lines = content.split(b"\n")
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
                lines[first:last] = [b""] * (last - first)
        return b"\n".join(line for line in lines if line.strip() and not line.strip().startswith(b"#"))
    if file.suffix in (".cpp", ".hpp", ".h"):
        return b" ".join(re.sub(rb"//[^\n]*|/\*.*?\*/", b" ", content, flags=re.DOTALL).split())
    return content


def digest(source: str) -> str:
    """Of the code of a file, of all files in a folder, or of those of one of PARTS."""
    path, found = ROOT / source, hashlib.sha256()
    if source not in PARTS and not path.exists():
        raise FileNotFoundError(f"benchmarks/measure.py: there is no {source}")
    for file in included(source) if source in PARTS else sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix not in (".pyc", ".so"):
            found.update(f"{file.relative_to(ROOT)}\0".encode() + code(file))
    return found.hexdigest()[:16]


def commit() -> str:
    """The newest commit, and whether files other than results differ from it; "" where there is no git."""
    git = ["git", "-C", str(ROOT)]
    try:
        newest = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        others = [*git, "status", "--porcelain", "--", ".", f":!{FOLDER.relative_to(ROOT)}"]
        changed = subprocess.run(others, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return newest.stdout.strip() + ("-dirty" if changed else "")


def gpu() -> str | None:
    run = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def record(result: Result, of: str) -> dict[str, Any]:
    """What a result is recorded with."""
    from compare_cpu import cpu_model

    about = {
        "breccia": version(),
        "commit": of,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    about |= {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))}
    about |= {"gpu": gpu()} if result.group in ("gpu", "ranks") else {}
    variables = [f"{name}={value}" for name, value in result.environment]
    return {
        **about,
        "command": " ".join([*variables, result.command.removesuffix(" --json {out}").removesuffix(" --out {out}")]),
        "sources": {source: digest(source) for source in (result.script, *result.sources)},
    }


def measure(name: str, of: str) -> None:
    """Runs what makes a result, and writes the result with its record.

    Raises:
        subprocess.CalledProcessError: it failed; the file is as it was.
    """
    result, out, begin = RESULTS[name], FOLDER / f"{name}.json", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / out.name
        if out.exists():  # some scripts add to it
            made.write_text(out.read_text())
        words = shlex.split(result.command.format(out=made))
        words[:1] = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else [sys.executable]
        words = [str(ROOT / BENCHMARKS / word) if word.endswith(".py") else word for word in words]
        paths = [str(ROOT / BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **dict(result.environment), "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(words, check=True, env=environment, cwd=ROOT)
        content = json.loads((made if "{out}" in result.command else out).read_text())
    content["made"] = record(result, of) | {"seconds": round(time.monotonic() - begin)}
    out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def expected(name: str) -> str:
    """How long it took the last time, where that is recorded."""
    out = FOLDER / f"{name}.json"
    seconds = json.loads(out.read_text()).get("made", {}).get("seconds") if out.exists() else None
    return "not timed" if seconds is None else f"{seconds} s"


def known(source: str) -> bool:
    return source in PARTS or (ROOT / source).exists()


def stale() -> list[str]:
    """What is wrong with each result that is not of this program, and what measures it again."""
    found, digest_of = [], functools.cache(digest)
    for path in sorted(FOLDER.glob("*.json")):
        if path.stem not in RESULTS:
            found.append(f"{path.name}: benchmarks/measure.py does not make it")
            continue
        made = json.loads(path.read_text()).get("made")
        wrong = "no record says of which version it is"
        if made:
            changed = [s for s, was in made["sources"].items() if not known(s) or digest_of(s) != was]
            listed = {RESULTS[path.stem].script, *RESULTS[path.stem].sources}
            wrong = ""
            if minor(made["breccia"]) < minor(version()):
                wrong = f"it is of version {made['breccia']}, this is {version()}"
            elif not made["commit"] or "dirty" in made["commit"]:
                wrong = "it must be of a commit"
            elif changed or made["sources"].keys() != listed:
                what = ", ".join(changed or sorted(listed ^ made["sources"].keys()))
                wrong = f"{what} changed since {made['breccia']} at {made['commit']}"
        if wrong:
            found.append(f"{path.name}: {wrong}: python benchmarks/measure.py {path.stem}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = list(dict.fromkeys(result.group for result in RESULTS.values()))
    parser.add_argument("names", nargs="*", help=f"results, or groups: {', '.join(groups)}")
    parser.add_argument("--list", action="store_true", help="the results, their groups and commands")
    parser.add_argument("--stale", action="store_true", help="those whose results are not of this program")
    parser.add_argument("--commit", default=commit(), help="what is measured; default: what git says")
    options = parser.parse_args()
    old = {line.partition(".json:")[0] for line in stale()} if options.stale else RESULTS.keys()
    wrong = [name for name in options.names if name not in RESULTS and name not in groups]
    if wrong:
        parser.error(f"names must be results or groups of --list, got {wrong[0]!r}")
    chosen = [n for n, r in RESULTS.items() if n in old and ({n, r.group} & {*options.names} or not options.names)]
    if options.list or not options.names:
        for name in chosen:
            print(f"{RESULTS[name].group:9} {name:22} {expected(name):>9}  {RESULTS[name].command}")
        return 0
    failed = []
    for name in chosen:
        begin = time.monotonic()
        print(f"=== {name}, the last time: {expected(name)}", flush=True)
        try:
            measure(name, options.commit)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(error, file=sys.stderr)
        print(f"=== {name}: {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        print(f"failed, and are as they were: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
