# SPDX-License-Identifier: Apache-2.0
"""Libraries that are imported where they are needed."""

from __future__ import annotations

import importlib
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
