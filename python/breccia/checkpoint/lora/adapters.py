# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA adapters: which tensors of a model they change, and by what."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.common import float32
from breccia.bridges.file_kinds import WeightFile
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.files.input_file import sha256_of
from breccia.checkpoint.files.safetensors_file import SafetensorsFile
from breccia.checkpoint.reading.folder import read_json
from breccia.checkpoint.reading.source import Checkpoint, container_of
from breccia.schemes.matching import Patterns

Array = Any
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
_WHOLE = re.compile(r"(?P<module>.+?)(\.modules_to_save(\.default)?)?\.(?P<role>weight|bias)")
# What changes more than a product of two matrices does.
_REFUSED = {
    "use_dora": "DoRA scales rows as well",
    "use_qalora": "QALoRA pools the inputs",
    "target_parameters": "parameters of experts in one tensor have no matrices of their own",
    "trainable_token_indices": "single rows of embeddings are trained",
    "megatron_config": "layers are split over processes",
}


class Stored:
    """A tensor of an adapter's file, which is read when it is needed: a table of embeddings can be large."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self._file, self._entry = file, file.entry(name)
        self.shape = tuple(self._entry.shape)

    def read(self) -> Array:
        """The tensor in memory of its own: a process that maps a file is killed where another one cuts it."""
        entry = self._entry
        return typed(self._file.file.array(entry.start, entry.stop), entry.dtype, entry.shape)


@dataclass(frozen=True)
class Change:
    """What an adapter does to one tensor: ``scale`` · ``b`` @ ``a`` is added, or ``whole`` takes its place."""

    a: Array = None
    b: Array = None
    scale: float = 1.0
    whole: Stored | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        if self.whole is not None:
            return self.whole.shape
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.turned else shape

    def of(self, found: Found) -> Change:
        """In the logical order of axes: what a float checkpoint keeps turned is turned back when it is read."""
        return replace(self, turned=False) if found.origin.turned else self

    def rows(self, rows: slice) -> Array:
        """What is added to some rows, float32."""
        if self.turned:
            return (float32(self.b) @ float32(self.a[:, rows])).T * np.float32(self.scale)
        return (float32(self.b[rows]) @ float32(self.a)) * np.float32(self.scale)


@dataclass
class Adapter:
    """An adapter on disk.

    Attributes:
        path: its folder, or its file.
        config: adapter_config.json, or what a file says of its kind.
        file: adapter_model.safetensors, or the GGUF file that is all of it.
        alphas: regular expression of modules → their lora_alpha.
        changes: name of a tensor of the model → what happens to it.

    Raises:
        ValueError: it is not LoRA, or a kind of it that is not a product of two matrices for each weight.
        FileNotFoundError: a file is not there.
    """

    path: Path
    config: dict[str, Any]
    file: WeightFile
    alphas: dict[str, Any]
    changes: dict[str, Change] = field(default_factory=dict)
    _patterns: Patterns = field(default_factory=lambda: Patterns("adapter's alpha_pattern"))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        folder = path_of(path, "adapter")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"adapter must be a folder with {name}, {folder} has none")
        config = read_json(folder / "adapter_config.json")
        if str(config.get("peft_type", "")).upper() != "LORA":
            raise ValueError(f"adapter must be of peft_type 'LORA', got {config.get('peft_type')!r}")
        for key, why in _REFUSED.items():
            if config.get(key):
                raise ValueError(f"adapter must not have {key}: {why}, which is not merged here")
        alphas = config.get("alpha_pattern") or {}
        if not isinstance(alphas, dict):
            raise ValueError(f"adapter's alpha_pattern must map patterns to numbers, got {alphas!r}")
        made = cls(folder, config, SafetensorsFile(folder / "adapter_model.safetensors"), alphas)
        try:
            made._read()
        except BaseException:
            made.close()
            raise
        return made

    @property
    def sha256(self) -> str:
        """Of its file of tensors."""
        return sha256_of(self.file.path)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def _read(self) -> None:
        assert isinstance(self.file, SafetensorsFile)
        pairs: dict[tuple[str, bool], dict[str, Stored]] = {}
        for name in self.file:
            array = Stored(self.file, name)
            inside = name.removeprefix(_PREFIX)
            match = _PAIR.fullmatch(inside)
            if match is not None:
                pairs.setdefault((match["module"], bool(match["embedding"])), {})[match["side"]] = array
                continue
            whole = _WHOLE.fullmatch(inside)
            if whole is None or ".lora_" in inside:
                raise ValueError(f"adapter's tensor {name!r} must be of LoRA or take a model's tensor's place")
            self.changes[f"{whole['module']}.{whole['role']}"] = Change(whole=array)
        for (module, embedding), sides in pairs.items():
            self.changes[f"{module}.weight"] = self._pair(module, embedding, sides)
        if not self.changes:
            raise ValueError("adapter must change a tensor, it has none")

    def _pair(self, module: str, embedding: bool, sides: Mapping[str, Stored]) -> Change:
        if set(sides) != {"A", "B"}:
            raise ValueError(f"adapter must have lora_A and lora_B of {module!r}, it has {', '.join(sides)} alone")
        a, b = sides["A"], sides["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or not 0 < a.shape[0] == b.shape[1]:
            raise ValueError(f"adapter's matrices of {module!r} must be (r, IN) and (OUT, r), got {a.shape}, {b.shape}")
        rank = a.shape[0]
        found = [value for pattern, value in self.alphas.items() if self._patterns.ends(pattern, module)]
        alpha = found[0] if found else self.config.get("lora_alpha", rank)
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not number or not abs(alpha) <= float(np.finfo(np.float32).max):  # NaN is not, either
            raise ValueError(f"adapter's lora_alpha must be a number of float32, got {alpha!r}")
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        # Embeddings keep a row for each token: (r, tokens) and (dimension, r).
        turned = embedding or bool(self.config.get("fan_in_fan_out"))
        return Change(a.read(), b.read(), scale, turned=turned)


def open_adapter(path: str | os.PathLike[str], base: Checkpoint) -> Adapter:
    """An adapter of PEFT (a folder), or of a program whose kind of file holds one, by the names of the model's own
    checkpoints. Raises ValueError where it is not LoRA, or a kind of it that is not a product of two matrices for each
    weight, or it is of another model, FileNotFoundError where a file is not there."""
    place = path_of(path, "adapter")
    if not place.is_file():
        return Adapter.open(place)
    read = container_of(place).adapter
    if read is None:
        raise ValueError(f"adapter must be PEFT's folder or a GGUF file, got {place}")
    adapter: Adapter = read(place, base)
    return adapter
