# SPDX-License-Identifier: Apache-2.0
"""What continuous integration runs of a change: .ci/stages.py."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
if not (ROOT / ".ci/stages.py").exists():
    pytest.skip("a source archive has no continuous integration", allow_module_level=True)

from documents.stages import load  # noqa: E402

stages = load()


def names(touched: list[str] | None, count: int = 0) -> dict[str, str]:
    return {stage.name: reason for stage, reason in stages.chosen(touched, count)}


def test_every_stage_has_a_script() -> None:
    for stage in stages.STAGES:
        assert (ROOT / stage.command.split()[0]).is_file(), stage.command
        for path in stage.paths:
            assert path == "" or list(ROOT.glob(f"{path.removesuffix('/')}*")), f"{stage.name}: there is no {path}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("cpp/src/kernels/encode.inl.hpp", ["AVX-512 and AMX, emulated", "aarch64", "x86-64 without AVX"]),
        ("cpp/src/runtime/threads.cpp", ["thread sanitizer"]),
        ("pyproject.toml", ["packages", "the wheel alone"]),
        ("python/breccia/kernels/triton/casts.py", ["GPU kernels, interpreted"]),
        ("python/breccia/vllm/linear.py", ["serving programs"]),
        ("python/breccia/nn/linear.py", ["serving programs"]),
        (".ci/run_threads", ["thread sanitizer"]),
        ("docs/faq.md", []),
    ],
)
def test_a_stage_runs_where_its_paths_are_touched(path: str, expected: list[str]) -> None:
    found = names(["CHANGELOG.md", path])
    assert dict.fromkeys(expected, path).items() <= found.items()
    always = [name for name, reason in found.items() if reason == "always"]
    assert always == ["bash .ci/test", "documentation", "sanitizers", "fuzzers"]
    assert list(found.values()).count("its turn") == 1


def test_each_of_the_others_has_its_turn() -> None:
    turns = {name for count in range(len(stages.STAGES)) for name in names(["CHANGELOG.md"], count)}
    assert turns == {stage.name for stage in stages.STAGES if stage.in_turn}


def test_everything_runs_where_the_change_is_not_known() -> None:
    every = {stage.name for stage in stages.STAGES if stage.in_turn}
    assert names(None).keys() == every == names([".ci/common.sh"]).keys()
    assert [stage.name for stage in stages.STAGES if not stage.in_turn] == [
        "macOS and Windows",  # long, and of little that a change breaks
        "wheels",
        "figures",  # which are measured by hand
    ]


def commit(folder: Path, name: str, when: int) -> str:
    (folder / name).write_text("")
    date = {"GIT_AUTHOR_DATE": f"{when} +0000", "GIT_COMMITTER_DATE": f"{when} +0000"}
    who = {f"GIT_{role}_{what}": "a" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["add", name], ["commit", "-q", "-m", name]):
        subprocess.run(["git", "-C", folder, *command], check=True, env={"PATH": "/usr/bin:/bin", **date, **who})
    run = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def planned(capsys: Any, monkeypatch: Any, *arguments: str) -> dict[str, str]:
    monkeypatch.setattr("sys.argv", ["stages.py", *arguments])
    monkeypatch.setattr(stages, "base", lambda: "")
    assert stages.main() == 0
    return dict(line.split("\t")[:2] for line in capsys.readouterr().out.splitlines())


def test_what_another_stage_holds_is_not_run_beside_it(capsys: Any, monkeypatch: Any) -> None:
    plan = planned(capsys, monkeypatch)
    assert "sanitizers" not in plan
    assert plan["sanitizers, every backend"] == ".ci/run_sanitizers --every-backend"
    assert {stage.holds for stage in stages.STAGES} <= {stage.name for stage in stages.STAGES} | {""}


def test_all_of_them_run_every_case(capsys: Any, monkeypatch: Any) -> None:
    whole = {stage.name: f"{stage.command} {stage.whole}" for stage in stages.STAGES if stage.whole}
    assert whole.items() <= planned(capsys, monkeypatch, "--all").items()
    assert not set(whole.values()) & set(planned(capsys, monkeypatch).values())


def test_the_change_begins_a_day_and_thirty_commits_ago(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    hour, begin = 60 * 60, 1_700_000_000
    made = [commit(tmp_path, f"a{i}", begin + i * hour) for i in range(40)]
    assert stages.base() == made[9]  # thirty before the last
    made += [commit(tmp_path, f"b{i}", begin + 40 * hour + 60 * i) for i in range(40)]
    assert stages.base() == made[16]  # a day before the last, which is more than thirty
    monkeypatch.setenv("CI_BASE", made[50])
    assert stages.base() == made[50]
    monkeypatch.setenv("CI_BASE", "0" * 40)  # as GitHub says of a new branch
    assert stages.base() == made[16]


def test_a_short_history_does_not_tell(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    assert stages.base() == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path, "a", 1_700_000_000)
    assert stages.base() == ""
