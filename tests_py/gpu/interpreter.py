# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter usable with NumPy 2.4, which no longer turns a one-element array into an int."""

from __future__ import annotations

from typing import Any


class _AnyInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __call__(cls, value: Any = 0, *args: Any) -> int:
        return int(value.item() if hasattr(value, "item") else value, *args)


class ScalarInt(metaclass=_AnyInt):
    """Stands in for `int` inside triton.runtime.interpreter."""


def patch() -> None:
    from triton.runtime import interpreter

    interpreter.int = ScalarInt
