# SPDX-License-Identifier: Apache-2.0
"""Import TransformerEngine's pure-Python reference quantizers on a machine without CUDA.

`import transformer_engine.pytorch` needs the compiled extension and libcuda, but the reference quantizers are
plain torch code. Bare parent packages (only a `__path__`) keep their `__init__` from running, and a stand-in
for the extension module answers the names that are looked up at import time. `sys.modules` is put back
afterwards, so that no other test meets a half-imported package."""

import contextlib
import enum
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Names and order are checked against TransformerEngine's own enum when constants.py is imported.
_DType = enum.IntEnum(
    "_DType",
    ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"],
    start=0,
)


class _Names(type):
    """Members of the extension's enums and classes: constants are read with `int(...)` at import time."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Anything(metaclass=_Names):
    """Stands for any class or function of the extension that is only named, never used, by the reference
    code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Extension(types.ModuleType):
    DType = _DType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def _bare_package(name: str, path: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    return module


@contextlib.contextmanager
def _stubbed(root: Path) -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    for name in before:
        del sys.modules[name]
    sys.modules["transformer_engine"] = _bare_package("transformer_engine", root)
    sys.modules["transformer_engine.pytorch"] = _bare_package("transformer_engine.pytorch", root / "pytorch")
    sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NVTE_PROJECT_BUILDING", "1")
            yield
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(before)


_loaded: dict[str, types.ModuleType] = {}


def load(module: str) -> types.ModuleType:
    """`load("custom_recipes.reference_nvfp4")` -> that module of transformer_engine.pytorch; skips the test
    where TE is absent."""
    if module not in _loaded:
        pytest.importorskip("torch")
        pytest.importorskip("pydantic")
        spec = importlib.util.find_spec("transformer_engine")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("transformer_engine is not installed")
        with _stubbed(Path(spec.submodule_search_locations[0])):
            importlib.import_module(
                "transformer_engine.pytorch.tensor"
            )  # first, as TE's own __init__ does: its modules import in a circle
            _loaded[module] = importlib.import_module(f"transformer_engine.pytorch.{module}")
    return _loaded[module]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """While TransformerEngine's modules of plain Python can be imported; skips the test where it is absent."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("transformer_engine is not installed")
    root = Path(spec.submodule_search_locations[0])
    with _stubbed(root):
        sys.modules["transformer_engine.common"] = _bare_package("transformer_engine.common", root / "common")
        yield
