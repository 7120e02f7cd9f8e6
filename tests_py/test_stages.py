# SPDX-License-Identifier: Apache-2.0
"""What continuous integration runs of a change: .ci/stages.py."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
if not (ROOT / ".ci/stages.py").exists():
    pytest.skip("a source archive has no continuous integration", allow_module_level=True)

from documents.stages import load  # noqa: E402

stages = load()


def names(touched: list[str] | None, count: int = 0) -> dict[str, str]:
    return {stage.name: reason for stage, reason, _ in stages.chosen(touched, count)}


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
        (".ci/run_producers", ["producers"]),
        ("docs/faq.md", []),
    ],
)
def test_a_stage_runs_where_its_paths_are_touched(path: str, expected: list[str]) -> None:
    found = names(["CHANGELOG.md", path])
    assert dict.fromkeys(expected, path).items() <= found.items()
    always = [name for name, reason in found.items() if reason == "always"]
    assert always == ["bash .ci/test", "documentation", "fuzzers", "sanitizers"]
    assert list(found.values()).count("its turn") == 1


def test_each_of_the_others_has_its_turn() -> None:
    turns = {name for count in range(len(stages.STAGES)) for name in names(["CHANGELOG.md"], count)}
    assert turns == {stage.name for stage in stages.STAGES if stage.in_turn}


@pytest.mark.parametrize("number", range(1, 16))
def test_each_stage_runs_every_share_on_every_backend(number: int, monkeypatch: Any) -> None:
    """However many stages take turns: the turn of their cases is not in step with theirs."""
    monkeypatch.setattr(stages, "STAGES", tuple(stages.Stage(f"{i}", ".ci/a", "", ("a/",)) for i in range(number)))
    turns: dict[str, list[int]] = {}
    for count in range(1000, 1000 + number * 30):
        ((stage, reason, turn),) = stages.chosen([], count)
        assert reason == "its turn"
        turns.setdefault(stage.name, []).append(turn)
    assert len(turns) == number
    for its in turns.values():
        assert its == list(range(its[0], its[0] + 30))
        for of in (3, 6, 12):
            assert {turn % of for turn in its[:of]} == set(range(of))
    assert [turn for *_, turn in stages.chosen(["a/b"], 1000)] == [1000] * number


@pytest.mark.parametrize("has", [1, 2, 3, 4])
def test_each_share_meets_each_backend(has: int) -> None:
    lines = (ROOT / ".ci/run_sanitizers").read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if "% ${#has[@]}" in line)
    loop = (
        f"for BRECCIA_TESTS_TURN in {{70..{69 + 12 * has}}}; do\n{lines[end - 1]}\n{lines[end]}\necho $backends; done"
    )
    script = f"BRECCIA_TESTS_ONE_OF=12; has=({' '.join('abcd'[:has])})\n{loop}"
    run = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    met = {(turn % 12, backend) for turn, backend in enumerate(run.stdout.split(), 70)}
    assert met == {(share, f"portable;{backend}") for share in range(12) for backend in "abcd"[:has]}


def test_scripts_take_the_turn_that_is_given(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["stages.py"])
    monkeypatch.setattr(stages, "base", lambda: "somewhere")
    monkeypatch.setattr(stages, "touched_since", lambda before: ["docs/faq.md"])
    monkeypatch.setattr(stages, "git", lambda *arguments: "1001")
    assert stages.main() == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    given = {turn for _, _, reason, _, turn, _ in lines if reason == "its turn"}
    assert {turn for _, _, reason, _, turn, _ in lines if reason == "always"} == {"1001"} != given
    assert "export BRECCIA_TESTS_TURN=$turn" in (ROOT / ".ci/run").read_text()
    script = "source .ci/common.sh; take_turns 3; echo $BRECCIA_TESTS_TURN"
    for turn in ("77", ""):
        environment = {**os.environ, "BRECCIA_TESTS_TURN": turn, "PYTHON": "true"}
        command = ["bash", "-euc", script, ROOT / ".ci/test"]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert (run.stdout.strip() == "77") == bool(turn)


def test_everything_runs_where_the_change_is_not_known() -> None:
    every = {stage.name for stage in stages.STAGES if stage.in_turn}
    assert names(None).keys() == every == names([".ci/common.sh"]).keys()
    assert [stage.name for stage in stages.STAGES if not stage.in_turn] == [
        "producers",  # long, and of programs that change with their own versions
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
    held = {stage.holds for stage in stages.STAGES}
    whole = {s.name: f"{s.command} {s.whole}" for s in stages.STAGES if s.whole and s.name not in held}
    assert whole.items() <= planned(capsys, monkeypatch, "--all").items()
    assert not set(whole.values()) & set(planned(capsys, monkeypatch).values())


def test_who_runs_a_part_says_how_to_run_the_whole() -> None:
    """A stage that leaves cases to another turn is one that --all gives --whole."""
    for stage in stages.STAGES:
        script = (ROOT / stage.command.split()[0]).read_text()
        assert ("take_turns " in script) == bool(stage.whole), stage.command


def test_what_a_stage_leaves_no_later_one_reads() -> None:
    left: set[str] = set()
    for stage in stages.STAGES:
        script = (ROOT / stage.command.split()[0]).read_text()
        assert all(folder.startswith("build/") for folder in stage.leaves)
        others = left - set(stage.leaves)
        read = [folder for folder in others if re.search(rf"{re.escape(folder.rstrip('*'))}(?![\w-])", script)]
        assert not read, f"{stage.command} reads {read}"
        left.update(stage.leaves)


FAKE = """#!/usr/bin/env bash
source "$(dirname "$0")/common.sh"
mkdir -p "build/$1/in" "build/$1-objects"
echo "$1" >>"$TMPDIR/of-a-test"
ls "$TMPDIR"
for _ in {1..600}; do
    [[ $1 == waits && ! -e build/told ]] || break
    sleep 0.1
