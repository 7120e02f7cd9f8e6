# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: a safetensors file, a directory of shards with an index, or a GGUF file, and the
logical tensors in it, found from headers alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges
from breccia.bridges import gguf
from breccia.bridges._outside import OutsideTensor
from breccia.bridges._parts import Found
from breccia.checkpoint.dtypes import typed
from breccia.checkpoint.experts import apart, stack
from breccia.checkpoint.gguf_file import GgufFile
from breccia.checkpoint.models import is_turned, models_name
from breccia.checkpoint.safetensors_file import Entry, SafetensorsFile
from breccia.scaled_tensor import ScaledTensor

__all__ = ["Checkpoint", "read_json"]

_MAX_JSON = 1 << 30
LEFT_OUT = "breccia.left_out"  # GGUF metadata: names of the source's tensors that GGUF has no place for
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: it is not one.
    """
    if path.stat().st_size > _MAX_JSON:
        raise ValueError(f"{path}: must be at most {_MAX_JSON} bytes, it has {path.stat().st_size}")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: what was opened.
        files: its weight files, in order.
        entries: stored tensors by name.
        config: config.json, empty where there is none.
        found: logical tensors, in the order of the files.

    Raises:
        ValueError: a file is not valid, or index and files disagree.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = {}
        self.index: Path | None = None
        self.files: list[SafetensorsFile | GgufFile] = []
        self.files += [_open(p) for p in self._paths()]
        self.entries: dict[str, Entry] = {}
        self.home: dict[str, SafetensorsFile | GgufFile] = {}
        for file in self.files:
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise ValueError(f"{file.path}: tensor {name!r} must be in one file, {self.home[name].path} has it")
                self.entries[name], self.home[name] = entry, file
        if self.index is not None:
            self._check_index(self.index)
        self.found = self._find()

    def _paths(self) -> list[Path]:
        if not self.path.exists():
            raise FileNotFoundError(f"path must be a file or a directory, there is no {self.path}")
        if not self.path.is_dir():
            return [self.path]
        if (self.path / "config.json").is_file():
            self.config = read_json(self.path / "config.json")
        if (self.path / "hf_quant_config.json").is_file() and not self.quantization:
            said = read_json(self.path / "hf_quant_config.json").get("quantization")
            self.config["quantization_config"] = {
                "quant_method": "modelopt",
                **(said if isinstance(said, dict) else {}),
            }
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if not indices:
            paths = sorted(p for p in self.path.glob("*.safetensors") if not p.name.startswith("."))
            if not paths:
                raise FileNotFoundError(f"path must have safetensors files, there are none in {self.path}")
            return paths
        self.index = indices[0]
        weights = read_json(self.index).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
            raise ValueError(f"{self.index}: weight_map must map tensors to files")
        names = sorted(set(weights.values()))
        for name in names:
            if name != Path(name).name or name.startswith("."):
                raise ValueError(f"{self.index}: files must be names in its directory, got {name!r}")
        return [self.path / name for name in names]

    def _check_index(self, index: Path) -> None:
        for name, file in read_json(index)["weight_map"].items():
            if name not in self.home or self.home[name].path.name != file:
                raise ValueError(f"{index}: tensor {name!r} must be in {file}, as weight_map says, it is not")

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of quantization."""
        for place in (self.config, self.config.get("text_config"), self.config.get("language_config")):
            if isinstance(place, dict):
                for key in ("quantization_config", "compression_config", "quantization"):
                    if isinstance(place.get(key), dict):
                        return dict(place[key])
        for file in self.files:
            try:
                said = json.loads(file.metadata.get("quantization_config", "{}"))
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict) and said:
                return said
        return {}

    def _find(self) -> list[Found]:
        context = {"quantization_config": self.quantization, "quantization": self.config.get("quantization")}
        taken: set[str] = set()
        found: list[Found] = []
        for file in self.files:
            if isinstance(file, GgufFile):
                found += self._find_gguf(file, taken)
                continue
            for module in bridges.modules().values():
                if hasattr(module, "find_all") and file.metadata:
                    found += [f for f in module.find_all(self.entries, file.metadata) if _take(f, taken)]
        finders = [m.find for m in bridges.modules().values() if hasattr(m, "find")]
        troubles: dict[str, str] = {}
        for name in self.entries:
            for find in finders:
                try:
                    one = None if name in taken else find(name, self.entries, context)
                except (ValueError, IndexError, ZeroDivisionError, KeyError, TypeError) as error:
                    troubles[name] = f"looks quantized but does not fit: {error}"
                    continue
                if one is not None and _take(one, taken):
                    found.append(one)
        for name, entry in self.entries.items():
            if name not in taken:
                kind = {"F8_E4M3": "fp8", "F8_E5M2": "fp8"}.get(entry.dtype, entry.dtype.lower())
                said = (troubles[name],) if name in troubles else _suspicious(entry)
                outside, options = self._spelled(name, entry.shape)
                shape = entry.shape
                if is_turned(name, shape, self.config):
                    shape, options = (*shape[:-2], shape[-1], shape[-2]), {**options, "turned": True}
                found.append(
                    Found(
                        outside,
                        "plain",
                        kind,
                        {"weight": name},
                        shape,
                        dtype=entry.dtype,
                        options=options,
                        findings=said,
                    )
                )
        order = {name: i for i, name in enumerate(self.entries)}
        found = apart([replace(f, name=models_name(f.name, f.shape)) for f in found])
        return sorted(found, key=lambda f: min(order[p] for p in f.parts.values()))

    def _find_gguf(self, file: GgufFile, taken: set[str]) -> list[Found]:
        found = []
        for name, kind in file.kinds.items():
            if gguf.TYPES[kind][1] == 1:
                continue
            parts = {"blocks": name}
            second = name.removesuffix("weight") + "scale" if name.endswith("weight") else name + ".scale"
            if kind == "NVFP4" and second in file.entries:
                parts["global_scale"] = second
            recipe = gguf.RECIPE_OF.get(kind)
            if kind == "NVFP4" and recipe is not None:
                recipe = replace(recipe, two_level="global_scale" in parts)  # type: ignore[call-arg]
            layout = None if recipe is None else recipe.layout
            dtype = "float16" if kind.startswith("Q") else "uint8"
            outside, options = self._spelled(name, file.shapes[name])
            one = Found(outside, "gguf", kind, parts, file.shapes[name], recipe, layout, dtype, options=options)
            taken |= set(parts.values())
            found.append(one)
        return found

    def _spelled(self, name: str, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
        """The model's own name of a stored tensor, and the order of its rows where GGUF has another."""
        home = self.home[name]
        if not isinstance(home, GgufFile) or home.model is None:
            return name, {}
        outside = home.model.outside(name)
        order = home.model.row_order(outside, shape[0] if shape else 0)
        return outside, {} if order is None else {"row_order": order}

    def nbytes(self, found: Found) -> int:
        """Stored bytes of a logical tensor."""
        stored = sum(self.entries[name].nbytes for name in set(found.parts.values()))
        return stored // int(found.options.get("experts", 1))

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A stored tensor, viewing its file."""
        entry = self.entries[name]
        return typed(self.home[name].raw(name), entry.dtype, entry.shape)

    def load(self, found: Found) -> ScaledTensor | OutsideTensor | np.ndarray[Any, Any]:
        """A logical tensor: a ScaledTensor that views the files where its format allows.

        Raises:
            ValueError: its bytes do not fit; the message names the tensor.
        """
        if "members" in found.options:
            batch: ScaledTensor | np.ndarray[Any, Any] = stack([self.load(one) for one in found.options["members"]])
            return batch
        try:
            if found.format == "plain":
                array = self._in_order(found, self._one(found, found.parts["weight"]))
                return np.swapaxes(array, -1, -2) if found.options.get("turned") else array
            parts = {role: self._one(found, name) for role, name in found.parts.items()}
            options = {key: value for key, value in found.options.items() if key not in ("expert", "experts")}
            module = bridges.modules()[found.format]
            if found.format == "gguf":
                kind = found.kind
                parts["blocks"] = self._in_order(found, parts["blocks"])
                if kind in ("Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4"):
                    return gguf.from_gguf(parts["blocks"], kind, parts.get("global_scale"))
                return gguf.dequantize_gguf(parts["blocks"], kind)
            if list(found.parts.values()).count(found.parts.get("global_scale", "")) > 1:
                del parts["global_scale"]  # a second name for a role of the format's own
            reader = getattr(module, "load", None) or getattr(module, f"from_{module.__name__.rpartition('.')[2]}")
            result: ScaledTensor | OutsideTensor | np.ndarray[Any, Any] = reader(parts, **options)
            return result
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: tensor {found.name!r}: {error}") from error

    def raw(self, found: Found) -> np.ndarray[Any, Any]:
        """A plain tensor's bytes, flat."""
        if "members" in found.options or "expert" in found.options:
            return np.ascontiguousarray(self.load(found)).reshape(-1).view(np.uint8)
        name = found.parts["weight"]
        if "row_order" not in found.options:
            return self.home[name].raw(name)
        return np.ascontiguousarray(self._in_order(found, self.array(name))).reshape(-1).view(np.uint8)

    def _one(self, found: Found, name: str) -> np.ndarray[Any, Any]:
        """A stored tensor, or what is one expert's of it."""
        array, expert = self.array(name), found.options.get("expert")
        return array if expert is None else array[expert]

    def _in_order(self, found: Found, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        order = found.options.get("row_order")
        return array if order is None else array[np.argsort(order)]

    @property
    def left_out(self) -> set[str]:
        """Tensors that a conversion to GGUF had no place for."""
        said = [f.fields[LEFT_OUT][1] for f in self.files if isinstance(f, GgufFile) and LEFT_OUT in f.fields]
        return {str(name) for names in said if isinstance(names, list) for name in names}

    def refined(self, found: Found) -> Found:
        """What only small tensors tell, such as whether zero points are all the same, looked at."""
        if "members" in found.options or "expert" in found.options:
            return found
        refine = getattr(bridges.modules().get(found.format), "refine", None)
        if refine is None:
            return found
        try:
            one: Found = refine(found, self.array)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: tensor {found.name!r}: {error}") from error
        return one

    def release(self, found: Found) -> None:
        """Let go of a tensor's pages."""
        for name in set(found.parts.values()):
            self.home[name].release(name)

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            file.close()


def _open(path: Path) -> SafetensorsFile | GgufFile:
    with path.open("rb") as file:
        gguf_magic = file.read(4) == b"GGUF"
    return GgufFile(path) if gguf_magic or path.suffix == ".gguf" else SafetensorsFile(path)


def _take(found: Found, taken: set[str]) -> bool:
    names = set(found.parts.values())
    if names & taken:
        return False
    taken |= names
    return True


def _suspicious(entry: Entry) -> tuple[str, ...]:
    if entry.dtype.startswith("F8") and len(entry.shape) > 1 and entry.dtype != "F8_E8M0":
        return ("FP8 without a scale",)
    if entry.dtype in ("U8", "I8") and len(entry.shape) > 1 and entry.nbytes > 4096:
        return (f"{entry.dtype} bytes whose meaning nothing says",)
    return ()


def is_float(found: Found) -> bool:
    """Whether a plain tensor holds high-precision numbers."""
    return found.format == "plain" and found.dtype in _FLOATS
