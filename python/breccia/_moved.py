# SPDX-License-Identifier: Apache-2.0
"""Old paths of modules and old names of functions: using one warns, and gives what has the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What the reference named, below `breccia`. `checkpoint` names its functions' modules itself.
MOVED = {
    "cast_options": "verbs.cast_options",
    "checkpoint.parts": "checkpoint.writing.parts",
    "checkpoint.source": "checkpoint.reading.source",
    "checkpoint.targets": "checkpoint.planning.targets",
    "cpu": "device",
    "distributed.loading": "distributed.checkpoints.loading",
    "distributed.reader": "distributed.checkpoints.reader",
    "distributed.refitting": "distributed.engine_weights",
    "error_feedback": "calibration.error_feedback",
    "files": "io",
    "gpu": "device",
    "grouped": "verbs.grouped",
    "low_rank": "verbs.low_rank",
    "pieces": "value.joining",
    "prepared": "verbs.prepared",
    "quantize_model": "verbs.quantize_model",
    "saved_activations": "verbs.saved_activations",
}


# Functions of `breccia`, `breccia.nn` and `breccia.checkpoint` under the names that they had before 0.5.
RENAMED = {"plot": "report", "quantize": "quantize_layer", "scheme": "load_scheme"}


def renamed(module: str, name: str) -> Any:
    """The function of a module that has a new name. Raises AttributeError where none was called so."""
    new = RENAMED.get(name, name)
    if new == name or not hasattr(sys.modules[module], new):
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
    warnings.warn(f"{module}.{name} is {module}.{new}; the old name goes in 0.6", DeprecationWarning, stacklevel=3)
    return getattr(sys.modules[module], new)


class _Old:
    """Finds and loads what stands in `MOVED`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        return ModuleSpec(name, _Old) if package == "breccia" and old in MOVED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        new = f"breccia.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is {new}; the old path goes in 0.6", DeprecationWarning, stacklevel=2)
        return importlib.import_module(new)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """It has run under its own name."""


def install() -> None:
    """Look here for modules that are nowhere else."""
    if _Old not in sys.meta_path:
        sys.meta_path.append(_Old)
