# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers: its memory is bounded before it is read. A list of two characters takes 80 bytes."""

from __future__ import annotations

import json
from typing import Any

MAX_NODES = 1 << 20  # lists and objects: the largest tokenizers have half of that
MAX_MEMBERS = 3 << 18  # colons, of which each member of an object has one: a member takes 200 bytes
MAX_ITEMS = 3 << 20  # commas
_MARKS = (b"[", b"{", b":", b",")


def loads(text: str | bytes) -> Any:
    """A JSON value, of UTF-8 where it comes as bytes. Raises ValueError where it is none, or has too many lists,
    objects, members or items, RecursionError where it is too deep."""
    lists, objects, members, items = map(text.count, "[{:,") if isinstance(text, str) else map(text.count, _MARKS)
    if lists + objects > MAX_NODES or members > MAX_MEMBERS or items > MAX_ITEMS:
        raise ValueError(
            f"it must have at most {MAX_NODES} lists and objects, {MAX_MEMBERS} colons and {MAX_ITEMS} commas, "
            f"it has {lists + objects}, {members} and {items}"
        )
    return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
