# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints on a CPU, one tensor at a time: convert, inspect, verify, report.

No model code is run and nothing is unpickled: files are JSON and raw bytes, checked before use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from breccia import _moved
from breccia.checkpoint.files.safetensors_file import SafetensorsFile, SafetensorsWriter, save_arrays
from breccia.checkpoint.judging.complete import complete
from breccia.checkpoint.judging.doctor import doctor
from breccia.checkpoint.judging.inspect import inspect
from breccia.checkpoint.judging.report import report
from breccia.checkpoint.judging.verify import verify
from breccia.checkpoint.lora.merge import merge_lora
from breccia.checkpoint.planning.bits import plan_bits
from breccia.checkpoint.planning.targets import target_names
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.writing.convert import convert
from breccia.checkpoint.writing.parts import Piece, finish, plan

__all__ = [
    "Checkpoint",
    "Piece",
    "SafetensorsFile",
    "SafetensorsWriter",
    "complete",
    "convert",
    "doctor",
    "finish",
    "inspect",
    "merge_lora",
    "plan",
    "plan_bits",
    "report",
    "save_arrays",
    "target_names",
    "verify",
]

# Paths of these functions' modules before 0.4, which have the functions' own names.
_BEFORE = {
    "complete": complete,
    "convert": convert,
    "doctor": doctor,
    "inspect": inspect,
    "merge_lora": merge_lora,
    "verify": verify,
}
for _name, _function in _BEFORE.items():
    sys.modules.setdefault(f"{__name__}.{_name}", sys.modules[_function.__module__])

if not TYPE_CHECKING:  # a checker would take every name for one of them

    def __getattr__(name: str) -> Any:
        return _moved.renamed(__name__, name)
