#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The stages of continuous integration: what each protects, and which paths it answers for.

    .ci/stages.py           # those that `.ci/run` runs here, a line each: name, command, reason, "alone" or "and the
                            # next", turn, and the folders to delete then, between tabs
    .ci/stages.py --all     # all of them
    .ci/stages.py --passed  # remembers that what runs of this commit has passed

Of this checkout run the stages that always run, every stage that answers for a path that the change touches, and one
of the others in turn, by the count of commits. The change begins at the commit that CI_BASE names; without that, at
the last one that has passed in this clone (the reference refs/ci/passed); and where there is none such, at the last
commit that is a day older than the newest one and has thirty after it, so that what is landed in one piece is seen
whole. Where the history does not go back so far, every path counts as touched.

A stage of many cases that are alike runs a part of them, another at each turn, and with --all the whole. The turn is
the count of commits; of a stage that was chosen in turn, the count of its turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ("",)
KERNELS = ("cpp/src/kernels/", "cpp/src/backends/", "cpp/src/contract/", "CMakeLists.txt")
PASSED = "refs/ci/passed"
DAY = 24 * 60 * 60
COMMITS = 30


@dataclass(frozen=True)
class Stage:
    """A stage of `.ci/run`.

    Attributes:
        name: as the summary prints it.
        command: what runs, from the root of the checkout.
        protects: what would go unseen without it.
        paths: what the paths begin with that it answers for; the script of one that is in turn is always one of them.
        in_turn: whether it has a turn where no path of its is touched; else it runs with `--all`, and where one of its
            paths is touched.
        holds: the name of a stage that is part of this one, and not run beside it.
        whole: what the command is given with `--all`, where it runs a part of its cases without.
        one_processor: whether it leaves the others idle for much of its time, so that the next stages run beside it.
        leaves: folders that it makes, or patterns of their names, which `.ci/run` deletes when it has passed: the disk
            of a small machine does not hold what all stages build. No later stage reads them, and the compiler's cache
            has their objects.
    """

    name: str
    command: str
    protects: str
    paths: tuple[str, ...] = ()
    in_turn: bool = True
    holds: str = ""
    whole: str = ""
    one_processor: bool = False
    leaves: tuple[str, ...] = ()

    def answers_for(self, path: str) -> bool:
        shared = (self.command.split()[0], ".ci/common.sh") if self.in_turn else ()
        return path in shared or path.startswith(self.paths)


