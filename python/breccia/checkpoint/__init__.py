# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints on a CPU, one tensor at a time: convert, inspect, verify, plot.

No model code is run and nothing is unpickled: files are JSON and raw bytes, checked before use.
"""

from __future__ import annotations

from breccia.checkpoint.complete import complete
from breccia.checkpoint.convert import convert
from breccia.checkpoint.doctor import doctor
from breccia.checkpoint.files.safetensors_file import SafetensorsFile, SafetensorsWriter, save_arrays
from breccia.checkpoint.inspect import inspect
from breccia.checkpoint.merge_lora import merge_lora
from breccia.checkpoint.parts import Piece, finish, plan
from breccia.checkpoint.plot import plot
from breccia.checkpoint.source import Checkpoint
from breccia.checkpoint.targets import target_names
from breccia.checkpoint.verify import verify

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
    "plot",
    "save_arrays",
    "target_names",
    "verify",
]
