# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to harm their reader. Each is made when it is needed, in a folder of its own, and says what the
error about it must tell, or nothing where it must be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Content = bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Large:
    """Content of many megabytes, made when it is written: a test of it is slow."""

    content: Callable[[], bytes]

    def __call__(self, path: Path) -> None:
        path.write_bytes(self.content())


def later(make: Callable[[], bytes]) -> Large:
    return Large(make)


@dataclass(frozen=True)
class Hostile:
    """Files of a checkpoint: its only file, or a directory where there are more.

    Attributes:
        files: name → bytes, or what makes the file.
        says: pattern of the error's message; "" where it is read without one.
        to: targets to convert to.
    """

    files: dict[str, Content]
    says: str
    to: tuple[str, ...] = ("bf16",)
    directory: bool = field(default=False)

    @property
    def is_slow(self) -> bool:
        return any(isinstance(content, Large) for content in self.files.values())

    def make(self, folder: Path) -> Path:
        folder.mkdir()
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content)
        alone = len(self.files) == 1 and not self.directory
        return folder / next(iter(self.files)) if alone else folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def every() -> dict[str, Hostile]:
    """All of them, by name."""
    from hostile import crashes, folders, gguf, headers, methods

    found: dict[str, Hostile] = {}
    for module in (headers, folders, methods, gguf, crashes):
        for name, case in module.CASES.items():
            found[f"{module.__name__.rpartition('.')[2]}: {name}"] = case
    return found