STAGES = (
    Stage(
        "bash .ci/test",
        ".ci/test",
        "the build with warnings as errors, C++ tests on this CPU, the wheel made of the source archive, Python tests "
        "with every peer, a real model, symbols and instructions of the objects, style and types",
        ALWAYS,
        whole="--whole",
        leaves=("build/wheel",),
    ),
    Stage(
        "clang-tidy",
        ".ci/lint --tidy",
        "what a compiler lets pass: copies, narrowing, uninitialized members",
        ("cpp/", ".clang-tidy", ".ci/tidy_sources.py"),
        whole="--whole",
        leaves=("build/each", "build/lint"),
    ),
    Stage(
        "packages",
        ".ci/check_package",
        "what the archive and the wheel hold; Conan, conda, the wheels that are asked for, and the workflows",
        (
            "pyproject.toml",
            "CMakeLists.txt",
            "cpp/cmake/",
            "cpp/packaging/",
            "python/cmake/",
            ".github/",
            ".ci/package",
        ),
        one_processor=True,
        leaves=("build/package-venv", "build/conan"),
    ),
    Stage(
        "documentation",
        ".ci/docs",
        "links, and a comment for every public declaration",
        ALWAYS,
        one_processor=True,
        leaves=("build/doxygen",),
    ),
    Stage(
        "fuzzers",
        ".ci/fuzz",
        "what nobody thought of: codecs, tensors, C functions and files",
        ALWAYS,
        leaves=("build/fuzz", "build/corpus"),
    ),
    Stage(
        "sanitizers",
        ".ci/run_sanitizers",
        "memory and undefined behaviour: C++ tests on the portable backend, Python tests that give odd arrays",
        ALWAYS,
        whole="--whole",
        leaves=("build/asan-ubsan", "build/asan_python"),
    ),
    Stage(
        "C++ examples",
        ".ci/examples_cpp",
        "what a program needs that finds the installed library or has it as a part of its tree, and the page about C++",
        (
            "cpp/include/",
            "cpp/cmake/",
            "cpp/src/c/",
            "CMakeLists.txt",
            "examples/cpp/",
            "examples/rust/",
            "tests_cpp/consumer/",
            "docs/cpp.md",
            "docs/how-to/link-from-cpp.md",
        ),
        one_processor=True,
        leaves=("build/examples",),
    ),
    Stage(
        "the wheel alone",
        ".ci/run_alone",
        "the wheel with NumPy alone, and with what results are compared with, where there is no compiler",
        ("python/breccia/", "pyproject.toml", ".ci/package"),
        whole="--whole",
        leaves=("build/numpy-venv", "build/oracles-venv"),
    ),
    Stage(
        "slow Python tests",
        ".ci/run_slow",
        "Python tests marked slow: files of many megabytes, whole registries where others take a part, TorchTitan",
        (
            "tests_py/hostile/",
            "tests_py/test_hostile.py",
            "tests_py/conftest.py",
            "benchmarks/comparison/",
            "python/breccia/distributed/fsdp/",
            "tests_py/torchtitan_runner.py",
            "tests_py/test_torchtitan.py",
        ),
        whole="--whole",
    ),
    Stage(
        "GPU kernels, interpreted",
        ".ci/run_triton",
        "bytes of the GPU kernels in Triton's interpreter; that for Hopper they compile and do not spill",
        ("python/breccia/kernels/", "python/breccia/device.py", "tests_py/gpu/"),
        whole="--whole",
        one_processor=True,
        leaves=("build/triton",),
    ),
    Stage(
        "serving programs",
        ".ci/run_serving",
        "layers of vLLM and SGLang in these programs' own files",
        (
            *(f"python/breccia/{name}" for name in ("nn/", "_serving/", "vllm/", "sglang/", "checkpoint/planning/")),
            *(f"python/breccia/{name}" for name in ("schemes/", "bridges/compressed_tensors/")),
            "tests_py/serving/",
            ".ci/requirements-serving.txt",
            ".ci/requirements-serving-needed.txt",
        ),
    ),
    Stage(
        "programs",
        ".ci/run_programs",
        "that vLLM, onnxruntime and others open and run what is written, themselves",
        (
            *(f"python/breccia/{name}/" for name in ("bridges", "checkpoint", "schemes", "gguf", "_serving", "vllm")),
            "python/breccia/transformers/",
            "python/breccia/nn/quantizing.py",
            "tests_py/programs/",
            "benchmarks/program_runs.py",
            ".ci/requirements-programs.txt",
        ),
        whole="--whole",
    ),
    Stage(
        "producers",
        ".ci/run_producers",
        "that checkpoints which llm-compressor, ModelOpt and others make are read as they mean them, and written in "
        "every target",
        ("tests_py/producers/", "tests_py/producer_runner.py", ".ci/run_producers", ".ci/requirements-producers.txt"),
        in_turn=False,
        whole="--whole",
    ),
    Stage(
        "a format is added",
        ".ci/add_format",
        "that a new format is written in the places that are named above, and nowhere else",
        (
            "cpp/include/breccia/codecs/",
            "cpp/src/tensor/catalogue.cpp",
            "cpp/include/breccia/recipes.hpp",
            "cpp/src/kernels/",
            "tests_cpp/golden_values.hpp",
            "tests_cpp/test_codecs.cpp",
            ".ci/float4_e1m2.patch",
        ),
        one_processor=True,
        leaves=("build/add_format",),
    ),
    Stage(
        "sanitizers, every backend",
        ".ci/run_sanitizers --every-backend",
        "memory and undefined behaviour in the vector kernels that this CPU runs",
        (*KERNELS, "cpp/src/matmul/", "tests_cpp/test_guard_pages.cpp"),
        holds="sanitizers",
        whole="--whole",
        leaves=("build/asan-ubsan", "build/asan_python"),
    ),
    Stage(
        "thread sanitizer",
        ".ci/run_threads",
        "data races in the pool of threads and in what uses it",
        ("cpp/src/runtime/", "cpp/src/quantize/", "cpp/src/matmul/", "tests_cpp/test_threads.cpp", "CMakeLists.txt"),
        leaves=("build/tsan",),
    ),
    Stage(
        "AVX-512 and AMX, emulated",
        ".ci/run_emulated",
        "backends that this CPU may lack, in plain code",
        (*KERNELS, "cpp/src/matmul/", "tests_cpp/emulated/"),
        whole="--whole",
        leaves=("build/emulated-avx512",),
    ),
    Stage(
        "x86-64 without AVX",
        ".ci/run_qemu",
        "that only backends for AVX have its instructions, and that the dispatch finds the portable one",
        (*KERNELS, "cpp/src/runtime/"),
        whole="--whole",
    ),
    Stage(
        "aarch64",
        ".ci/run_aarch64",
        "the NEON backend, and the bytes of every operation on 64-bit Arm",
        (*KERNELS, "cpp/src/runtime/", "cpp/src/matmul/"),
        whole="--whole",
        leaves=("build/aarch64",),
    ),
    Stage(
        "macOS and Windows",
        ".ci/run_elsewhere",
        "that clang compiles and links the core for macOS and Windows; the C++ tests and every operation's bytes on "
        "Windows, in wine",
        in_turn=False,
        leaves=("build/macos", "build/windows", "build/zig", "build/elsewhere-tools"),
    ),
    Stage(
        "wheels",
        ".ci/wheels",
        "that a wheel is built and works of every Python that is here, of those that pyproject.toml names",
        in_turn=False,
        leaves=("build/wheels", "build/wheel-*"),
    ),
    Stage(
        "figures",
        ".ci/run_figures",
        "that every figure of README and the documents is of this version and of these sources",
        in_turn=False,
    ),
)


