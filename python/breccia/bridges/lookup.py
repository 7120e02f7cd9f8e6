# SPDX-License-Identifier: Apache-2.0
"""Formats by name, and what follows from all of them."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from breccia import bridges
from breccia.bridges.contract import PLAIN, FileFormat, registered
from breccia.bridges.file_kinds import SAFETENSORS, Container
from breccia.bridges.written import PLACES

__all__ = ["OWN", "bridge", "config_files", "containers", "modules", "owned", "register", "registry", "unregister"]

OWN = "breccia"  # the format of recipes that are named without one


@cache
def modules() -> dict[str, ModuleType]:
    """Every bridge, by the name of its format. Raises OSError where a module's file cannot be opened; the next call
    tries again."""
    dir(bridges)  # imports what the package's list has
    members = (getattr(bridges, name) for name in sorted(vars(bridges)))
    return {module.NAME: module for module in members if isinstance(module, ModuleType) and hasattr(module, "BRIDGE")}


def registry() -> dict[str, FileFormat]:
    """Every format, by name: those of this package and those that `register` added."""
    found = dict(_by_name())
    del found[""], found["plain"]
    return found


def bridge(name: str) -> FileFormat:
    """The format of a name; "" and "plain" are that of tensors without codes.

    Args:
        name: as on the command line.

    Returns:
        What the format is.

    Raises:
        KeyError: there is none of that name.
    """
    return _by_name()[name]


@cache
def _by_name() -> dict[str, FileFormat]:
    """What `bridge` looks up, which checkpoints of many tensors ask for each: `register` makes it anew."""
    own = {module.BRIDGE.name: module.BRIDGE for module in modules().values()}
    return {"": PLAIN, "plain": PLAIN, **own, **registered}


@cache
def containers() -> tuple[Container, ...]:
    """The kinds of files that formats have, the last of which is safetensors: what no other one holds."""
    every = dict.fromkeys(one.container for one in registry().values())
    every.pop(SAFETENSORS, None)
    return (*every, SAFETENSORS)


@cache
def owned() -> frozenset[str]:
    """Entries of config.json that are no model's but a format's: what an output says by them is its own format's."""
    return frozenset((*PLACES, *(key for one in registry().values() for key in one.dialect.owns)))


@cache
def config_files() -> tuple[str, ...]:
    """Files beside the weights that say how they are quantized, which this package writes too."""
    files = (one.dialect.file for one in registry().values())
    return ("config.json", *(f"{name}.json" for name in files if name))


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
    if name in registry():
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
    for known in (_by_name, containers, owned, config_files):
        known.cache_clear()
