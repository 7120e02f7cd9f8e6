# SPDX-License-Identifier: Apache-2.0
"""Kills conversions (SIGKILL) before each of their writes to the output, in turn, and looks at what the same conversion
makes of what is left: `python kill_at_write_runner.py IN OUT TO…` prints how many were killed. It forks for each."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flushes  # noqa: F401 (a kill takes nothing from what the system has)
from breccia.checkpoint import convert
from breccia.checkpoint.files import disk


def ran(work: Callable[[], Any]) -> int:
    """The exit code of a child that does some work; -9 where it was killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(source: str, out: Path, to: str) -> int:
    """How many writes were killed. Each conversion that follows must end with the bytes of one that is let alone."""

    def until(number: int) -> None:
        left = number

        def before(what: str, path: Path) -> None:
            nonlocal left
            left -= what == "write" and path.name == f".{out.name}.partial"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        disk.before = before
        convert(source, out, to, threads=1)

    assert ran(lambda: convert(source, out, to, threads=1)) == 0
    wanted, count = out.read_bytes(), 0
    out.unlink()
    while ran(lambda: until(count + 1)) == -signal.SIGKILL:
        count += 1
        assert ran(lambda: convert(source, out, to, threads=1)) == 0, f"{to}: not resumed after write {count}"
        assert out.read_bytes() == wanted, f"{to}: another output after write {count}"
        out.unlink()
    out.unlink()
    return count


if __name__ == "__main__":
    print(sum(kills(sys.argv[1], Path(sys.argv[2]), to) for to in sys.argv[3:]))
