# SPDX-License-Identifier: Apache-2.0
"""What continuous integration runs of a change: .ci/stages.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
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
        for of in (3, 6):
            assert {turn % of for turn in its[:of]} == set(range(of))
    assert [turn for *_, turn in stages.chosen(["a/b"], 1000)] == [1000] * number


@pytest.mark.parametrize("has", [1, 2, 3, 4])
def test_each_share_meets_each_backend(has: int) -> None:
    lines = (ROOT / ".ci/run_sanitizers").read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if "% ${#has[@]}" in line)
    loop = f"for BRECCIA_TESTS_TURN in {{70..{69 + 6 * has}}}; do\n{lines[end - 1]}\n{lines[end]}\necho $backends; done"
    script = f"BRECCIA_TESTS_ONE_OF=6; has=({' '.join('abcd'[:has])})\n{loop}"
    run = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    met = {(turn % 6, backend) for turn, backend in enumerate(run.stdout.split(), 70)}
    assert met == {(share, f"portable;{backend}") for share in range(6) for backend in "abcd"[:has]}


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
[[ $1 != fails ]]
"""


def test_a_run_deletes_what_its_stages_leave(tmp_path: Path) -> None:
    """What they write for temporary, always; folders of theirs, where they passed."""
    there = tmp_path / "clone"
    (there / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", there / ".ci")
    shutil.copy(ROOT / ".ci/common.sh", there / ".ci")
    (there / ".ci/fake").write_text(FAKE)
    (there / ".ci/fake").chmod(0o755)
    plan = [
        f"{name}\t.ci/fake {name}\talways\t{how}\t1\tbuild/{name} build/{name}-*"
        for name, how in (("first", "alone"), ("beside", "and the next"), ("fails", "alone"), ("last", "alone"))
    ]
    (there / ".ci/stages.py").write_text(f"print({chr(10).join(plan)!r})\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHON": sys.executable}
    environment.pop("STAGE_TIMES", None)  # the summary of the run that this test is part of
    run = subprocess.run([there / ".ci/run"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"^free disk space: \d+ GiB here, \d+ GiB in ", run.stdout), run.stdout
    assert run.stdout.count("of-a-test") == len(plan)
    assert re.search(r"^fails +\d+ s +\d+ s  FAILED \(1\)$", run.stdout, re.MULTILINE), run.stdout
    assert sorted(path.name for path in (there / "build").iterdir()) == ["fails", "fails-objects"]
    assert not list(temporary.iterdir())


MANY = """
import pytest

def cases(count): return pytest.mark.parametrize("i", range(count))
def test_single(): pass
@cases(6)
def test_few(i): pass
@cases(40)
def test_many(i): pass
@cases(40)
@pytest.mark.always
def test_pages(i): pass
@cases(6)
@pytest.mark.in_turn
def test_long(i): pass
@pytest.mark.in_turn
def test_long_single(): pass
@cases(40)
@pytest.mark.slow
def test_slow(i): pass
@pytest.mark.slow
def test_slow_single(): pass
"""
ALWAYS = {"test_single": 1, "test_few": 6, "test_pages": 40, "test_long_single": 1}


@pytest.mark.parametrize(("of", "marked"), [(2, "slow"), (3, "not slow"), (6, "not slow")])
def test_each_case_has_its_turn_and_no_test_is_silent(of: int, marked: str, tmp_path: Path) -> None:
    write_tests(tmp_path)
    turns = [{"ONE_OF": str(of), "TURN": str(7 + turn)} for turn in range(of)]
    every, *shares = collected(tmp_path, "-m", marked, settings=[{"TURN": "7"}, *turns])
    slow = marked == "slow"
    whole = {"test_slow": 40, "test_slow_single": 1} if slow else {**ALWAYS, "test_many": 40, "test_long": 6}
    assert counts(every) == whole
    assert set().union(*shares) == every
    always = {"test_slow_single": 1} if slow else ALWAYS
    for share in shares:
        found = counts(share)
        assert found.keys() == whole.keys()
        assert always.items() <= found.items()
        assert all(found[name] < whole[name] for name in whole.keys() - always.keys())
        if of < 4:
            many = "test_slow" if slow else "test_many"
            assert 40 / of - 9 < found[many] < 40 / of + 9


def test_files_that_are_touched_run_whole(tmp_path: Path) -> None:
    write_tests(tmp_path)
    shutil.copy(tmp_path / "test_many.py", tmp_path / "test_other.py")
    settings = [{"ONE_OF": "3", "TURN": "1", "TOUCHED": touched} for touched in ("", "test_no.py\ntest_many.py")]
    part, found = collected(tmp_path, "-m", "not slow", settings=settings)
    whole = {**ALWAYS, "test_many": 40, "test_long": 6}
    assert counts(name for name in found if name.startswith("test_many.py")) == whole
    others = {name for name in found if name.startswith("test_other.py")}
    assert others == {name for name in part if name.startswith("test_other.py")}
    assert counts(others)["test_many"] < 40


def test_what_changes_runs_whole() -> None:
    """Files of tests that are touched, and those that are named as a source that is."""
    tests = ["test_gguf", "test_checkpoint_gguf", "test_checkpoint", "bridges/test_gguf", "test_cast_parts", "test_ops"]
    tests = [f"tests_py/{name}.py" for name in tests]
    found = {
        "tests_py/test_ops.py": {"test_ops"},
        "python/breccia/checkpoint/_gguf.py": {
            "test_gguf",
            "test_checkpoint_gguf",
            "test_checkpoint",
            "bridges/test_gguf",
        },
        "cpp/src/quantize/cast/parts.cpp": {"test_cast_parts"},
        "docs/gguf.md": set(),
    }
    for path, names in found.items():
        assert stages.run_whole([path], tests) == sorted(f"tests_py/{name}.py" for name in names), path
    every = [f"tests_py/test_{i}.py" for i in range(stages.FEW + 1)]
    assert stages.run_whole(every[1:], every) == sorted(every[1:])
    assert stages.run_whole(every, every) == sorted(every)  # all that the change edits
    same_name = [f"tests_py/{i}/test_gguf.py" for i in range(stages.FEW + 1)]
    source = "python/breccia/gguf.py"
    assert stages.run_whole([source], same_name[1:]) == sorted(same_name[1:])
    assert stages.run_whole([source, *every[:2]], same_name + every) == every[:2]  # nearly everything would run
    assert stages.run_whole(None, every) == []


def test_who_imports_what_changes_runs_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """Tests that import or name another file of tests_py that is touched, or that import what does."""
    texts = {
        "test_a.py": "import cases\n",
        "test_b.py": "from hostile import gguf\n",
        "test_c.py": 'RUN = FOLDER / "devices.py"\n',
        "test_d.py": "from tables import ALL as cases_of_all\n",
        "test_e.py": '"""Of many cases."""\n',
        "tables.py": 'FILE = FOLDER / "data/golden.json"\n',
        "cases.py": "",
        "devices.py": "import cases\n",
        "hostile/__init__.py": "",
        "hostile/gguf.py": 'FOUND = FOLDER / "data" / "crashes"\n',
    }
    (tmp_path / "tests_py/hostile").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "tests_py" / name).write_text(text)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    files = [f"tests_py/{name}" for name in texts]
    for name, found in {
        "cases.py": "ac",
        "hostile/gguf.py": "b",
        "devices.py": "c",
        "data/golden.json": "d",
        "data/crashes/any": "b",
        "nothing.py": "",
    }.items():
        assert stages.run_whole([f"tests_py/{name}"], files) == [f"tests_py/test_{x}.py" for x in found], name
    monkeypatch.setattr(stages, "FEW", 1)
    assert stages.run_whole(["tests_py/cases.py", "tests_py/test_e.py"], files) == ["tests_py/test_e.py"]


def test_frozen_bytes_and_contracts_always_run() -> None:
    """What holds of every recipe and format whatever the change touches, a table of cases or what they are read by."""
    for file, test in (
        ("test_golden", "test_bytes_are_the_frozen_ones"),
        ("bridges/test_every_bridge", "test_contract"),
    ):
        text = (ROOT / f"tests_py/{file}.py").read_text()
        assert "@pytest.mark.always\n" in text[: text.index(f"def {test}(")].rpartition("\n\n\n")[2], test


def test_scripts_know_what_the_change_touches(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "base", lambda: "somewhere")
    monkeypatch.setattr(
        stages, "touched_since", lambda before: ["tests_py/test_stages.py", "tests_py/gpu/test_words.py"]
    )
    monkeypatch.setattr("sys.argv", ["stages.py", "--touched"])
    assert stages.main() == 0
    assert capsys.readouterr().out.split() == ["tests_py/gpu/test_words.py", "tests_py/test_stages.py"]
    assert "BRECCIA_TESTS_TOUCHED=$(" in (ROOT / ".ci/common.sh").read_text()


def write_tests(folder: Path) -> None:
    for name in ("conftest", "flushes", "required_peers"):
        shutil.copy(ROOT / f"tests_py/{name}.py", folder)
    (folder / "test_many.py").write_text(MANY)


def counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(name.partition("::")[2].partition("[")[0] for name in names))


# Prints the tests that pytest collects, a line for each of the settings.
COLLECT = """
import contextlib, io, json, os, sys
import pytest
class Items:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]
items = Items()
for settings in json.loads(sys.argv[1]):
    for name in ("ONE_OF", "TURN", "TOUCHED"):
        os.environ["BRECCIA_TESTS_" + name] = settings.get(name, "")
    with contextlib.redirect_stdout(io.StringIO()):
        assert pytest.main(sys.argv[2:], plugins=[items]) == 0
    print(json.dumps(items.names))
"""


def collected(folder: Path, *arguments: str, settings: list[dict[str, str]]) -> list[set[str]]:
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", *arguments]
    command = [sys.executable, "-c", COLLECT, json.dumps(settings), *options, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("[")]


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
