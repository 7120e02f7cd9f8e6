# SPDX-License-Identifier: Apache-2.0
"""Every result that the documents show says of what program it is, and benchmarks/measure.py tells when it is not of
this one."""

import json
import re
import subprocess
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
    assert measure.expected("one") == "not timed"
    measure.measure("one", "0123456789ab")
    assert re.fullmatch(r"[1-9]\d* s", measure.expected("one"))
    found = json.loads((folder / "one.json").read_text())
    assert found["best_ms"] > 0
    made = found["made"]
    assert made["commit"] == "0123456789ab"
    assert made["command"] == "python import_time.py"
    assert made["sources"].keys() == {"benchmarks/import_time.py", "tests_py/test_measure.py"}
    assert measure.stale() == []


def test_words_about_code_do_not_make_a_figure_old(tmp_path: Path) -> None:
    texts = {
        "one.py": ('"""What."""\n\n\ndef f():\n    """How.\n\n    Why.\n    """\n    # Because.\n    return 1\n',
                   "def f():\n    return 1\n", "def f():\n    return 2\n"),
        "one.hpp": ("// What\n/* and\nhow */ int f() {\n  return 1; // why\n}\n", "int f() { return 1; }", "int g();"),
        "one.json": ("1", "1", "2"),
    }  # fmt: skip
    for name, versions in texts.items():
        path, digests = tmp_path / name, []
        for text in versions:
            path.write_text(text)
            digests.append(measure.code(path))
        assert digests[0] == digests[1] != digests[2], name


def of_the_core(part: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in measure.included(part)}


def test_every_kernel_decides_casts_or_products() -> None:
    casts, products = of_the_core("casts of the core"), of_the_core("products of the core")
    steps = of_the_core("optimizers in the core")
    for folder in ("kernels", "backends", "quantize", "matmul", "runtime", "contract"):
        files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cpp/src" / folder).rglob("*") if p.is_file()}
        assert files - casts - products - steps <= {*measure.CASTS, *measure.PRODUCTS}
    assert {path for path in casts if "matmul" in path or "gem" in path or "kernel_interface" in path} == set()
    assert {path for path in products if "quantize" in path or "compare_kernels.inl" in path} == set()
    assert {"cpp/src/backends/avx2/vec.hpp", "cpp/src/kernels/vocabulary.inl.hpp"} <= casts & products
    assert "cpp/include/breccia/codecs/fp8.hpp" in casts & products
    for part, kernel in (("encoding in the core", "encode"), ("comparing in the core", "compare_kernels")):
        assert {"cpp/src/backends/avx2/vec.hpp", f"cpp/src/kernels/{kernel}.inl.hpp"} <= of_the_core(part) <= casts


def test_a_digest_of_a_part_is_of_what_it_includes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "PARTS", {"casts": ("cpp/src/*.cpp",)})
    for folder in ("cpp/src/backends/one", "cpp/src/kernels", "cpp/include/breccia/codecs"):
        (tmp_path / folder).mkdir(parents=True)
    texts = {
        "cpp/src/cast.cpp": '#include "kernels/a.hpp"\n#include <vector>\n  # include "breccia/codecs/fp8.hpp"\n',
        "cpp/src/kernels/a.hpp": '#include "vec.hpp"\n#include "breccia/ops.hpp"\n',
        "cpp/src/backends/one/vec.hpp": "",
        "cpp/include/breccia/codecs/fp8.hpp": "",
        "cpp/include/breccia/ops.hpp": "",
        "cpp/src/kernels/b.hpp": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    decide = set(texts) - {"cpp/include/breccia/ops.hpp", "cpp/src/kernels/b.hpp"}
    assert {path.relative_to(tmp_path).as_posix() for path in measure.included("casts")} == decide
    for name, text in texts.items():
        before = measure.digest("casts")
        (tmp_path / name).write_text(text + "int changed;\n")
        assert (measure.digest("casts") != before) == (name in decide), name
    (tmp_path / "cpp/src/kernels/a.hpp").write_text('#include "gone.hpp"\n')
    with pytest.raises(FileNotFoundError, match=r"there is no gone.hpp, which .*a.hpp includes"):
        measure.digest("casts")


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


def test_readme_shows_what_is_recorded_beside_the_best_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from documents import front

    monkeypatch.setattr(front, "measured", lambda name: "")
    assert len(front.front().splitlines()) == 3  # a head without rows
    monkeypatch.setattr(front, "measured", lambda name: f"\n\n*{name} of this commit.*")
    lines = front.front().splitlines()
    assert len(lines) == 2 + 4 + 1 + len(front.FRONT)
    assert lines[-len(front.FRONT) :] == [f"*{name} of this commit.*" for name in front.FRONT]
    for line, program in zip(lines[2:6], ("llm-compressor", "GPTQModel", "compressed-tensors", "torch"), strict=True):
        _, ours, peer, theirs = (cell.strip() for cell in line.strip("|").split("|"))
        assert peer.startswith(program)
        assert float(ours.split()[0]) < float(theirs.split()[0])


def test_the_commit_is_of_what_is_measured(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a tree where results alone differ, since they are what is written, and marked where a source does."""
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    for path in (results / "one.json", tmp_path / "source.py"):
        path.write_text("{}")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -q --no-gpg-sign -m one"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "FOLDER", results)
    newest = measure.commit()
    assert re.fullmatch("[0-9a-f]{12}", newest)
    (results / "one.json").write_text("[]")
    (results / "two.json").write_text("[]")
    assert measure.commit() == newest
    (tmp_path / "source.py").write_text("changed")
    assert measure.commit() == f"{newest}-dirty"
