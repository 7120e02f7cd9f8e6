# SPDX-License-Identifier: Apache-2.0
"""Stops conversions before every call that changes the disk, and looks at what is left: `python fault_runner.py IN
OUT TO [OLD]`, where OLD is an output that is replaced. Run as a process of its own, which forks for every conversion
and has no other thread."""

import importlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flushes  # noqa: F401 (a kill takes nothing from what the system has)
from breccia.checkpoint import convert
from breccia.checkpoint.files import disk

STOPPED = 77


def tree(path: Path) -> dict[str, bytes] | None:
    """Every file's bytes, None where nothing is there."""
    if not os.path.lexists(path):
        return None
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def forked(run: Callable[[], Any]) -> int:
    """The exit code of a child that does it: 0, STOPPED, or 1 after an error."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def stopping_at(step: int, run: Callable[[], Any]) -> Callable[[], Any]:
    left = [step]

    def before(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(STOPPED)

    def stopped() -> None:
        disk.before = before
        run()

    return stopped


class Runner:
    def __init__(self, source: str, out: Path, to: str, old: Path | None = None) -> None:
        self.out, self.partial, self.old = out, out.with_name(f".{out.name}.partial"), old
        self.before = None if old is None else tree(old)
        self.run = lambda: convert(source, out, to, threads=1, force=old is not None)
        importlib.import_module("breccia.checkpoint.writing.convert")._SYNC_EVERY = 1  # a record a tensor
        calls: list[str] = []
        self.clear()
        disk.before = lambda what, _: calls.append(what)
        self.run()
        disk.before = None
        self.wanted, self.calls = tree(out), calls
        self.clear()

    def clear(self) -> None:
        for path in (self.out, self.partial):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.old is not None:
            (shutil.copytree if self.old.is_dir() else shutil.copy)(self.old, self.out)

    def look(self, what: str) -> None:
        there = tree(self.out)
        if self.old is not None and there is None:  # between the two steps of a directory
            there = tree(self.partial / "replaced")
            assert self.out.is_dir() or there is not None, f"{what}: the old output is lost"
        assert there in (self.before, self.wanted), f"{what}: the output is neither as it was nor complete"

    def stop(self, *steps: int) -> None:
        """Stop a conversion, and its resumptions, then let one go on to the end."""
        what = f"stopped before {[(k, self.calls[k] if k < len(self.calls) else '') for k in steps]}"
        for step in steps:
            forked(stopping_at(step, self.run))
            self.look(what)
        code = forked(self.run)
        assert code == 0 or tree(self.out) == self.wanted, f"{what}: the resumed conversion failed"
        assert tree(self.out) == self.wanted, f"{what}: the resumed output is another"
        assert not self.partial.exists(), f"{what}: something is left"
        self.clear()

    def all(self) -> int:
        """Stop before every call, then at random places twice; how many were stopped."""
        for step in range(len(self.calls)):
            self.stop(step)
        pick = random.Random(0)
        for _ in range(20):
            self.stop(pick.randrange(len(self.calls)), pick.randrange(len(self.calls)))
        return len(self.calls) + 40


if __name__ == "__main__":
    runner = Runner(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:]))
    print(json.dumps({"stopped": runner.all(), "calls": sorted(set(runner.calls))}))
