# SPDX-License-Identifier: Apache-2.0
"""Kills conversions (SIGKILL) at random moments, and looks at what is left: `python kill_runner.py IN OUT TO COUNT`.
Run as a process of its own, which forks for every conversion and has no other thread."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import flushes  # noqa: F401 (a kill takes nothing from what the system has)
from breccia.checkpoint import convert
from fault_runner import tree


class Killer:
    """Attributes:
    wanted: what a conversion that is let alone writes.
    killed: conversions that were killed while they ran.
    left: how many of those left their work behind.
    """

    def __init__(self, source: str, out: Path, to: str, seed: int = 0) -> None:
        self.out, self.partial = out, out.with_name(f".{out.name}.partial")
        self.run = lambda: convert(source, out, to, threads=2)
        self.random = random.Random(seed)
        self.killed = self.left = 0
        start = time.monotonic()
        assert self.child(None) == 0, "the conversion fails without a kill"
        self.seconds = time.monotonic() - start
        self.wanted = tree(out)
        self.clear()

    def child(self, seconds: float | None) -> int:
        """The exit code of a conversion, or -9 where it was killed after so many seconds."""
        child = os.fork()
        if not child:
            try:
                self.run()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def clear(self) -> None:
        for path in (self.out, self.partial):
            if path.is_dir():
                for file in sorted(path.rglob("*"), reverse=True):
                    file.rmdir() if file.is_dir() else file.unlink()
                path.rmdir()
            else:
                path.unlink(missing_ok=True)

    def until(self, count: int) -> None:
        """Kill, up to three times one conversion, then let it go on to its end; so often in all."""
        while self.killed < count:
            for _ in range(self.random.randint(1, 3)):
                code = self.child(self.random.uniform(0, self.seconds))
                assert tree(self.out) in (None, self.wanted), "the output is neither absent nor complete"
                assert code in (0, -signal.SIGKILL), f"a resumed conversion ended with {code}"
                self.killed += code != 0
                self.left += self.partial.exists()
                if self.out.exists():
                    break
            if not self.out.exists() or self.partial.exists():
                there = self.out.exists()  # killed while it tidied up: the next may refuse to replace the output
                assert self.child(None) == 0 or there, "the conversion cannot be resumed"
            assert not self.partial.exists(), "something is left"
            assert tree(self.out) == self.wanted, "the resumed output is another"
            self.clear()


if __name__ == "__main__":
    killer = Killer(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    killer.until(int(sys.argv[4]))
    print(json.dumps({"killed": killer.killed, "left": killer.left}))
