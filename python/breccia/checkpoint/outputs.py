# SPDX-License-Identifier: Apache-2.0
"""What goes beside the weights: index, config.json, and the rest of a model's directory."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from breccia.bridges import gguf
from breccia.checkpoint.dtypes import DTYPES, nbytes_of
from breccia.checkpoint.gguf_file import GgufFile
from breccia.checkpoint.source import Checkpoint
from breccia.checkpoint.targets import Choice, Target

__all__ = ["gguf_fields", "stored_bytes", "write_companions"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
_OTHERS = ("config.json", "hf_quant_config.json")
_STRING = 8


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an output; ``dtype`` is safetensors' name or GGUF's block type."""
    if dtype in DTYPES:
        return nbytes_of(dtype, shape)
    _, block, nbytes = gguf.TYPES[dtype]
    return math.prod(shape) // block * nbytes


def write_companions(
    checkpoint: Checkpoint, work: Path, target: Target, choices: list[Choice], files: dict[str, list[Choice]]
) -> None:
    """Write the index and config.json, and copy tokenizer and the like."""
    _copy_others(checkpoint.path, work)
    if checkpoint.index is not None:
        weights = {name: file for file, kept in files.items() for c in kept for name in c.outputs}
        total = sum(stored_bytes(d, s) for c in choices for d, s in c.outputs.values())
        _write(work / checkpoint.index.name, {"metadata": {"total_size": total}, "weight_map": weights})
    if (checkpoint.path / "config.json").is_file():
        config, others = _config(checkpoint, target, choices)
        _write(work / "config.json", config)
        for name, value in others.items():
            _write(work / f"{name}.json", value)


def _copy_others(source: Path, work: Path) -> None:
    for path in sorted(source.iterdir()):
        skip = path.name.startswith(".") or path.name in _OTHERS or path.name.endswith(".index.json")
        if path.is_file() and not skip and path.suffix not in _WEIGHTS:
            shutil.copyfile(path, work / path.name)


def _config(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = json.loads(json.dumps(checkpoint.config))
    for place in (config, config.get("text_config"), config.get("language_config")):
        if isinstance(place, dict):
            for key in ("quantization_config", "compression_config", "quantization"):
                place.pop(key, None)
    if target.float_dtype:
        name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[target.float_dtype]
        config["dtype" if "dtype" in config else "torch_dtype"] = name
        return config, {}
    quantized = [c for c in choices if c.action in ("repack", "requantize", "cast")]
    recipe = next((c.recipe for c in quantized if c.recipe is not None), None)
    if recipe is None:
        return config, {}
    said = target.module.config(recipe, _ignored(choices), checkpoint.config)
    others = {key: said.pop(key) for key in list(said) if key == "hf_quant_config"}
    return {**config, **said}, others


def quantization_config(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> dict[str, Any]:
    """What config.json would say of quantization, for the header of a file that stands alone."""
    config, _ = _config(checkpoint, target, choices)
    return dict(config.get("quantization_config", {}))


def _ignored(choices: list[Choice]) -> list[str]:
    """Modules whose weight is a matrix that stays in high precision."""
    return sorted(
        c.found.name.removesuffix(".weight")
        for c in choices
        if c.action in ("copy", "float") and len(c.found.shape) == 2 and c.found.name.endswith(".weight")
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def gguf_fields(checkpoint: Checkpoint) -> dict[str, tuple[int, Any]]:
    """Metadata of a GGUF file: the source's own, or the architecture and name that config.json gives."""
    first = checkpoint.files[0]
    if isinstance(first, GgufFile):
        return first.fields
    architecture = str(checkpoint.config.get("model_type", "unknown"))
    return {
        "general.architecture": (_STRING, architecture),
        "general.name": (_STRING, checkpoint.path.stem),
        "general.quantized_by": (_STRING, "breccia"),
    }
