# SPDX-License-Identifier: Apache-2.0
"""Every result that the documents show says of what program it is, and benchmarks/measure.py tells when it is not of
this one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

measure = pytest.importorskip("measure", exc_type=ImportError)  # a source archive has no benchmarks
import make_docs  # noqa: E402
from documents import markdown  # noqa: E402

ROOT = Path(__file__).parent.parent
RESULT = measure.Result("cpu", "python import_time.py --json {out}", ("tests_py/test_measure.py",))


def test_every_result_is_made_by_a_command() -> None:
    """The script is there, and so is all that decides what it says."""
    assert {path.stem for path in measure.FOLDER.glob("*.json")} <= measure.RESULTS.keys()
    for name, result in measure.RESULTS.items():
        for source in (result.script, *result.sources):
            assert measure.digest(source), (name, source)


def test_every_result_that_is_shown_is_there() -> None:
    texts = [path.read_text() for path in [*(ROOT / "benchmarks/documents").glob("*.py"), Path(make_docs.__file__)]]
    shown = {name for text in texts for name in re.findall(r'\b(?:load|measured)\("([\w.]+)"', text)}
    assert len(shown) > 20
    assert shown <= measure.RESULTS.keys()
    assert all((measure.FOLDER / f"{name}.json").exists() for name in shown)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setattr(measure, "FOLDER", tmp_path)
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", {"one": RESULT})
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    made = {**measure.record(RESULT, "0123456789ab"), **changes}
    (folder / "one.json").write_text(json.dumps({"rows": [], "made": made}))


def test_a_result_of_this_program(folder: Path) -> None:
    write(folder)
    assert measure.stale() == []
    assert markdown.load("one") == {"rows": []}
    line = markdown.measured("one", ", one thread").strip()
    said = rf"\*.+, one thread; breccia {re.escape(measure.version())} at 0123456, \d{{4}}-\d\d-\d\d\.\*"
    assert re.fullmatch(said, line)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"breccia": "0.0.9"}, "it is of version 0.0.9, this is "),
        ({"commit": "0123456789ab-dirty"}, "it must be of a commit"),
        ({"commit": ""}, "it must be of a commit"),
        ({"sources": {"benchmarks/import_time.py": "0", "tests_py/test_measure.py": "0"}}, "test_measure.py changed"),
        ({"sources": {"benchmarks/gone.py": "0"}}, "benchmarks/gone.py changed since"),
        ({"sources": {}}, "changed since"),
    ],
)
def test_a_result_of_another_program_is_named(folder: Path, changes: dict[str, Any], said: str) -> None:
    write(folder, **changes)
    (found,) = measure.stale()
    assert found.startswith("one.json: ")
    assert said in found
    assert found.endswith(": python benchmarks/measure.py one")


def test_a_result_of_nobody_is_named(folder: Path) -> None:
    (folder / "other.json").write_text("{}")
    (folder / "one.json").write_text("{}")
    assert measure.stale() == [
        "one.json: no record says of which version it is: python benchmarks/measure.py one",
        "other.json: benchmarks/measure.py does not make it",
    ]


def test_a_measurement_is_recorded(folder: Path) -> None:
    measure.measure("one", "0123456789ab")
    found = json.loads((folder / "one.json").read_text())
    assert found["best_ms"] > 0
    made = found["made"]
    assert made["commit"] == "0123456789ab"
    assert made["command"] == "python import_time.py"
    assert made["sources"].keys() == {"benchmarks/import_time.py", "tests_py/test_measure.py"}
    assert measure.stale() == []


def test_a_digest_is_of_names_and_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.cpp").write_text("1")
    seen = {measure.digest("a/")}
    (tmp_path / "a/x.cpp").write_text("2")
    seen.add(measure.digest("a/"))
    (tmp_path / "a/x.cpp").rename(tmp_path / "a/y.cpp")
    seen.add(measure.digest("a/"))
    assert len(seen) == 3
    (tmp_path / "a/y.so").write_text("built")
    assert measure.digest("a/") in seen
