# SPDX-License-Identifier: Apache-2.0
"""What an output depends on beside the bytes of the source's tensors, so that work is resumed by the same conversion
only, wherever the source lies and whenever its files were touched."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from breccia._version import __version__
from breccia.checkpoint.files import disk
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.source import Checkpoint

Identity = dict[str, str]  # what counts → a digest of it


def identity_of(checkpoint: Checkpoint, target: Target, files: Sequence[tuple[str, list[Choice]]]) -> Identity:
    """The version, the target with its options, what config.json says, and what is to be written of which tensors."""
    tensors = hashlib.sha256()
    for name, choices in files:
        written = [(choice.action, choice.found.name, choice.form.outputs) for choice in choices]
        tensors.update(json.dumps([name, written]).encode())
    return {
        "version of breccia": __version__,
        "config.json": digest(checkpoint.config),
        "options": digest([spelled(target), checkpoint.unmarked]),
        "tensors": tensors.hexdigest(),
    }


def digest(said: Any) -> str:
    """Of JSON types."""
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


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
