# SPDX-License-Identifier: Apache-2.0
"""Formats of others, added to those of this package."""

from __future__ import annotations

from breccia.bridges import lookup
from breccia.bridges.contract import FileFormat, registered

__all__ = ["register", "unregister"]


def register(bridge: FileFormat) -> None:
    """Add a format to those that checkpoints are read from and converted to, for as long as the process lives.

    Args:
        bridge: what the format is.

    Raises:
        ValueError: there is a format of that name, or the name is none that the command line can spell.
    """
    name = bridge.name
    if not name or name != name.strip().lower() or ":" in name or name == "plain":
        raise ValueError(f"bridge.name must be a word in lower case without ':', got {name!r}")
    if name in lookup.registry():
        raise ValueError(f"bridge.name must be new, there is a format {name!r}")
    registered[name] = bridge
    _forget()


def unregister(name: str) -> None:
    """Take a format away that `register` added.

    Args:
        name: the format's.

    Raises:
        KeyError: none was.
    """
    del registered[name]
    _forget()


def _forget() -> None:
    for known in (lookup._by_name, lookup.containers, lookup.owned, lookup.config_files):
        known.cache_clear()
