# SPDX-License-Identifier: Apache-2.0
"""Serving programs' own Python files, imported from their wheels without what is compiled and without the server.

`.ci/run_serving` unpacks the files and names the folder in BRECCIA_SERVING; elsewhere these tests are skipped. Modules
of the server's dependencies, none of which a layer calls, are stand-ins that answer every name with an empty class.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FILES = os.environ.get("BRECCIA_SERVING", "")
needs_files = pytest.mark.skipif(not FILES, reason="BRECCIA_SERVING names no folder: see .ci/run_serving")


def _empty_class(name: str) -> Any:
    def schema(cls: type, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return _Empty(
        name,
        (),
        {
            "__get_pydantic_core_schema__": classmethod(schema),
            "__init_subclass__": classmethod(lambda cls, **_: None),
            "__class_getitem__": classmethod(lambda cls, _: cls),
        },
    )


class _Empty(type):
    """A class whose attributes are classes like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty_class(name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return super().__call__()

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty_class(name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these packages, after all other finders."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def files_of(*packages: str) -> Iterator[None]:
    """The folder on the path, stand-ins for these packages, and no AITER: it asks for AMD's compiler when imported."""
    finder = StandIns(packages)
    sys.modules["aiter"] = None  # type: ignore[assignment]
    sys.path[:0] = [FILES, f"{FILES}/needed"]
    sys.meta_path.append(finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.meta_path.remove(finder)
        del sys.path[:2], sys.modules["aiter"]
