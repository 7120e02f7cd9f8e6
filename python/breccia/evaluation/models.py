# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers of transformers from local folders; a model's weights may be in any format breccia reads."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from breccia.bridges.outside import values
from breccia.checkpoint.arguments import existing, path_of
from breccia.checkpoint.reading.models import is_written_turned
from breccia.checkpoint.reading.source import Checkpoint
from breccia.peers import require

_HERE: dict[str, Any] = {"local_files_only": True}  # nothing is fetched


def folder_of(path: str | os.PathLike[str], argument: str) -> Path:
    """A model's folder. Raises ValueError where it has no config.json."""
    folder = path_of(path, argument)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{argument} must be a model's folder with config.json, got {folder}")
    return folder


def _said(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it asks for Python files of its folder, which run with trust_remote_code (--trust-remote-code) alone"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_tokenizer(folder: Path, code: bool = False) -> Any:
    """The tokenizer of a model's folder; nothing is downloaded. ``code``: run Python files of the folder that it asks
    for. Raises ImportError where transformers is not installed,
    ValueError where there is none that transformers can make."""
    transformers = require("transformers", "transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **_HERE, trust_remote_code=code)
    except Exception as error:  # of any kind, by the files that are there
        files = "copy tokenizer.json and tokenizer_config.json of the model there"
        raise ValueError(f"{folder} must have a tokenizer that transformers reads: {files} ({_said(error)})") from error


def load_model(
    folder: Path,
    dtype: str,
    weights: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    code: bool = False,
) -> Any:
    """A model of transformers in plain floats, in its evaluation mode: of the class that config.json names, with
    parameters of a dtype ("auto": that of the files), and the weights of a checkpoint of any format, dequantized (None:
    those of ``folder``). ``code``: run Python files of ``folder`` that config.json asks for. Raises ImportError where
    transformers is not installed, ValueError where transformers has no such class, the weights do not fit it, or there
    is no such dtype or device."""
    transformers = require("transformers", "transformers")
    own = None if dtype == "auto" else getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(own, torch.dtype):
        raise ValueError(f"dtype must be 'auto' or a type of torch, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be one that torch has here, got {device!r}: {_said(error)}") from error
    checkpoint = Checkpoint(folder if weights is None else weights, mapped=False)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **_HERE, trust_remote_code=code)
        plain = not checkpoint.found.formats
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        kind = _class(transformers, folder, code)
        options: dict[str, Any] = {"config": config, "dtype": own or "auto", "output_loading_info": True}
        options["trust_remote_code"] = code
        with _quiet(transformers):
            if plain and weights is None:
                model, told = kind.from_pretrained(folder, **_HERE, **options)
            else:
                model, told = kind.from_pretrained(None, state_dict=_floats(checkpoint, config, own), **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint.path}: transformers cannot load it: {_said(error)}") from error
    finally:
        checkpoint.close()
    if missing := sorted(told["missing_keys"]):
        raise ValueError(f"{checkpoint.path} must have every weight of the model, it lacks {missing[0]}")
    if wrong := sorted(map(str, told["mismatched_keys"])):
        raise ValueError(f"{checkpoint.path} must have the shapes of {folder}'s config.json, it has not: {wrong[0]}")
    return model.eval().to(device)


def check_length(model: Any, length: int) -> None:
    """Refuse rows of so many tokens that a model has no positions for. Raises ValueError where they are more than its
    config.json has."""
    most = getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        raise ValueError(f"length must be at most {most}, the positions of the model, got {length}")


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """While inside, transformers draws no progress bar and says nothing: what matters of it is raised."""
    log = transformers.utils.logging
    bar, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()


def _class(transformers: Any, folder: Path, code: bool) -> Any:
    """The class that config.json names; that of a causal language model where it names none."""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = getattr(transformers, str((said.get("architectures") or [None])[0]), None)
    own = said["auto_map"].get("AutoModelForCausalLM") if kind is None and code and "auto_map" in said else None
    if own is not None:
        return importlib.import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module(own, folder)
    return transformers.AutoModelForCausalLM if kind is None else kind


def _floats(checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Every tensor by its name in a float checkpoint of the model, in the model's order of axes."""
    said = config.to_dict()
    tensors = {}
    for found in checkpoint.found:
        loaded = checkpoint.load(checkpoint.refined(found))
        array = np.asarray(values(loaded))
        turned = found.origin.turned or (found.format != "plain" and is_written_turned(found.name, array.shape, said))
        if array.dtype.isbuiltin != 1:  # bfloat16 and 8-bit floats of ml_dtypes
            array = array.astype(np.float32)
        tensor = torch.from_numpy(np.array(np.swapaxes(array, -1, -2) if turned else array))
        tensors[found.name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        checkpoint.release(found)
    return tensors


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, int64 (n, length); how many tokens the text has, and SHA-256 of its bytes."""

    rows: np.ndarray[Any, Any]
    available: int
    digest: str


def rows_of_text(paths: Sequence[str | os.PathLike[str]], tokenizer: Any, length: int, tokens: int | None) -> Rows:
    """Text of UTF-8 files, one after the other, cut into rows of equal length, so many tokens at most, rounded up to a
    row (None: all); what is left at the end is not used. Where the tokenizer begins a text with a token of its own,
    every row begins with that. Raises ValueError where a file is not UTF-8, or the text has less than one row."""
    digest, text = hashlib.sha256(), []
    for path in paths:
        raw = existing(path, "text").read_bytes()
        digest.update(raw)
        try:
            text.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be text in UTF-8: {error}") from None
    ids: list[int] = []
    for part in text:
        ids += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    first = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    own = length - len(first)
    if own < 1 or len(ids) < own:
        raise ValueError(
            f"text must have at least one row of {own} tokens, it has {len(ids)}: give more text, or a smaller length"
        )
    count = len(ids) // own if tokens is None else min(len(ids) // own, -(-tokens // length))
    rows = [first + ids[start : start + own] for start in range(0, count * own, own)]
    return Rows(np.asarray(rows, np.int64), len(ids), digest.hexdigest())