def git(*arguments: str, strip: bool = True) -> str:
    """What a command of git says, "" where it fails."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    said = run.stdout if run.returncode == 0 else ""
    return said.strip() if strip else said


def base() -> str:
    """The commit before the change; "" where the history does not tell."""
    said = git("rev-parse", "--verify", "--quiet", os.environ.get("CI_BASE") or "0" * 40, "--")
    named = said.splitlines()[0] if said else ""
    if named and git("cat-file", "-t", named) == "commit":
        return named
    passed = git("rev-parse", "--verify", "--quiet", PASSED)
    if passed and passed != git("rev-parse", "HEAD") and git("merge-base", "HEAD", passed) == passed:
        return passed
    newest = git("log", "-1", "--format=%ct")
    day = newest and git("rev-list", "-1", f"--before={int(newest) - DAY}", "HEAD")
    count = git("rev-list", "-1", f"--skip={COMMITS}", "HEAD")
    return git("merge-base", day, count) if day and count else ""


def remember() -> None:
    """What runs of this commit has passed: the next change begins here. Not where files differ from the commit, nor
    where CI_BASE said what to look at, which need not reach back to the one before."""
    if not os.environ.get("CI_BASE") and git("rev-parse", "HEAD") and not git("status", "--porcelain"):
        git("update-ref", PASSED, "HEAD")


def chosen(touched: list[str] | None, count: int) -> list[tuple[Stage, str, int]]:
    """The stages to run, why, and whose turn it is of their cases.

    Args:
        touched: paths that the change touches; None where that is not known.
        count: of commits, whose turn it is.

    Returns:
        Stages in the order of the table.
    """
    reasons: dict[Stage, str] = {}
    for stage in STAGES:
        if stage.paths == ALWAYS:
            reasons[stage] = "always"
        elif touched is None and stage.in_turn:
            reasons[stage] = "what the change touches is not known"
        elif found := next((path for path in touched or () if stage.answers_for(path)), None):
            reasons[stage] = found
    turns = dict.fromkeys(reasons, count)
    rest = [stage for stage in STAGES if stage.in_turn and stage not in reasons]
    if rest:
        turns[rest[count % len(rest)]] = count // len(rest)  # by the count itself the same share would always meet it
        reasons[rest[count % len(rest)]] = "its turn"
    return [(stage, reasons[stage], turns[stage]) for stage in STAGES if stage in reasons]


def touched_since(before: str) -> list[str] | None:
    """Paths that differ from that commit; None where there is none."""
    return git("diff", "--name-only", before).splitlines() if before else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every stage")
    parser.add_argument("--passed", action="store_true", help="remember that what runs of this commit has passed")
    options = parser.parse_args()
    if options.passed:
        remember()
        return 0
    whole, count = options.all, int(git("rev-list", "--count", "HEAD") or 0)
    plan = [(stage, "all of them", count) for stage in STAGES] if whole else chosen(touched_since(base()), count)
    held = {stage.holds for stage, _, _ in plan}
    for stage, reason, turn in plan:
        if stage.name not in held:
            command = f"{stage.command} {stage.whole if whole else ''}".strip()
            how = "and the next" if stage.one_processor else "alone"
            print(stage.name, command, reason, how, turn, " ".join(stage.leaves), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
