# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are quantized: by a function, and by patterns of names as `breccia convert` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any


class Selection:
    """Chooses layers by name: by the arguments of `breccia.quantize_`."""

    def __init__(
        self,
        filter: Callable[[Any, str], bool] | None,  # noqa: A002
        include: Iterable[str] | None,
        exclude: Iterable[str],
    ) -> None:
        if filter is not None and not callable(filter):
            raise TypeError(f"filter must be a function of a module and its name, or None, got {filter!r}")
        self._filter = filter
        self._include = None if include is None else _patterns(include, "include")
        self._exclude = _patterns(exclude, "exclude")
        self._matched: set[tuple[str, str]] = set()

    def takes(self, module: Any, name: str) -> bool:
        """Whether a layer is taken; patterns match its name in the model, or that of its weight."""
        included = self._include is None or self._matches("include", self._include, name)
        excluded = self._matches("exclude", self._exclude, name)
        return included and not excluded and (self._filter is None or bool(self._filter(module, name)))

    def _matches(self, argument: str, patterns: tuple[str, ...], name: str) -> bool:
        found = [p for p in patterns if fnmatchcase(name, p) or fnmatchcase(f"{name}.weight", p)]
        self._matched.update((argument, pattern) for pattern in found)
        return bool(found)

    def check_all_matched(self, names: list[str]) -> None:
        """Refuses a pattern that matched none of the names of all linear layers."""
        for argument, patterns in (("include", self._include or ()), ("exclude", self._exclude)):
            for pattern in patterns:
                if (argument, pattern) not in self._matched:
                    example = f", such as {names[0]!r}" if names else ""
                    raise ValueError(
                        f"{argument} {pattern!r} must match the name of a linear layer, it matches none of "
                        f"{len(names)}{example}"
                    )

    @property
    def takes_all(self) -> bool:
        """Whether nothing is left out."""
        return self._filter is None and self._include is None and not self._exclude


def _patterns(value: Iterable[str], argument: str) -> tuple[str, ...]:
    listed = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(p, str) for p in listed):
        raise TypeError(f"{argument} must be a list of patterns, as ['*.q_proj'], got {value!r}")
    return listed
