# SPDX-License-Identifier: Apache-2.0
"""Import single modules of packages that as a whole need a GPU or a dozen other packages.

Bare parent packages (only a `__path__`) keep their `__init__` from running; modules that are only named at import
time are stood in for. `sys.modules` is put back afterwards, so that no other test meets a half-imported package."""

import contextlib
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest


@contextlib.contextmanager
def bare(package: str, parents: Iterable[str], stand_ins: Iterable[str] = ()) -> Iterator[None]:
    """`import package.…` runs no `__init__` of the package and its `parents`; `stand_ins` answer any name."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    made = {name: mock.MagicMock() for name in stand_ins}
    for name in (package, *parents):
        made[name] = types.ModuleType(name)
        made[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    outside = {name: sys.modules.get(name) for name in made if name.partition(".")[0] != package}
    sys.modules.update(made)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        for name, module in outside.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        sys.modules.update(before)
