# SPDX-License-Identifier: Apache-2.0
"""PEFT, without the packages that are installed in part here and stop its import."""

import sys

import pytest

_IN_PART = ("transformer_engine", "gptqmodel", "awq")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test."""
    for name in _IN_PART:
        monkeypatch.setitem(sys.modules, name, None)


def peft() -> object:
    """The module; the test is skipped where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        hide(patch)
        return pytest.importorskip("peft")
