# SPDX-License-Identifier: Apache-2.0
"""The tables by which the core chooses the kernel of a product, as it prints them."""

from __future__ import annotations

import re
from pathlib import Path

from breccia import _core

from documents.markdown import table

PATHS = Path(__file__).parents[2] / "cpp/src/matmul/paths/paths.hpp"


def rules() -> str:
    """Each backend's rows, in order; backends of the same rows stand together."""
    of_backend: dict[str, list[tuple[str, ...]]] = {}
    for backend, *row in _core.matmul_rules():
        of_backend.setdefault(backend, []).append(tuple(row))
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for backend, found in of_backend.items():
        alike.setdefault(tuple(found), []).append(f"`{backend}`")
    rows = [
        [", ".join(backends) if i == 0 else "", weights, activations, count, f"`{kernel}`", unless]
        for found, backends in alike.items()
        for i, (weights, activations, count, kernel, unless) in enumerate(found)
    ]
    return table(["backend", "weights", "activations", "how many", "kernel", "unless there are"], rows)


def paths() -> str:
    """What each kernel takes, as its declaration says, and the backends whose rules name it."""
    text = PATHS.read_text(encoding="utf-8")
    said = {
        name: " ".join(re.findall(r"/// (.*)", comment)).removesuffix(".")
        for comment, name in re.findall(r"((?:///.*\n)+)extern const Path (\w+);", text)
    }
    of_kernel: dict[str, list[str]] = {}
    for backend, *_, kernel, _ in _core.matmul_rules():
        if backend not in (known := of_kernel.setdefault(kernel, [])):
            known.append(backend)
    order = re.findall(r"&paths::(\w+)", text)
    rows = [[f"`{name}`", said[name], ", ".join(f"`{one}`" for one in of_kernel[name])] for name in order]
    return table(["kernel", "takes", "backends"], rows)
