# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of its model beside the weights, as files that transformers reads: config.json and the
tokenizer's. transformers itself knows how one follows from the other."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from breccia.checkpoint import disk
from breccia.checkpoint.files.gguf_file import GgufFile
from breccia.peers import require

__all__ = ["config_of", "write_tokenizer"]

_OWN = ("_name_or_path", "_model_name_or_path", "transformers_version")  # of whoever loads it


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in a GGUF file.

    Raises:
        ImportError: transformers or gguf is not installed; the message names the extra.
        ValueError: transformers does not know the model.
    """
    auto, path = _transformers(), file.path
    config = _asked(path, "model", lambda: auto.AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    made: dict[str, Any] = json.loads(config.to_json_string())
    made = {key: value for key, value in made.items() if key not in _OWN}
    width = file.fields.get(f"{_said(file, 'general.architecture')}.attention.key_length")
    if width is not None and "head_dim" in made:  # which transformers takes for some models alone
        made["head_dim"] = width[1]
    names = auto.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if made["model_type"] in names:
        made["architectures"] = [names[made["model_type"]]]
    return made


def write_tokenizer(path: Path, folder: Path) -> str:
    """Write the files of a GGUF file's tokenizer.

    Returns:
        Why there are none, empty where there are.
    """
    transformers = _transformers()
    try:
        made = _asked(
            path, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        )
    except ValueError as error:
        return f"there are no files of a tokenizer: {error}"
    with tempfile.TemporaryDirectory() as place:
        made.save_pretrained(place)
        for file in sorted(Path(place).iterdir()):
            disk.copy_file(file, folder / file.name)
    return ""


def _said(file: GgufFile, key: str) -> Any:
    return file.fields.get(key, (0, ""))[1]


def _transformers() -> Any:
    require("gguf", "gguf")
    return require("transformers", "transformers")


def _asked(path: Path, what: str, call: Any) -> Any:
    """What transformers answers; its errors and those of its readers as ValueErrors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{path}: transformers makes no {what} of it: {first}") from error
