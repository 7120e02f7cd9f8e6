# SPDX-License-Identifier: Apache-2.0
"""How breccia enters a program that calls plugins without catching what they raise: part by part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

__all__ = ["add_to"]


def add_to(program: str, parts: Mapping[str, Callable[[], object]]) -> None:
    """Call every part, which adds something to ``program``. What this version of the program does not take is left out,
    and one line of the log at level WARNING names all of it with the program's reasons."""
    if refused := [f"{part} ({why})" for part, add in parts.items() if (why := _refusal(add))]:
        logging.getLogger("breccia").warning("breccia adds to %s all but: %s", program, "; ".join(refused))


def _refusal(add: Callable[[], object]) -> str:
    """Why a part could not be added; "" where it was."""
    try:
        add()
    except Exception as error:  # whatever it is, the program must start
        return f"{type(error).__name__}: {error}"
    return ""
