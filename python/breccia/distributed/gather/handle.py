# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous collective returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from breccia.distributed.gather import groups


class Handle:
    """A collective under way. `wait` returns its result, and may be called again."""

    def __init__(self, work: Any, finish: Callable[[], Any], group: Any = None) -> None:
        self._work, self._finish = work, finish
        self._group, self._number = group, groups.number_of(group)
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the transfer (on a GPU: make the current stream wait) and return what it brought."""
        if self._finish is not None:
            if self._work is not None:
                groups.wait(self._work, self._group, self._number)
            self._result, self._work, self._finish = self._finish(), None, None  # type: ignore[assignment]
        return self._result

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """A handle whose result is ``change(result)``.

        Args:
            change: called once with the result, when that is waited for.

        Returns:
            The new handle.
        """
        return Handle(None, lambda: change(self.wait()))
