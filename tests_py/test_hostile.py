# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to do harm: each is read, or refused by one line that says why, in little time and memory."""

import gc
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from breccia.cli import main
from fault_runner import tree
from hostile import headers
from pace import import_peers, pace
from test_merge_lora import base

CASES = hostile.every()
SECONDS = 2.0  # of processor time, a command
DEFECTS = ("Traceback", "a defect", "argument types", "object has no attribute", "unexpected keyword", " at 0x")
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # which keeps memory that was given back
MEMORY = 256 << 20  # bytes, over the input's


def case(name: str, slow: bool) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] if slow else [])


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def run(capsys: Any, command: str, path: str, *rest: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit code and the error of a command that is bounded in time and memory, over what is at a path."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    resident, begin = status("VmRSS"), time.process_time()
    code = main([command, *before, path, *rest])
    seconds, memory = time.process_time() - begin, status("VmHWM") - resident
    said = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in said.out), "names are printed as they are"
    allowed = MEMORY + sum(len(raw) for raw in (tree(Path(path)) or {}).values()) if memory > MEMORY else MEMORY
    assert seconds < SECONDS or seconds < SECONDS * pace(), f"{command} took {seconds:.1f} s"
    assert memory <= allowed or SANITIZED, f"{command} took {memory >> 20} MiB"
    if code == 0:
        assert said.err == ""
        return 0, ""
    assert code in (1, 2)
    lines = said.err.splitlines()
    if code == 2:
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"breccia {command}: "), lines
        assert len(lines[0]) < 2200
        assert lines[0].isprintable()
        for word in DEFECTS:
            assert word not in lines[0]
    return code, said.err


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What other tests and imports left is no work of the commands."""
    import_peers()
    gc.collect()
    gc.freeze()


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
@pytest.mark.parametrize("name", [case(name, content.is_slow) for name, content in CASES.items()])
@pytest.mark.in_turn
@pytest.mark.usefixtures("alarm")
def test_hostile_checkpoints(name: str, tmp_path: Path, capsys: Any) -> None:
    case = CASES[name]
    path = case.make(tmp_path / "in")
    codes = [
        run(capsys, "inspect", str(path)),
        run(capsys, "inspect", str(path), "--json"),
        run(capsys, "verify", str(path), "--complete"),
    ]
    run(capsys, "report", str(path), "--html", str(tmp_path / "out-report.html"))
    for to in case.to:
        out = tmp_path / "out"
        code, said = run(capsys, "convert", str(path), str(out), "--to", to, "--threads", "1", "--quiet")
        assert code in (0, 2)
        assert out.exists() == (code == 0)
        if code == 0:
            (out.rename(tmp_path / f"out-{to.replace(':', '-')}"))
        codes.append((code, said))
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return base(tmp_path_factory.mktemp("model") / "base")


SAID = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ODD = [None, 0, -1, 1e308, "\x1b[31m", [1], {"(": 1}, {"(.+)+x": 1}, {"q_proj": "x"}, {"q_proj": 2**70}, float("nan")]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {
    "lora_A": {"shape": [4, 128], "data_offsets": [0, 2048]},
    "lora_B": {"shape": [128, 4], "data_offsets": [2048, 4096]},
}
WEIGHTS = headers.stored(
    json.dumps({f"{LAYER}.{side}.weight": {"dtype": "F32", **fields} for side, fields in PAIR.items()}), bytes(4096)
)
ADAPTERS: dict[str, tuple[hostile.Content, hostile.Content]] = {
    f"weights, {name}": (json.dumps(SAID).encode(), case.files["bad.safetensors"])
    for name, case in headers.CASES.items()
}
for name, content in {
    "a pipe": hostile.fifo,
    "a directory": hostile.folder,
    "without end": hostile.link("/dev/zero"),
    "a link to nothing": hostile.link("gone"),
    "a list": b"[]",
    "cut": b"{",
    "deep": b'{"a":' * 100_000,
    "of lists": hostile.later(lambda: b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"),
    "empty": b"",
}.items():
    ADAPTERS[f"config {name}"] = (content, WEIGHTS)
    ADAPTERS[f"weights {name}"] = (json.dumps(SAID).encode(), content)
for key in (
    "peft_type",
    "r",
    "lora_alpha",
    "alpha_pattern",
    "rank_pattern",
    "use_rslora",
    "fan_in_fan_out",
    "use_dora",
):
    for number, value in enumerate(ODD):
        ADAPTERS[f"{key}, {number}"] = (json.dumps({**SAID, key: value}).encode(), WEIGHTS)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="measures memory by /proc")
@pytest.mark.parametrize(
    "name", [case(name, any(isinstance(c, hostile.Large) for c in files)) for name, files in ADAPTERS.items()]
)
@pytest.mark.in_turn
@pytest.mark.usefixtures("alarm")
def test_hostile_adapters(name: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for file, content in zip(("adapter_config.json", "adapter_model.safetensors"), ADAPTERS[name], strict=True):
        content(folder / file) if callable(content) else (folder / file).write_bytes(content)
    code, said = run(capsys, "merge-lora", str(folder), str(tmp_path / "out"), "--quiet", before=(str(model),))
    assert sorted(p.name for p in tmp_path.iterdir()) == (["in", "out"] if code == 0 else ["in"])
    assert code == 0 or "adapter" in said.lower() or "tensor " in said, said


def test_there_are_enough() -> None:
    """As many as docs/reliability.md says."""
    assert len(CASES) > 1000
    assert len(ADAPTERS) > 200
