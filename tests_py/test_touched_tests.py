# SPDX-License-Identifier: Apache-2.0
"""Which cases of Python tests run at a landing: tests_py/conftest.py, and what the change touches:
.ci/touched_tests.py."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci/touched_tests.py"
if not SCRIPT.exists():
    pytest.skip("a source archive has no continuous integration", allow_module_level=True)

from documents.stages import load  # noqa: E402

stages = load()  # which the script imports by its name
touched_tests = load("touched_tests")

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


@pytest.mark.parametrize("of", [2, 3, 6, 12])
def test_each_case_has_its_turn_and_no_test_is_silent(of: int, tmp_path: Path) -> None:
    write_tests(tmp_path)
    every, *shares = collected(tmp_path, "-m", "not slow", settings=every_turn(of))
    whole = {**ALWAYS, "test_many": 40, "test_long": 6}
    assert counts(every) == whole
    assert set().union(*shares) == every
    for share in shares:
        found = counts(share)
        assert found.keys() == whole.keys()
        assert ALWAYS.items() <= found.items()
        assert found["test_many"] < 40
        assert found["test_long"] < 6
        if of < 4:
            assert 40 / of - 9 < found["test_many"] < 40 / of + 9


@pytest.mark.parametrize("of", [2, 6])
def test_each_slow_test_has_its_turn(of: int, tmp_path: Path) -> None:
    """Those of a single case, too."""
    write_tests(tmp_path)
    every, *shares = collected(tmp_path, "-m", "slow", settings=every_turn(of))
    assert counts(every) == {"test_slow": 40, "test_slow_single": 1}
    assert sorted(name for share in shares for name in share) == sorted(every)
    assert all(40 / of - 9 < len(share) < 40 / of + 9 for share in shares)


def every_turn(of: int) -> list[dict[str, str]]:
    """The settings of the whole, and of each turn."""
    return [{"TURN": "7"}, *({"ONE_OF": str(of), "TURN": str(7 + turn)} for turn in range(of))]


def test_what_is_touched_runs_whole(tmp_path: Path) -> None:
    """Files, and tests of others."""
    write_tests(tmp_path)
    for name in ("test_other.py", "test_third.py"):
        shutil.copy(tmp_path / "test_many.py", tmp_path / name)
    touched = "test_no.py\ntest_many.py\ntest_third.py::test_many\n"
    settings = [{"ONE_OF": "3", "TURN": "1", "TOUCHED": names} for names in ("", touched)]
    part, found = collected(tmp_path, "-m", "not slow", settings=settings)
    whole = {**ALWAYS, "test_many": 40, "test_long": 6}
    assert counts(of_file(found, "test_many.py")) == whole
    assert of_file(found, "test_other.py") == of_file(part, "test_other.py")
    assert counts(of_file(found, "test_other.py"))["test_many"] < 40
    third = counts(of_file(found, "test_third.py"))
    assert third == {**counts(of_file(part, "test_third.py")), "test_many": 40}
    assert third["test_long"] < 6


BEFORE = '''"""Of one thing."""

import os

import pytest

TABLE = [1, 2]


@pytest.fixture
def one():
    return 1


@pytest.mark.parametrize("a", TABLE)
def test_a(a):
    assert a


# Of two.
def test_b(one):
    assert one
    assert os


def test_c():
    assert True
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    assert a\n", "    assert a > 0\n", ["test_a"]),
        ('"a", TABLE', '"a", [*TABLE, 3]', ["test_a"]),  # a decorator
        ("    assert one\n", "", ["test_b"]),  # lines that are gone
        ("def test_b(", "def test_d(", ["test_d"]),  # another name
        ("def test_c():\n    assert True\n", "", []),  # a test that is gone
        ("    assert True\n", "    assert True\n\n\ndef test_d():\n    assert True\n", ["test_d"]),
        ("import os\n", "import os\nimport sys\n", []),
        ("import os\n", "", []),
        ("# Of two.\n", "", []),
        ('"""Of one thing."""', '"""Of two things."""', []),
        ("    return 1\n", "    return 2\n", [""]),  # a fixture
        ("TABLE = [1, 2]\n", "TABLE = [1]\n", [""]),
        ("TABLE = [1, 2]\n", "", [""]),
        ("    assert True\n", "    assert True\n\n\nOTHER = TABLE\n", [""]),
    ],
)
def test_a_change_touches(old: str, new: str, expected: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """The tests of a file whose lines differ, "" where those do that any of them may depend on."""
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    assert BEFORE.count(old) == 1
    before = commit(tmp_path, {"tests_py/test_a.py": BEFORE})
    (tmp_path / "tests_py/test_a.py").write_text(BEFORE.replace(old, new))
    assert sorted(touched_tests.touched_tests("tests_py/test_a.py", before)) == expected
    whole = [f"tests_py/test_a.py::{name}" if name else "tests_py/test_a.py" for name in expected]
    assert touched_tests.run_whole(before, ["tests_py/test_a.py"]) == whole


def test_a_new_file_runs_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    before = commit(tmp_path, {"tests_py/test_b.py": "def test_a():\n    pass\n", "tests_py/test_c.py": "\n"})
    commit(tmp_path, {"tests_py/test_a.py": BEFORE})
    (tmp_path / "tests_py/test_c.py").unlink()
    files = [f"tests_py/test_{x}.py" for x in "abc"]
    assert touched_tests.run_whole(before, files) == ["tests_py/test_a.py"]
    assert touched_tests.run_whole("", files) == []


def test_of_many_tests_each_has_its_part(tmp_path: Path, monkeypatch: Any) -> None:
    """As nearly everything would run whole."""
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(touched_tests, "FEW_TESTS", 2)
    before = commit(tmp_path, {"tests_py/test_a.py": BEFORE})
    for count, expected in ((2, ["tests_py/test_a.py::test_0", "tests_py/test_a.py::test_1"]), (3, [])):
        more = "".join(f"\n\ndef test_{i}():\n    pass\n" for i in range(count))
        (tmp_path / "tests_py/test_a.py").write_text(BEFORE + more)
        assert touched_tests.run_whole(before, ["tests_py/test_a.py"]) == expected


def test_what_changes_runs_whole() -> None:
    """Files of tests that are touched, and those that are named as a source that is."""
    tests = ["test_gguf", "test_checkpoint_gguf", "test_checkpoint", "bridges/test_gguf", "test_cast_parts", "test_ops"]
    tests += ["test_docs", "frameworks/test_examples"]
    tests = [f"tests_py/{name}.py" for name in tests]
    found = {
        "python/breccia/checkpoint/_gguf.py": {
            "test_gguf",
            "test_checkpoint_gguf",
            "test_checkpoint",
            "bridges/test_gguf",
        },
        "cpp/src/quantize/cast/parts.cpp": {"test_cast_parts"},
        "docs/gguf.md": {"test_docs"},
        "examples/02_gguf.py": {"frameworks/test_examples"},
        "benchmarks/results/gguf.json": set(),
    }
    for path, names in found.items():
        assert touched_tests.whole_files(set(), [path], tests) == {f"tests_py/{name}.py" for name in names}, path
    few = touched_tests.FEW_FILES
    every = [f"tests_py/test_{i}.py" for i in range(few + 1)]
    assert touched_tests.whole_files(set(every[1:]), every, every) == set(every[1:])
    assert touched_tests.whole_files(set(every), every, every) == set()  # nearly everything would run
    same_name = [f"tests_py/{i}/test_gguf.py" for i in range(few)]
    source = "python/breccia/gguf.py"
    assert touched_tests.whole_files(set(), [source], same_name) == set(same_name)
    assert touched_tests.whole_files(set(every[:2]), [source], same_name + every) == set(every[:2])


def test_who_imports_what_changes_runs_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """Tests that import or name another file of tests_py or benchmarks that is touched, or that import what does."""
    texts = {
        "test_a.py": "import cases\n",
        "test_b.py": "from hostile import gguf\n",
        "test_c.py": 'RUN = FOLDER / "devices.py"\n',
        "test_d.py": "from tables import ALL as cases_of_all\n",
        "test_e.py": '"""Of many cases."""\n',
        "test_f.py": "from comparison import speed\n",
        "tables.py": 'FILE = FOLDER / "data/golden.json"\n',
        "cases.py": "",
        "devices.py": "import cases\n",
        "hostile/__init__.py": "",
        "hostile/gguf.py": 'FOUND = FOLDER / "data" / "crashes"\n',
    }
    write(tmp_path, {f"tests_py/{name}": text for name, text in texts.items()})
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
        whole = touched_tests.whole_files(set(), [f"tests_py/{name}"], files)
        assert whole == {f"tests_py/test_{x}.py" for x in found}, name
    assert touched_tests.whole_files(set(), ["benchmarks/comparison/speed.py"], files) == {"tests_py/test_f.py"}
    monkeypatch.setattr(touched_tests, "FEW_FILES", 1)
    assert touched_tests.whole_files({"tests_py/test_e.py"}, ["tests_py/cases.py"], files) == {"tests_py/test_e.py"}


def test_scripts_know_what_the_change_touches(tmp_path: Path) -> None:
    """By a file, which a run writes once for all its stages, and deletes."""
    before = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CI_BASE": before.stdout.strip(), "PYTHON": sys.executable}
    environment.pop("BRECCIA_TESTS_TOUCHED", None)
    script = (
        "source .ci/common.sh; find_touched; echo $BRECCIA_TESTS_TOUCHED; find_touched; echo $BRECCIA_TESTS_TOUCHED"
    )
    command = ["bash", "-euc", script, ROOT / ".ci/test"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    first, second = run.stdout.split()
    assert first == second
    assert Path(first).parent == tmp_path
    assert not list(tmp_path.iterdir())
    assert "\nfind_touched\n" in (ROOT / ".ci/run").read_text()


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(folder: Path, texts: dict[str, str]) -> str:
    """Files of these texts, in a commit of which the name is told."""
    write(folder, texts)
    who = ["-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", *texts], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    run = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def write_tests(folder: Path) -> None:
    for name in ("conftest", "flushes", "required_peers"):
        shutil.copy(ROOT / f"tests_py/{name}.py", folder)
    (folder / "test_many.py").write_text(MANY)


def of_file(names: Iterable[str], file: str) -> set[str]:
    return {name for name in names if name.startswith(f"{file}::")}


def counts(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(name.partition("::")[2].partition("[")[0] for name in names))


# Prints the tests that pytest collects, a line for each of the settings.
COLLECT = """
import contextlib, io, json, os, pathlib, sys
import pytest
class Items:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]
items = Items()
touched = pathlib.Path(sys.argv[2])
os.environ["BRECCIA_TESTS_TOUCHED"] = str(touched)
for settings in json.loads(sys.argv[1]):
    touched.write_text(settings.get("TOUCHED", ""))
    for name in ("ONE_OF", "TURN"):
        os.environ["BRECCIA_TESTS_" + name] = settings.get(name, "")
    with contextlib.redirect_stdout(io.StringIO()):
        assert pytest.main(sys.argv[3:], plugins=[items]) == 0
    print(json.dumps(items.names))
"""


def collected(folder: Path, *arguments: str, settings: list[dict[str, str]]) -> list[set[str]]:
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", *arguments]
    command = [sys.executable, "-c", COLLECT, json.dumps(settings), str(folder / "touched"), *options, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("[")]
