# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers: its memory is bounded before it is read. A list of two characters takes 80 bytes."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_ITEMS", "MAX_NODES", "loads"]

MAX_NODES = 1 << 20  # lists and objects: the largest tokenizers have half of that
MAX_ITEMS = 3 << 20  # commas


def loads(text: str | bytes) -> Any:
    """A JSON value, of UTF-8 where it comes as bytes.

    Raises:
        ValueError: it is none, or has too many lists, objects or items.
        RecursionError: it is too deep.
    """
    nodes = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    items = text.count(",") if isinstance(text, str) else text.count(b",")
    if nodes > MAX_NODES or items > MAX_ITEMS:
        raise ValueError(
            f"it must have at most {MAX_NODES} lists and objects and {MAX_ITEMS} commas, it has {nodes} and {items}"
        )
    return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
