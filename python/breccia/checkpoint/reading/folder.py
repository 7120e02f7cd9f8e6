# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint's folder: config.json and its like, the index, and the weight files that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.bridges.checks import shown
from breccia.bridges.file_kinds import WeightFile
from breccia.bridges.written import PLACES
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.bounded_json import loads
from breccia.checkpoint.files.input_file import read_bounded

MAX_JSON = 100_000_000  # bytes, as of a header
MAX_SHARDS = 1 << 16  # files that an index names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError where it is not one."""
    return _parse(path, read_bounded(path, MAX_JSON)[0])


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def _instead(folder: Path) -> str:
    """What to do about weights of another kind in a folder; "" where there are none."""
    if any(folder.glob("*.gguf")):
        return ": name the .gguf file itself"
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(kind))
    if not pickles:
        return ""
    return (
        f", but {pickles[0]}, a pickle, which may run code and is not read: in Python, "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW') writes safetensors"
    )


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Whether all files are there of those that say by their names how many they are. Raises ValueError where one is
    not."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := re.fullmatch(r"(.*)-(\d{5,20})-of-(\d{5,20})\.safetensors", name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), there in numbers.items():
        if len(there) < int(total):
            missing = next(n for n in range(0 if 0 in there else 1, int(total) + 1) if n not in there)
            name = f"{stem}-{missing:0{len(total)}}-of-{total}.safetensors"
            raise ValueError(f"{folder}: must have all {int(total)} files of {stem!r}, {name} is not there")


class Folder:
    """The JSON files of a checkpoint, read; a file that stands alone has none.

    Attributes:
        paths: the weight files, in order.
        config: config.json, empty where there is none.
        index: the index, None where there is none.
        index_said: what the index says beside ``weight_map``.
        stamps: what tells whether a JSON file that was read is still the same.

    Raises:
        ValueError: a file is not valid.
        FileNotFoundError: there is no such path, or no weight file in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.index: Path | None = None
        self.index_said: dict[str, Any] = {}
        self._weights: dict[str, str] = {}
        self.stamps: dict[Path, disk.Stamp] = {}
        if path.is_dir():
            self._read_config()
            self.paths = self._paths()
        else:
            self.paths = [path]

    def _read_config(self) -> None:
        if os.path.lexists(self.path / "config.json"):
            self.config = self._json(self.path / "config.json")
        for bridge in bridges.registry().values():
            beside, dialect = self.path / f"{bridge.dialect.file}.json", bridge.dialect
            if dialect.file and os.path.lexists(beside) and not self.quantization():
                self.config["quantization_config"] = dialect.of_file(self._json(beside))

    def _paths(self) -> list[Path]:
        indices = sorted([p for p in self.path.glob("*.safetensors.index.json") if not p.name.startswith(".")])
        if not indices:
            paths = sorted([p for p in self.path.glob("*.safetensors") if not p.name.startswith(".")])
            if self.path / "model.safetensors" in paths:  # consolidated.safetensors is Mistral's own form of the same
                paths = [p for p in paths if p.name != "consolidated.safetensors"]
            if not paths:
                raise FileNotFoundError(
                    f"path must have safetensors files, there are none in {self.path}{_instead(self.path)}"
                )
            _check_numbers(self.path, [path.name for path in paths])
            return paths
        models = self.path / "model.safetensors.index.json"  # Mistral's folders have one of their own form, too
        self.index = models if models in indices else indices[0]
        said = self._json(self.index)
        weights: Any = said.get("weight_map")
        names = self._shards(self.index, weights)
        self._weights = weights
        self.index_said = {key: value for key, value in said.items() if key != "weight_map"}
        return [self.path / name for name in names]

    def _json(self, path: Path) -> dict[str, Any]:
        raw, self.stamps[path] = read_bounded(path, MAX_JSON)
        return _parse(path, raw)

    def _shards(self, index: Path, weights: Any) -> list[str]:
        if not isinstance(weights, dict):
            raise ValueError(f"{index}: weight_map must map tensors to files")
        names: set[str] = set()
        for name in weights.values():
            if not isinstance(name, str):
                raise ValueError(f"{index}: weight_map must map tensors to files")
            names.add(name)
            if len(names) > MAX_SHARDS:
                raise ValueError(f"{index}: weight_map must name at most {MAX_SHARDS} files, it names more")
        if not names:
            raise ValueError(f"{index}: weight_map must name tensors and their files, it is empty")
        others = bridges.config_files()
        for name in names:
            if not name or name != os.path.basename(name) or name.startswith(".") or "\0" in name:
                raise ValueError(f"{index}: files must be names in its directory, got {name[:200]!r}")
            if name in others or name.endswith(".index.json"):
                raise ValueError(f"{index}: files must be of tensors, {name!r} is not")
        return sorted(names)

    def check_index(self, home: Mapping[str, WeightFile]) -> None:
        """Whether each tensor is in the file that the index says, which is forgotten then. Raises ValueError where one
        is not."""
        weights, self._weights = self._weights, {}
        for name, file in weights.items():
            if name not in home or home[name].path.name != file:
                raise ValueError(
                    f"{self.index}: tensor {name[:200]!r} must be in {file!r}, as weight_map says, it is not"
                )

    def quantization(self) -> dict[str, Any]:
        """What config.json says of quantization, empty where it says nothing."""
        for place in (self.config, self.config.get("text_config"), self.config.get("language_config")):
            if isinstance(place, dict):
                for key in PLACES:
                    said = place.get(key)
                    if isinstance(said, dict):
                        return said
                    if said is not None:
                        raise ValueError(f"{self.path}: {key} in config.json must be an object, got {shown(said)}")
        return {}
