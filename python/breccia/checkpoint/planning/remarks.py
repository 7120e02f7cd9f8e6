# SPDX-License-Identifier: Apache-2.0
"""Two kinds of notes: what a conversion loses or changes, and remarks on what it does not."""

from __future__ import annotations

__all__ = ["Remark"]


class Remark(str):
    """A note that ``strict`` does not refuse: nothing of the source is lost by what it says."""

    __slots__ = ()
