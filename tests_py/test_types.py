# SPDX-License-Identifier: Apache-2.0
"""What type checkers say of a program that uses the package, and of the stub of the compiled module."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import breccia
import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parent.parent
ARRAY = r"numpy\.ndarray\[.*numpy\.floating\[.*_32Bit\]\]\]"
TENSOR = rf"breccia\.scaled_tensor\.ScaledTensor\[{ARRAY}\]"
# Expressions, and what is known of each.
REVEALED = {
    "q": TENSOR,
    "q[:2].mT.reshape(4, -1)": TENSOR,
    "breccia.requantize(q, 'mxfp8')": TENSOR,
    "breccia.stack([q, q])": TENSOR,
    "breccia.gptq(x, None, 'nvfp4')": TENSOR,
    "breccia.prepare(q)": rf"breccia\.verbs\.prepared\.PreparedWeight\[{ARRAY}\]",
    "breccia.prepare(q).T": TENSOR,
    "breccia.dequantize(q)": ARRAY,
    "q.dequantize('bfloat16')": ARRAY,
    "breccia.matmul(x, q.T)": ARRAY,
    "breccia.linear(x, q, None)": ARRAY,
    "breccia.grouped_matmul(x, q, [0, 4])": ARRAY,
    "breccia.cast_ste(x, 'nvfp4')": ARRAY,
    "x @ q": ARRAY,
    "q @ x": ARRAY,
    "q.numpy()": ARRAY,
    "q.to('torch')": r"breccia\.scaled_tensor\.ScaledTensor\[Any\]",
    "breccia.from_buffer(x, x, None, None)": r"breccia\.scaled_tensor\.ScaledTensor\[Any\]",
}
PROGRAM = """import numpy as np
from numpy.typing import NDArray

import breccia
from breccia import ScaledTensor


def run(x: NDArray[np.float32], bare: ScaledTensor) -> None:
    q = breccia.cast(x, "nvfp4")
    breccia.dequantize(bare).anything()
"""
WRONG = """

def wrong(q: ScaledTensor[NDArray[np.float32]]) -> list[int]:
    return breccia.dequantize(q)
"""


def run(*arguments: str) -> str:
    home = Path(breccia.__file__).parent.parent
    path = {} if home.name == "site-packages" else {"MYPYPATH": str(home)}  # what is installed mypy finds by itself
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **path},
        check=False,
    )
    return done.stdout + done.stderr


def test_a_tensor_knows_of_what_arrays_it_is(tmp_path):
    program = tmp_path / "program.py"
    text = PROGRAM + "".join(f"    reveal_type({expression})\n" for expression in REVEALED)
    program.write_text(text + WRONG)
    said = run("mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program))
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    assert len(revealed) == len(REVEALED), said
    for (expression, known), kind in zip(REVEALED.items(), revealed, strict=True):
        assert re.fullmatch(known, kind), (expression, kind)
    (error,) = re.findall(r"(\d+): error: (.*)", said)
    assert int(error[0]) == len((text + WRONG).splitlines())
    assert "list[int]" in error[1]


def test_the_stub_has_what_the_compiled_module_has():
    """But for pybind11's metaclass, and its constructor of classes that have none."""
    said = run("mypy.stubtest", "breccia._core", "--concise", "--mypy-config-file", str(ROOT / "pyproject.toml"))
    lines = [line for line in said.splitlines() if line.startswith("breccia._core")]
    assert any("metaclass differs" in line for line in lines), said
    wrong = [one for one in lines if "metaclass differs" not in one and "does not have *args parameter" not in one]
    assert not wrong


def test_tests_call_others_as_these_are_written():
    """What only a GPU runs calls tests of frameworks, whose parameters change where nothing runs these calls."""
    files = {path.stem: path for path in (ROOT / "tests_py").rglob("test_*.py") if path.parent.name != "bridges"}
    found = 0
    for path in (ROOT / "tests_py").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        modules = {alias.asname or alias.name: alias.name for alias in imports if alias.name in files}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            match call.func:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules and "test_" in name:
                    tests = ast.parse(files[modules[module]].read_text()).body
                    (takes,) = (len(one.args.args) for one in tests if getattr(one, "name", "") == name)
                    assert len(call.args) == takes, f"{path.name}:{call.lineno} calls {name}, which takes {takes}"
                    found += 1
    assert found > 5
