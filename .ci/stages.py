#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The stages of continuous integration: what each protects, and which paths it answers for.

    .ci/stages.py           # those that `.ci/run` runs here: a line each of name, command and reason, between tabs
    .ci/stages.py --all     # all of them

Of this checkout run the stages that always run, every stage that answers for a path that the change touches, and one
of the others in turn, by the count of commits. The change begins at the commit that CI_BASE names; without that, at
the last commit that is a day older than the newest one and has thirty after it, so that what is landed in one piece is
seen whole. Where the history does not go back so far, every path counts as touched.
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
DAY = 24 * 60 * 60
COMMITS = 30


@dataclass(frozen=True)
class Stage:
    """A stage of `.ci/run`.

    Attributes:
        name: as the summary prints it.
        command: what runs, from the root of the checkout.
        protects: what would go unseen without it.
        paths: what the paths begin with that it answers for; its own script is always one of them.
        in_turn: whether it has a turn where no path of its is touched; else it runs with `--all` alone.
        holds: the name of a stage that is part of this one, and not run beside it.
        whole: what the command is given with `--all`, where it runs a part of its cases without.
    """

    name: str
    command: str
    protects: str
    paths: tuple[str, ...] = ()
    in_turn: bool = True
    holds: str = ""
    whole: str = ""

    def answers_for(self, path: str) -> bool:
        return path in (self.command.split()[0], ".ci/common.sh") or path.startswith(self.paths)


STAGES = (
    Stage(
        "bash .ci/test",
        ".ci/test",
        "the build with warnings as errors, C++ tests on this CPU, the wheel made of the source archive, Python tests "
        "with every peer, a real model, symbols and instructions of the objects, style and types",
        ALWAYS,
    ),
    Stage(
        "clang-tidy",
        ".ci/lint --tidy",
        "what a compiler lets pass: copies, narrowing, uninitialized members",
        ("cpp/", ".clang-tidy"),
    ),
    Stage("documentation", ".ci/docs", "links, and a comment for every public declaration", ALWAYS),
    Stage(
        "sanitizers",
        ".ci/run_sanitizers",
        "memory and undefined behaviour: C++ tests on the portable backend, Python tests that give odd arrays",
        ALWAYS,
    ),
    Stage("fuzzers", ".ci/fuzz", "what nobody thought of: codecs, tensors, C functions and files", ALWAYS),
    Stage(
        "C++ examples",
        ".ci/examples_cpp",
        "what a program needs that finds the installed library, and the page about C++",
        (
            "cpp/include/",
            "cpp/cmake/",
            "cpp/src/c/",
            "CMakeLists.txt",
            "examples/cpp/",
            "examples/rust/",
            "docs/cpp.md",
        ),
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
    ),
    Stage(
        "the wheel alone",
        ".ci/run_alone",
        "the wheel with NumPy alone, and with what results are compared with, where there is no compiler",
        ("python/breccia/", "pyproject.toml", ".ci/package"),
    ),
    Stage(
        "slow Python tests",
        ".ci/run_slow",
        "Python tests marked slow: files of many megabytes, whole registries where others take a part",
        ("tests_py/hostile/", "tests_py/test_hostile.py", "tests_py/conftest.py", "benchmarks/comparison/"),
    ),
    Stage(
        "GPU kernels, interpreted",
        ".ci/run_triton",
        "bytes of the GPU kernels in Triton's interpreter; that for Hopper they compile and do not spill",
        ("python/breccia/kernels/", "python/breccia/gpu.py", "tests_py/gpu/"),
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
        "a format is added",
        ".ci/add_format",
        "that a new format is written in the places that are named above, and nowhere else",
        (
            "cpp/include/breccia/codecs/",
            "cpp/src/tensor/catalogue.cpp",
            "cpp/src/kernels/",
            "tests_cpp/golden_values.hpp",
            "tests_cpp/test_codecs.cpp",
            ".ci/float4_e1m2.patch",
        ),
    ),
    Stage(
        "sanitizers, every backend",
        ".ci/run_sanitizers --every-backend",
        "memory and undefined behaviour in the vector kernels that this CPU runs",
        (*KERNELS, "cpp/src/matmul/", "tests_cpp/test_guard_pages.cpp"),
        holds="sanitizers",
    ),
    Stage(
        "thread sanitizer",
        ".ci/run_threads",
        "data races in the pool of threads and in what uses it",
        ("cpp/src/runtime/", "cpp/src/quantize/", "cpp/src/matmul/", "tests_cpp/test_threads.cpp", "CMakeLists.txt"),
    ),
    Stage(
        "AVX-512 and AMX, emulated",
        ".ci/run_emulated",
        "backends that this CPU may lack, in plain code",
        (*KERNELS, "cpp/src/matmul/", "tests_cpp/emulated/"),
        whole="--whole",
    ),
    Stage(
        "x86-64 without AVX",
        ".ci/run_qemu",
        "that only backends for AVX have its instructions, and that the dispatch finds the portable one",
        (*KERNELS, "cpp/src/runtime/"),
    ),
    Stage(
        "aarch64",
        ".ci/run_aarch64",
        "the NEON backend, and the bytes of every operation on 64-bit Arm",
        (*KERNELS, "cpp/src/runtime/", "cpp/src/matmul/"),
        whole="--whole",
    ),
    Stage(
        "macOS and Windows",
        ".ci/run_elsewhere",
        "that clang compiles and links the core for macOS and Windows; the C++ tests and every operation's bytes on "
        "Windows, in wine",
        in_turn=False,
    ),
    Stage(
        "wheels",
        ".ci/wheels",
        "that a wheel is built and works of every Python that is here, of those that pyproject.toml names",
        in_turn=False,
    ),
    Stage(
        "figures",
        ".ci/run_figures",
        "that every figure of README and the documents is of this version and of these sources",
        in_turn=False,
    ),
)


def git(*arguments: str) -> str:
    """What a command of git says, "" where it fails."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else ""


def base() -> str:
    """The commit before the change; "" where the history does not tell."""
    said = git("rev-parse", "--verify", "--quiet", os.environ.get("CI_BASE") or "0" * 40, "--")
    named = said.splitlines()[0] if said else ""
    if named and git("cat-file", "-t", named) == "commit":
        return named
    newest = git("log", "-1", "--format=%ct")
    day = newest and git("rev-list", "-1", f"--before={int(newest) - DAY}", "HEAD")
    count = git("rev-list", "-1", f"--skip={COMMITS}", "HEAD")
    return git("merge-base", day, count) if day and count else ""


def chosen(touched: list[str] | None, count: int) -> list[tuple[Stage, str]]:
    """The stages to run, and why.

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
        elif found := next((path for path in touched or () if stage.in_turn and stage.answers_for(path)), None):
            reasons[stage] = found
    rest = [stage for stage in STAGES if stage.in_turn and stage not in reasons]
    if rest:
        reasons[rest[count % len(rest)]] = "its turn"
    return [(stage, reasons[stage]) for stage in STAGES if stage in reasons]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every stage")
    whole = parser.parse_args().all
    if whole:
        plan = [(stage, "all of them") for stage in STAGES]
    else:
        before = base()
        touched = git("diff", "--name-only", before).splitlines() if before else None
        plan = chosen(touched, int(git("rev-list", "--count", "HEAD") or 0))
    held = {stage.holds for stage, _ in plan}
    for stage, reason in plan:
        if stage.name not in held:
            print(stage.name, f"{stage.command} {stage.whole if whole else ''}".strip(), reason, sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
