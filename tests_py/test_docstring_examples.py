# SPDX-License-Identifier: Apache-2.0
"""The examples of docstrings print what they say, in an empty folder; the main functions have one."""

import ast
import doctest
import inspect
from typing import Any

import breccia
import numpy as np
import pytest
from test_docstrings import PUBLIC, sections

pytestmark = pytest.mark.always  # each example is another text
# Functions whose reader wants to see a call.
MAIN = (
    "breccia.cast",
    "breccia.compare",
    "breccia.concatenate",
    "breccia.dequantize",
    "breccia.gptq",
    "breccia.grouped_matmul",
    "breccia.linear",
    "breccia.load",
    "breccia.matmul",
    "breccia.open",
    "breccia.pack",
    "breccia.prepare",
    "breccia.quantize_",
    "breccia.quantize_layer",
    "breccia.requantize",
    "breccia.save",
    "breccia.stack",
    "breccia.bridges.from_deepseek_v3",
    "breccia.bridges.quantize_gguf",
    "breccia.bridges.to_deepseek_v3",
    "breccia.checkpoint.convert",
    "breccia.checkpoint.inspect",
    "breccia.checkpoint.plan_bits",
    "breccia.checkpoint.save_arrays",
    "breccia.checkpoint.verify",
    "breccia.formats.decode",
    "breccia.formats.encode",
    "breccia.formats.finfo",
    "breccia.formats.pack",
)


def example_of(name: str, doc: str) -> doctest.DocTest:
    """What a docstring shows; readers have imported NumPy and breccia, as the API reference says."""
    return doctest.DocTestParser().get_doctest(doc, {"np": np, "breccia": breccia}, name, None, None)


def modules_of(example: doctest.DocTest) -> set[str]:
    """The modules that an example imports."""
    nodes = [node for step in example.examples for node in ast.walk(ast.parse(step.source))]
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return imports | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def differences(example: doctest.DocTest) -> str:
    """What an example prints that it does not show, or raises; empty where there is nothing."""
    lines: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=lines.append)
    return "".join(lines)


def doc_of(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


EXAMPLES = {name: found for name, value in PUBLIC.items() if (found := example_of(name, doc_of(value))).examples}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_show(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in modules_of(EXAMPLES[name]):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    assert differences(EXAMPLES[name]) == ""


def test_main_functions_have_an_example_that_shows_output() -> None:
    shown = {name for name, example in EXAMPLES.items() if any(step.want for step in example.examples)}
    assert set(MAIN) - shown == set()


def test_examples_stand_under_their_heading_at_the_end() -> None:
    for name in EXAMPLES:
        *others, last = sections(doc_of(PUBLIC[name])).items()
        assert last[0] == "Examples:", f"{name}: the section Examples must be the last"
        assert not any(">>>" in text for _, text in others), f"{name}: an example stands outside of Examples"


def test_the_check_finds_wrong_output() -> None:
    assert differences(example_of("right", ">>> breccia.cast(np.ones((2, 32)), 'mxfp8').shape\n(2, 32)")) == ""
    wrong = differences(example_of("wrong", ">>> breccia.cast(np.ones((2, 32)), 'mxfp8').shape\n(2, 16)"))
    assert "(2, 16)" in wrong and "(2, 32)" in wrong
    assert "ZeroDivisionError" in differences(example_of("raises", ">>> 1 // 0"))
    assert modules_of(example_of("imports", ">>> import torch.nn\n>>> from mlx import core")) == {"torch.nn", "mlx"}
