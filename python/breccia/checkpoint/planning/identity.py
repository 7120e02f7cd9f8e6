# SPDX-License-Identifier: Apache-2.0
"""What an output depends on, so that work is resumed by the same conversion only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breccia._version import __version__
from breccia.checkpoint.files import disk
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.source import Checkpoint

__all__ = ["beside", "identity_of", "spelled"]


def identity_of(checkpoint: Checkpoint, target: Target, others: Mapping[Path, disk.Stamp]) -> bytes:
    """32 bytes: of this version, the target with its options, config.json, and the stamps of every file: ``others`` are
    those of `beside`."""
    said: list[Any] = [__version__, spelled(target), checkpoint.config, checkpoint.unmarked]
    said += [[str(path.resolve()), stamp] for path, stamp in checkpoint.stamps.items()]
    said += [[str(path), stamp] for path, stamp in others.items()]
    return hashlib.sha256(json.dumps(said).encode()).digest()


def beside(checkpoint: Checkpoint) -> dict[Path, disk.Stamp]:
    """The stamps of the files in a checkpoint's directory: what is copied, or says something of the model."""
    if not checkpoint.path.is_dir():
        return {}
    every = sorted(checkpoint.path.rglob("*"))
    return {path: disk.stamp_of(path.stat()) for path in every if path.is_file() and not path.name.startswith(".")}


def spelled(target: Target) -> str:
    """A target with its options in words that are the same in every process: sets have no order of their own."""
    said = {field.name: getattr(target, field.name) for field in dataclasses.fields(target) if field.repr}
    return repr(said | {"inputs": sorted(target.inputs), "outputs": sorted(target.outputs)})
