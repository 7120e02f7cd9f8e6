# SPDX-License-Identifier: Apache-2.0
"""The near words of one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggestion"]

_SHOWN = 16  # names in a message


def suggestion(name: str, known: Iterable[str]) -> str:
    """The part of a message that helps: "did you mean nvfp4?" with the close names only, else those there are, the
    first of many."""
    known = list(known)
    begun = [k for k in known if len(name) > 1 and k.lower().startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6) or begun[:4]
    if close and close != begun[:4]:
        best = difflib.SequenceMatcher(None, name.lower(), close[0]).ratio()
        close = [c for c in close if difflib.SequenceMatcher(None, name.lower(), c).ratio() > best - 0.03]
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"known are {', '.join(known[:_SHOWN])}{more}"
