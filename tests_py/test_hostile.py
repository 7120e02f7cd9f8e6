# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to do harm: each is read, or refused by one line that says why, in little time and memory."""

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from breccia.cli import main
from fault_runner import tree

CASES = hostile.every()
SECONDS = 2.0  # of processor time, a command
MEMORY = 256 << 20  # bytes, over the input's


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def run(capsys: Any, *argv: str) -> tuple[int, str]:
    """The exit code and the error of a command that is bounded in time and memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, begin = status("VmRSS"), time.process_time()
    code = main(list(argv))
    seconds, memory = time.process_time() - begin, status("VmHWM") - before
    said = capsys.readouterr()
    allowed = MEMORY + sum(len(raw) for raw in (tree(Path(argv[1])) or {}).values()) if memory > MEMORY else MEMORY
    assert seconds < SECONDS, f"{argv[0]} took {seconds:.1f} s"
    assert memory <= allowed, f"{argv[0]} took {memory >> 20} MiB"
    if code == 0:
        assert said.err == ""
        return 0, ""
    assert code in (1, 2)
    lines = said.err.splitlines()
    if code == 2:
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"breccia {argv[0]}: "), lines
        assert len(lines[0]) < 2200
        assert lines[0].isprintable()
        for word in ("Traceback", "a defect", "argument types", "object has no attribute", "unexpected keyword"):
            assert word not in lines[0]
    return code, said.err


@pytest.fixture
def alarm() -> Iterator[None]:
    """What waits for ever is an error, too."""

    def ring(*_: object) -> None:
        raise AssertionError("the command waits")

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="measures memory by /proc")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("alarm")
def test_hostile_checkpoints(name: str, tmp_path: Path, capsys: Any) -> None:
    case = CASES[name]
    path = case.make(tmp_path / "in")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    codes = [run(capsys, "inspect", str(path)), run(capsys, "verify", "--complete", str(path))]
    for to in case.to:
        out = tmp_path / "out"
        code, said = run(capsys, "convert", str(path), str(out), "--to", to, "--threads", "1", "--quiet")
        assert code in (0, 2)
        assert out.exists() == (code == 0)
        if code == 0:
            (out.rename(tmp_path / f"out-{to.replace(':', '-')}"))
        codes.append((code, said))
    assert before >= 0
    left = sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("out-"))
    assert left == ["in"], left
    errors = [said for code, said in codes if code == 2]
    if case.says == "":
        assert not errors, errors
    elif case.says != "*":  # one of the commands, at least: some need less of a file than others
        assert errors, f"nothing refused it: {case.says}"
        assert all(re.search(case.says, said) for said in errors), errors
    for said in errors:
        assert str(tmp_path) in said, said  # the file is named


def test_there_are_enough() -> None:
    assert len(CASES) >= 500
