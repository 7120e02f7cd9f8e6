# SPDX-License-Identifier: Apache-2.0
"""GPU tests. Without a CUDA device they are skipped, except those that Triton's interpreter runs
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "frameworks"))

SOME = 5
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and importlib.util.find_spec("torch") is not None


def _has_cuda() -> bool:
    if not _has_triton():
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


if INTERPRETED and _has_triton():
    import interpreter

    interpreter.patch()


def pytest_ignore_collect(collection_path: Any) -> bool | None:
    """Modules import torch and Triton at their top: without those there is nothing to collect."""
    if collection_path.name.startswith("test_") and not _has_triton():
        return True
    return None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    cases = Counter(item.nodeid.partition("[")[0] for item in here)
    for item in here:
        # Interpreted or compiled, some cases take seconds.
        if cases[item.nodeid.partition("[")[0]] > SOME:
            item.add_marker(pytest.mark.in_turn)
        interpreted = item.get_closest_marker("interpreted") is not None
        if item.get_closest_marker("offline") is not None:
            if INTERPRETED:
                item.add_marker(pytest.mark.skip(reason="compiles, which the interpreter does not"))
            continue
        if interpreted and not INTERPRETED and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device or TRITON_INTERPRET=1"))
        elif not interpreted and (INTERPRETED or not _has_cuda()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of capability 8.9 or later"))


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "offline: compiles for a GPU, needs none")
    config.addinivalue_line("markers", "interpreted: runs on a GPU or in Triton's interpreter")


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
