# SPDX-License-Identifier: Apache-2.0
"""Types of GGUF's metadata: their numbers, a table of fields, and numbers of it that are what they must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
MAX_TOKENS = 1 << 20  # of a tokenizer: the largest ones have less
Fields = dict[str, tuple[int, Any]]  # key → type and value
Other = TypeVar("Other")


def whole(fields: Mapping[str, tuple[int, Any]], key: str, other: Other = None) -> int | Other:  # type: ignore[assignment]
    """A field's whole number; ``other`` where it is 0, which programs write for what a model has not, or not there."""
    value = fields.get(key, (UINT32, 0))[1]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{key} must be a whole number from 0 to 2^32 - 1, it is {_shown(value)}")
    return value or other


def number(fields: Mapping[str, tuple[int, Any]], key: str, other: Other = None) -> float | Other:  # type: ignore[assignment]
    """A field's number; ``other`` where it is 0, which programs write for what a model has not, or not there."""
    value = fields.get(key, (FLOAT32, 0.0))[1]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{key} must be a finite number of at least 0, it is {_shown(value)}")
    return value or other


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, (bool, int, float, str)) else "an array"
