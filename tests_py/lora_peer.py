# SPDX-License-Identifier: Apache-2.0
"""PEFT, without the packages that are installed in part here and stop its import."""

import sys

import pytest

_IN_PART = ("transformer_engine", "gptqmodel", "awq")
# Runs the script that is the first argument.
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({_IN_PART}))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test."""
    for name in _IN_PART:
        monkeypatch.setitem(sys.modules, name, None)


def peft() -> object:
    """The module; the test is skipped where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        hide(patch)
        return pytest.importorskip("peft")