done
[[ $1 != last ]] || touch build/told
[[ $1 != fails && ($1 != waits || -e build/told) ]]
"""


def fake_run(folder: Path, stages_of_it: Iterable[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    """A run of FAKE stages of these names, each of which runs alone or beside the next ones."""
    there = folder / "clone"
    (there / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", there / ".ci")
    shutil.copy(ROOT / ".ci/common.sh", there / ".ci")
    (there / ".ci/fake").write_text(FAKE)
    (there / ".ci/fake").chmod(0o755)
    plan = [f"{name}\t.ci/fake {name}\talways\t{how}\t1\tbuild/{name} build/{name}-*" for name, how in stages_of_it]
    (there / ".ci/stages.py").write_text(f"print({chr(10).join(plan)!r})\n")
    (there / ".ci/touched_tests.py").write_text("")
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHON": sys.executable}
    # Of the run that this test is part of, and how many processors it has tests see.
    for name in ("STAGE_TIMES", "BRECCIA_TESTS_TOUCHED", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    return subprocess.run([there / ".ci/run"], env=environment, capture_output=True, text=True, check=False)


def test_a_run_deletes_what_its_stages_leave(tmp_path: Path) -> None:
    """What they write for temporary, always; folders of theirs, where they passed."""
    plan = {"first": "alone", "beside": "and the next", "fails": "alone", "last": "alone"}
    run = fake_run(tmp_path, plan.items())
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"^free disk space: \d+ GiB here, \d+ GiB in ", run.stdout), run.stdout
    assert run.stdout.count("of-a-test") == len(plan)
    assert re.search(r"^fails +\d+ s +\d+ s  FAILED \(1\)$", run.stdout, re.MULTILINE), run.stdout
    assert sorted(path.name for path in (tmp_path / "clone/build").iterdir()) == ["fails", "fails-objects", "told"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="stages run one by one on one processor")
def test_a_stage_runs_beside_all_that_follow_until_it_ends(tmp_path: Path) -> None:
    plan = {"first": "alone", "waits": "and the next", "one": "and the next", "two": "alone", "last": "alone"}
    run = fake_run(tmp_path, plan.items())
    assert run.returncode == 0, run.stdout + run.stderr
    said = re.findall(r"^=== (\w+)$", run.stdout, re.MULTILINE)
    assert said == ["first", "one", "two", "last", "waits"]  # which waits for the last


def test_where_producers_are_not_to_be_had_their_stage_says_so(tmp_path: Path) -> None:
    """In one line, and nothing of it fails."""
    (tmp_path / ".ci").mkdir()
    for name in ("run_producers", "common.sh", "requirements-producers.txt"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci")
    python = tmp_path / "python"  # which makes an environment whose pip finds nothing
    refuses = "#!/bin/sh\necho Looking for it\necho ERROR: No matching distribution >&2\nexit 1\n"
    python.write_text(f"#!/bin/sh\nmkdir -p $3/bin\nprintf '{refuses}' >$3/bin/python\nchmod +x $3/bin/python\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    run = subprocess.run([tmp_path / ".ci/run_producers"], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    said = "producers are skipped, their packages cannot be installed: ERROR: No matching distribution\n"
    assert run.stdout == said


def test_frozen_bytes_and_contracts_always_run() -> None:
    """What holds of every recipe and format whatever the change touches, a table of cases or what they are read by."""
    for file, test in (
        ("test_golden", "test_bytes_are_the_frozen_ones"),
        ("bridges/test_every_bridge", "test_contract"),
    ):
        text = (ROOT / f"tests_py/{file}.py").read_text()
        assert "@pytest.mark.always\n" in text[: text.index(f"def {test}(")].rpartition("\n\n\n")[2], test


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


def test_the_change_begins_where_the_last_run_passed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    made = [commit(tmp_path, f"a{i}", 1_700_000_000 + i) for i in range(3)]
    stages.remember()
    assert stages.base() == ""  # of the same commit all is looked at again
    made.append(commit(tmp_path, "b", 1_700_000_003))
    assert stages.base() == made[2]
    (tmp_path / "c").write_text("")
    stages.remember()
    assert stages.base() == made[2]  # other files have passed than the commit's
    (tmp_path / "c").unlink()
    monkeypatch.setenv("CI_BASE", made[1])
    stages.remember()
    assert stages.base() == made[1]
    monkeypatch.delenv("CI_BASE")
    assert stages.base() == made[2]
    subprocess.run(["git", "-C", tmp_path, "checkout", "-q", made[0]], check=True)
    commit(tmp_path, "d", 1_700_000_004)
    assert stages.base() == ""  # what has passed is on another branch


def test_a_short_history_does_not_tell(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    assert stages.base() == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path, "a", 1_700_000_000)
    assert stages.base() == ""


def test_bytes_of_jax_are_of_optimized_code() -> None:
    """As a user's program is compiled: flags that spare compiling time may change what is rounded."""
    script = (ROOT / "tests_py/frameworks/jax_devices.py").read_text()
    flags = [flag for flag in script.replace('"', " ").split() if flag.startswith("--xla_")]
    assert flags == ["--xla_force_host_platform_device_count=4"]


PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(one LANGUAGES CXX)
add_executable(one one.cpp)
target_precompile_headers(one PRIVATE one.hpp)
"""


@pytest.mark.skipif(
    not all(map(shutil.which, ("ccache", "cmake", "ninja", "c++"))), reason="needs ccache and a compiler"
)
def test_the_compilers_cache_has_what_a_precompiled_header_precedes(tmp_path: Path) -> None:
    """As C++ tests are compiled; without their objects each stage would compile them at each landing."""
    texts = {"CMakeLists.txt": PROJECT, "one.hpp": "#include <cstddef>\n", "one.cpp": "int main() {}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    script = f"source {ROOT}/.ci/common.sh; cd {tmp_path}; CCACHE_BASEDIR=$PWD"
    for _ in range(2):
        script += "; rm -rf build; cmake -S . -B build -G Ninja; ccache -z; cmake --build build"
    script += "; ccache --print-stats"
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("CCACHE_", "CMAKE_"))}
    environment = {**settings, "CCACHE_DIR": str(tmp_path / "cache")}
    command = ["bash", "-euc", script, ROOT / ".ci/test"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = dict(re.findall(r"^(\w+)\t(\d+)$", run.stdout, re.MULTILINE))
    assert counts["could_not_use_precompiled_header"] == "0"
    assert counts["cache_miss"] == "0"
    assert (
        int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"]) == 2
    )  # the header and what it precedes
