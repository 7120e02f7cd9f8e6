# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal that does not know every character."""

from __future__ import annotations

import codecs
import sys

__all__ = ["plain_characters"]

_PLAIN = {"×": "x", "…": "...", "−": "-", "–": "-"}


def plain_characters() -> None:
    """Print ``x`` for ``×`` and the like, and ``?`` for the rest, where standard output cannot encode them."""
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error("breccia.plain", _plain)
        sys.stdout.reconfigure(errors="breccia.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end
