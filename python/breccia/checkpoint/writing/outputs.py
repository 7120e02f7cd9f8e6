# SPDX-License-Identifier: Apache-2.0
"""What goes beside the weights: index, config.json, and the rest of a model's directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.bounded_json import loads
from breccia.checkpoint.files.input_file import read_bounded
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.model_config import Config
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.reading.folder import MAX_JSON
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.writing.manifest import NAME

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


def write_companions(
    checkpoint: Checkpoint, work: Path, config: Config | None, choices: list[Choice], files: dict[str, list[Choice]]
) -> list[str]:
    """Write the index and config.json, which stays as it is where none is given, copy tokenizer and the like, and say
    in README.md what was quantized. Gives notes for the report."""
    whole = checkpoint.path.is_dir()  # else config.json is what a file says of its model
    left = _copy_others(checkpoint.path, work, set(files)) if whole else []
    if checkpoint.index is not None:
        said = checkpoint.folder.index_said
        others = said["metadata"] if isinstance(said.get("metadata"), dict) else {}
        total = {**others, "total_size": sum(choice.nbytes for choice in choices)}
        disk.write_file(work / checkpoint.index.name, _index({**said, "metadata": total}, files))
    quantized = config is not None and not {"quantization_config", "quantization"}.isdisjoint(config.own)
    base = base_model(checkpoint) if whole and quantized else ""
    if base:
        _write_card(work / "README.md", base)
    if config is None:
        for name in bridges.config_files():
            if (checkpoint.path / name).is_file():
                disk.copy_file(checkpoint.path / name, work / name)
    elif (checkpoint.path / "config.json").is_file() if whole else checkpoint.config:
        _write(work / "config.json", config.own)
        for name, value in config.others.items():
            _write(work / f"{name}.json", value)
    left = left and [name for name in left if name not in {file.path.name for file in checkpoint.files}]
    return [Remark(f"{some(left)}: weights in other files of the folder are not copied")] if left else []


def base_model(checkpoint: Checkpoint) -> str:
    """The Hugging Face Hub's name of a checkpoint's model, as the Hub's own folders have it, or config.json where the
    model's card is of no other model; "" where neither says it."""
    folder = re.search(r"/models--(\w[\w.-]*)--(\w[\w.-]*)/", f"{checkpoint.path.absolute()}/")
    if folder:
        return f"{folder[1]}/{folder[2]}"
    card, name = checkpoint.path / "README.md", str(checkpoint.config.get("_name_or_path"))
    if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name) or Path(name).exists() or not card.is_file():
        return ""
    return "" if re.search(rb"^base_model:", read_bounded(card, MAX_JSON)[0], re.MULTILINE) else name


def _write_card(path: Path, base: str) -> None:
    """Say in the head of a model's card what it was quantized from; all else of the card stays."""
    text = read_bounded(path, MAX_JSON)[0].decode(errors="surrogateescape") if path.is_file() else ""
    card = re.match(r"---\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL | re.MULTILINE)
    head, body = (card[1], text[card.end() :]) if card else ("", text)
    head = re.sub(r"^base_model(?:_relation)?:.*\n(?:[ \t-].*\n)*", "", head, flags=re.MULTILINE)
    said = f"---\n{head}base_model: {base}\nbase_model_relation: quantized\n---\n{body}"
    disk.write_file(path, said.encode(errors="surrogateescape"))


def _copy_others(source: Path, work: Path, files: set[str]) -> list[str]:
    """Copy what is not the model's weights: files beside them, and folders, in which sentence-transformers keeps how
    it pools and further layers, weights included. Gives the names of files of other weights."""
    modules, others = source / "modules.json", bridges.config_files()
    parts = _modules(modules) if modules.exists() else ()
    left = []
    for path in sorted(source.iterdir()):
        skip = path.name.startswith(".") or path.name in others or path.name.endswith(".index.json")
        skip = skip or path.name in files or path.name == NAME
        if path.is_file() and not skip:
            if path.suffix in _WEIGHTS:
                left.append(path.name)
            else:
                disk.copy_file(path, work / path.name)
        if path.is_dir() and not path.is_symlink() and not skip:
            _copy_folder(path, work / path.name, weights=path.name in parts)
    return left


def _copy_folder(source: Path, target: Path, weights: bool) -> None:
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        linked = any((source / parent).is_symlink() for parent in inside.parents)
        if path.is_file() and not hidden and not linked and (weights or path.suffix not in _WEIGHTS):
            for folder in [target, *reversed((target / inside).parents)]:
                if folder.is_relative_to(target):
                    disk.make_directory(folder)
            disk.copy_file(path, target / inside)


def _modules(path: Path) -> set[str]:
    """Folders of the modules of a sentence-transformers model."""
    try:
        said = loads(read_bounded(path, MAX_JSON)[0])
    except (OSError, ValueError, RecursionError):
        return set()
    modules = said if isinstance(said, list) else []
    return {str(module.get("path")) for module in modules if isinstance(module, dict)} - {""}


def _write(path: Path, value: dict[str, Any]) -> None:
    disk.write_file(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())


def _index(said: dict[str, Any], files: dict[str, list[Choice]]) -> Iterator[bytes]:
    """What `_write` writes of these words and the map of names to files, of one file after the other; without an
    indentation json's compiled encoder makes its lines, in a tenth of the time."""
    yield f'{json.dumps(said, indent=2, ensure_ascii=False)[:-2]},\n  "weight_map": {{'.encode()
    between = "\n    "
    for file, choices in files.items():
        names = dict.fromkeys(chain.from_iterable(choice.outputs for choice in choices), file)
        lines = json.dumps(names, ensure_ascii=False, separators=(",\n    ", ": "))[1:-1]
        yield f"{between}{lines}".encode()
        between = ",\n    "
    yield b"\n  }\n}\n"
