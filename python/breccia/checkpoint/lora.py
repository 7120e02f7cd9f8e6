# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA adapters: which tensors of a model they change, and by what."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges._common import float32
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.safetensors_file import SafetensorsFile
from breccia.checkpoint.folder import read_json

__all__ = ["Adapter", "Change"]

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


@dataclass(frozen=True)
class Change:
    """What an adapter does to one tensor: ``scale`` · ``b`` @ ``a`` is added, or ``whole`` takes its place."""

    a: Array = None
    b: Array = None
    scale: float = 1.0
    whole: Array = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        if self.whole is not None:
            return tuple(self.whole.shape)
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.turned else shape

    def rows(self, start: int, stop: int) -> Array:
        """What is added to some rows, float32."""
        if self.turned:
            return (float32(self.b) @ float32(self.a[:, start:stop])).T * np.float32(self.scale)
        return (float32(self.b[start:stop]) @ float32(self.a)) * np.float32(self.scale)


@dataclass
class Adapter:
    """An adapter on disk.

    Attributes:
        path: its folder.
        config: adapter_config.json.
        changes: name of a tensor of the model → what happens to it.
        stamps: what tells whether a file that was read is still the same.

    Raises:
        ValueError: it is not LoRA, or a kind of it that is not a product of two matrices for each weight.
        FileNotFoundError: a file is not there.
    """

    path: Path
    config: dict[str, Any]
    changes: dict[str, Change] = field(default_factory=dict)
    stamps: list[tuple[str, Any]] = field(default_factory=list)

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
        file = SafetensorsFile(folder / "adapter_model.safetensors")
        made = cls(folder, config)
        made.stamps = [(str(file.path.resolve()), file.file.stamp), (str(folder), sorted(config.items(), key=str))]
        made._read(dict(file.items()))
        return made

    def _read(self, arrays: Mapping[str, Array]) -> None:
        pairs: dict[tuple[str, bool], dict[str, Array]] = {}
        for name, array in arrays.items():
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

    def _pair(self, module: str, embedding: bool, sides: Mapping[str, Array]) -> Change:
        if set(sides) != {"A", "B"}:
            raise ValueError(f"adapter must have lora_A and lora_B of {module!r}, it has {', '.join(sides)} alone")
        a, b = sides["A"], sides["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"adapter's matrices of {module!r} must be (r, IN) and (OUT, r), got {a.shape}, {b.shape}")
        rank = a.shape[0]
        alpha = _of_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", rank))
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
            raise ValueError(f"adapter's lora_alpha must be a number, got {alpha!r}")
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        # Embeddings keep a row for each token: (r, tokens) and (dimension, r).
        turned = embedding or bool(self.config.get("fan_in_fan_out"))
        return Change(a, b, scale, turned=turned)


def _of_pattern(patterns: Any, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that is the end of a module's name.

    Raises:
        ValueError: a pattern is not a regular expression.
    """
    try:
        found = [value for pattern, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
    except re.error as error:
        raise ValueError(f"adapter's alpha_pattern must be of regular expressions: {error}") from None
    return found[0] if found else otherwise
