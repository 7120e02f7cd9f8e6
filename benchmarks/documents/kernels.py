# SPDX-License-Identifier: Apache-2.0
"""The tables by which the core chooses the kernel of a product, as it prints them."""

from __future__ import annotations

from breccia import _core

from documents.markdown import table


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
