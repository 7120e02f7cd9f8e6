# SPDX-License-Identifier: Apache-2.0
"""Which sources clang-tidy looks at in a landing: .ci/tidy_sources.py."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci/tidy_sources.py"
if not SCRIPT.exists():
    pytest.skip("a source archive has no continuous integration", allow_module_level=True)

from documents.stages import load  # noqa: E402

stages = load()  # which the script imports by its name
tidy_sources = load("tidy_sources")
TEXTS = {
    **{f"cpp/src/{name}.cpp": '#include "own.hpp"\n' for name in "abcdefghijkl"},
    "cpp/src/a.cpp": '#include "breccia/ops.hpp"\n',
    "cpp/src/tensor/m.cpp": '#include "n.hpp"\n',
    "cpp/src/tensor/n.hpp": "#include <vector>\n",
    "cpp/src/own.hpp": '  #  include "deep.hpp"\n',
    "cpp/src/deep.hpp": "",
    "cpp/include/breccia/ops.hpp": '#include "breccia/inner.hpp"\n',
    "cpp/include/breccia/inner.hpp": "",
}
SOURCES = [name for name in TEXTS if name.endswith(".cpp")]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: Any) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("tree")
def test_each_source_has_its_turn() -> None:
    shares = [tidy_sources.looked_at(SOURCES, [], 3, turn) for turn in range(7, 10)]
    assert sorted(path for share in shares for path in share) == sorted(SOURCES)
    assert all(len(share) < len(SOURCES) for share in shares)
    assert tidy_sources.looked_at(SOURCES, [], 0, 0) == SOURCES  # --whole
    assert tidy_sources.looked_at(SOURCES, [".clang-tidy"], 3, 7) == SOURCES
    assert tidy_sources.looked_at(SOURCES, None, 3, 7) == shares[0]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("turn", [7, 8, 9])
def test_what_changes_is_looked_at(turn: int) -> None:
    """Sources themselves, and headers by a source that includes them, or what it includes does."""
    share = set(tidy_sources.looked_at(SOURCES, [], 3, turn))
    for path in SOURCES:
        assert set(tidy_sources.looked_at(SOURCES, [path], 3, turn)) == share | {path}
    for header in ("tensor/n.hpp", "deep.hpp", "../include/breccia/inner.hpp"):
        path = str(Path("cpp/src") / header).replace("src/../", "")
        found = tidy_sources.looked_at(SOURCES, [path, "docs/faq.md"], 3, turn)
        assert any(path in tidy_sources.included(source) for source in found)
        assert len(set(found) - share) <= 1
    assert set(tidy_sources.looked_at(SOURCES, SOURCES, 3, turn)) == share


def test_what_is_included_is_found() -> None:
    """As the compiler finds it, of sources that include most."""
    for source in ("cpp/src/backends/kernels.cpp", "cpp/src/quantize/cast.cpp"):
        flags = [f"-I{folder}" for folder in tidy_sources.FOLDERS]
        definitions = ["-DBRECCIA_CPU=portable", "-DBRECCIA_UNIT_KERNELS", "-DBRECCIA_UNIT_IMPORTANCE"]
        command = ["c++", "-std=c++20", "-MM", *flags, *definitions, source]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        needed = {str(Path(path)) for path in re.findall(r"cpp/\S+", run.stdout)}
        assert needed <= {str(Path(path)) for path in tidy_sources.included(source)}
