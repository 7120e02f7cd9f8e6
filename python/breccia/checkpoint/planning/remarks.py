# SPDX-License-Identifier: Apache-2.0
"""Two kinds of notes: what a conversion loses or changes, and remarks on what it does not."""

from __future__ import annotations


class Remark(str):
    """A note that ``strict`` does not refuse: nothing of the source is lost by what it says."""

    __slots__ = ()


def some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
