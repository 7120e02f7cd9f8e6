# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its reader would run it: a process of its own, in a folder of its own."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
# Shorter runs than a reader would make.
ARGUMENTS = {
    "02_recipe_portable_train": ["--steps", "2", "--batch", "4"],
    "06_sentence_encoder": ["--pages", "3"],
}


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_example(path, tmp_path):
    for package in packages(path.read_text()):
        pytest.importorskip(package)
    run = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS.get(path.stem, [])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error::SyntaxWarning"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows something"


def packages(source):
    """The top-level packages a script imports, wherever it does, except those that come with Python or lie beside it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    top = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
    return sorted(name for name in top if importlib.util.find_spec(name) is None or name not in sys.modules)
