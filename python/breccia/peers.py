# SPDX-License-Identifier: Apache-2.0
"""Libraries that are imported where they are needed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

# Peers whose own name is not that of their module.
_PEERS = {"transformer_engine": "TransformerEngine"}


def require(module: str, extra: str) -> Any:
    """Imports a peer; where it is not installed, or only in part, an ImportError names the extra that installs it, and
    its ``name`` is the module's."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # an empty TransformerEngine raises RuntimeError
        name = _PEERS.get(module.partition(".")[0])
        peer = module if name is None else f"{name} ({module})"
        sentence = f"{peer} is needed here: pip install 'breccia[{extra}]' ({error})"
        raise ImportError(sentence, name=getattr(error, "name", None) or module) from error


def require_version(module: str, extra: str) -> Any:
    """`require`, and in a version that breccia's own metadata allows: an ImportError names both versions."""
    peer = require(module, extra)
    try:
        requirements = importlib.metadata.requires("breccia") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree
        return peer
    found = next((match for line in requirements if (match := re.match(rf"{module}>=([\d.]+)", line))), None)
    if found is not None and _numbers(peer.__version__) < _numbers(found[1]):
        raise ImportError(
            f"breccia.{module} works with {module} {found[1]} and newer, {peer.__version__} is installed: "
            f"pip install --upgrade 'breccia[{extra}]'",
            name=module,
        )
    return peer


def beside(peer: str) -> None:
    """Import breccia's module for a peer, if it is imported, or when it is; one that is too old is left alone."""
    if peer in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"breccia.{peer}")
    elif not any(isinstance(finder, _Later) and finder.peer == peer for finder in sys.meta_path):
        sys.meta_path.insert(0, _Later(peer))


class _Later:
    """A finder of one module, as others find it, that calls `beside` when it is imported."""

    def __init__(self, peer: str) -> None:
        self.peer, self._asking = peer, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec."""
        if name != self.peer or self._asking:
            return None
        self._asking = True
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                beside(name)

            spec.loader.exec_module = exec_module
        return spec


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
