# SPDX-License-Identifier: Apache-2.0
"""Libraries that are imported where they are needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
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


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
