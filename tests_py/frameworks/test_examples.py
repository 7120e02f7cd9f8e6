# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its reader would run it: a process of its own, in a folder of its own."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lora_peer
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
# Shorter runs than a reader would make.
ARGUMENTS = {
    "02_recipe_portable_train": ["--steps", "2", "--batch", "4", "--recipe", "fp32", "--recipe", "nvfp4"],
    "06_sentence_encoder": ["--pages", "3"],
    "09_lora_on_nvfp4": ["--layers", "2", "--steps", "1"],
}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "path",  # test_schedulers.py runs those of ray and Dask, too
    [pytest.param(p, marks=[pytest.mark.slow] if "convert_with" in p.stem else [], id=p.stem) for p in SCRIPTS],
)
def test_example(path, tmp_path, request):
    used = packages(path.read_text())
    for package in used:
        _ = lora_peer.peft() if package == "peft" else pytest.importorskip(package)
    start = []
    if "peft" in used:
        start = ["-c", lora_peer.RUN, str(request.getfixturevalue("smollm2_folder"))]
    run = subprocess.run(
        [sys.executable, *start, str(path), *ARGUMENTS.get(path.stem, [])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error::SyntaxWarning"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows something"


def test_the_table_names_every_example_and_what_it_needs():
    rows = dict(re.findall(r"^\| \[([\w.]+)\].*\| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert set(rows) == {path.name for path in EXAMPLES.glob("[0-9]*")}
    names = {"sklearn": "scikit-learn"}
    for path in SCRIPTS:
        used = {names.get(package, package) for package in packages(path.read_text())} - {"numpy"}
        assert {package for package in used if package not in rows[path.name]} == set(), path.name


def packages(source):
    """The top-level packages a script imports, wherever it does, except those that come with Python."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    top = {name.split(".")[0] for name in found}
    return sorted(top - set(sys.stdlib_module_names) - {"breccia", "minilm"})


def test_notebook(tmp_path, monkeypatch):
    """Every code cell, in order, in one namespace."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    pyplot.switch_backend("agg")
    cells = json.loads((EXAMPLES / "08_notebook.ipynb").read_text())["cells"]
    namespace = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    pyplot.close("all")
    assert namespace["y"].shape == (4, 256)
