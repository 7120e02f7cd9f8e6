# SPDX-License-Identifier: Apache-2.0
"""Checks of values that come from files: each returns the value, or raises a ValueError that says what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LARGEST = 2**31  # of a size that a header or a configuration may say


class StoredTypeError(TypeError, ValueError):
    """An array has another dtype than the format stores. For a caller who passed the array that is a TypeError; for a
    file that holds it, a ValueError. This is both."""


def shown(value: Any) -> str:
    """A JSON value for a message, in 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(value: Any, what: str, least: int = 1) -> int:
    """A whole number of JSON; ``what`` is its name for the message, such as "gptq: bits"."""
    if type(value) is not int or not least <= value < _LARGEST:
        raise ValueError(f"{what} must be a whole number from {least} to 2^31, got {shown(value)}")
    return value


def real(value: Any, what: str) -> float:
    """A finite number of JSON."""
    if type(value) not in (int, float) or abs(value) > 3.4e38 or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {shown(value)}")
    return float(value)


def numbers(value: Any, what: str, count: int | None = None, least: int = 1) -> tuple[int, ...]:
    """A list of whole numbers of JSON, of ``count`` of them where that is given."""
    if not isinstance(value, (list, tuple)) or not value or len(value) != (count or len(value)):
        some = "" if count is None else f"{count} "
        raise ValueError(f"{what} must be a list of {some}whole numbers, got {shown(value)}")
    return tuple(number(item, what, least) for item in value)


def flag(value: Any, what: str) -> bool:
    """True or false of JSON; false where there is nothing."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {shown(value)}")
    return bool(value)


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """An object of JSON."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {shown(value)}")
    return value


def kinds_of(model: Mapping[str, Any]) -> set[str]:
    """The ``model_type`` of a config.json and of the language model in it."""
    return {str(one.get("model_type")) for one in (model, model.get("text_config")) if isinstance(one, Mapping)}


def float_name(entry: Any) -> str:
    """NumPy's name of a header's float dtype."""
    if entry.dtype not in FLOATS:
        raise ValueError(f"{entry.name} must be of F32, BF16 or F16, got {entry.dtype}")
    return FLOATS[entry.dtype]


def check_axes(least: int, *entries: Any, most: int = 8) -> None:
    """Whether stored tensors have so many axes, and none of them without entries."""
    for entry in entries:
        if not least <= len(entry.shape) <= most or 0 in entry.shape:
            axes = f"{least} axes" if least == most else f"{least} axes or more"
            raise ValueError(f"{entry.name} must have {axes} and entries along each, got shape {entry.shape}")
