# SPDX-License-Identifier: Apache-2.0
"""GGUF files as the container of a checkpoint: what is written to one beside the tensors, and what one says of its
model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.file_kinds import Output
from breccia.bridges.gguf.blocks import TYPES
from breccia.checkpoint.files.input_file import read_bounded
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.reading.folder import MAX_JSON, read_json
from breccia.gguf.container import LEFT_OUT, GgufFile, GgufWriter, block_type
from breccia.gguf.folder import config_of, write_tokenizer
from breccia.gguf.models import ModelMap, model_map
from breccia.gguf.parameters import hyperparameters
from breccia.gguf.rope import ROPE_TENSORS, rope_tensors
from breccia.gguf.tokenizer import chat_fields, sentencepiece_fields, tokenizer_fields
from breccia.gguf.types import ARRAY, STRING, UINT32, Fields

__all__ = [
    "ROPE_TENSORS",
    "TYPES",
    "GgufFile",
    "config_of",
    "made_anew",
    "model_names",
    "names_for",
    "write_tokenizer",
    "writer",
]

# How the note begins of a file that llama.cpp does not open.
NAMES_KEPT = "tensors keep their names, by which no program loads a model from GGUF"


def model_names(checkpoint: Any, left_out: Collection[str] = ()) -> tuple[ModelMap | None, str]:
    """How GGUF spells a checkpoint's model, of which some tensors are not written; None and the reason where it is not
    known here."""
    first = checkpoint.files[0]
    if isinstance(first, GgufFile):
        return first.model, ""
    return model_map(checkpoint.config, [f.name for f in checkpoint.found if f.name not in left_out])


def names_for(checkpoint: Any, left_out: Collection[str]) -> tuple[ModelMap | None, list[str], list[str]]:
    """See `breccia.bridges.Container.names`."""
    names, reason = model_names(checkpoint, left_out)
    if names is None:
        return None, [], [f"{NAMES_KEPT}: {reason}"]
    without = [found.name for found in checkpoint.found if names.left_out(found.name)]
    return names, without, [f"{name}: left out: GGUF has no place for it" for name in without]


def made_anew(checkpoint: Any, names: ModelMap | None) -> dict[str, np.ndarray[Any, Any]]:
    """How frequencies of RoPE are divided, which config.json says."""
    if names is None or isinstance(checkpoint.files[0], GgufFile):
        return {}
    return dict(rope_tensors(checkpoint.config))


def writer(path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
    """See `breccia.bridges.Container.writer`."""
    names: ModelMap | None = output.names
    kinds = {name: (block_type(name, dtype), shape) for name, (dtype, shape) in output.plan.items()}
    fields, trouble = _fields(output.source, names, list(output.left_out), kinds)
    orders, offsets = {}, {}
    for found, stored in output.tensors if names is not None else ():
        assert names is not None
        order = names.row_order(found.name, found.shape[0] if found.shape else 0)
        if order is not None:
            orders[names.inside(found.name) or found.name] = order
        if names.offset(found.name):
            ((name, (kind, _)),) = stored.items()
            if kind != "F32":
                raise ValueError(f"tensor {found.name!r} must be of 16 or 32 bits, it is {kind}")
            offsets[name] = names.offset(found.name)
    made = GgufWriter(path, kinds, fields, row_orders=orders, offsets=offsets, resume=True)
    return made, [trouble] if trouble else []


def _fields(
    checkpoint: Any, names: ModelMap | None, left_out: list[str], kinds: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[Fields, str]:
    """Metadata of a GGUF file whose tensors have these types and shapes, and what is missing from it: the source's own,
    or what config.json, the tokenizer's files and the pooling of a sentence model say."""
    first = checkpoint.files[0]
    if isinstance(first, GgufFile):
        anew = ("general.alignment", "general.file_type")
        return {key: value for key, value in first.fields.items() if key not in anew} | _file_type(kinds), ""
    fields, trouble = _model_fields(checkpoint, names, left_out)
    return fields | _file_type(kinds), trouble


# llama.cpp's numbers for what most matrices of a file are (its ftype), and what some of the layers' beside them.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "IQ4_NL": 25, "BF16": 32}
_FILE_TYPES |= {"MXFP4": 38, "NVFP4": 39, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
_MIXES = {("Q3_K", "Q4_K"): 12, ("Q3_K", "Q5_K"): 13, ("Q4_K", "Q6_K"): 15, ("Q5_K", "Q6_K"): 17}


def _file_type(kinds: dict[str, tuple[str, tuple[int, ...]]]) -> Fields:
    of_layers = {kind for name, (kind, shape) in kinds.items() if len(shape) > 1 and name.startswith("blk.")}
    for most, _ in Counter(kind for kind, shape in kinds.values() if len(shape) > 1).most_common(1):
        number = next((n for (base, more), n in _MIXES.items() if base == most and more in of_layers), None)
        number = _FILE_TYPES.get(most) if number is None else number
        return {} if number is None else {"general.file_type": (UINT32, number)}
    return {}


def _model_fields(checkpoint: Any, names: ModelMap | None, left_out: list[str]) -> tuple[Fields, str]:
    fields: Fields = {
        "general.architecture": (STRING, names.architecture if names else str(checkpoint.config.get("model_type", ""))),
        "general.name": (STRING, checkpoint.path.stem),
        "general.quantized_by": (STRING, "breccia"),
        "general.quantization_version": (UINT32, 2),
    }
    if left_out:
        fields[LEFT_OUT] = (ARRAY, left_out)
    if names is None:
        return fields, ""
    fields |= hyperparameters(checkpoint.config, names.architecture)
    pooling = checkpoint.path / "1_Pooling" / "config.json"
    if names.architecture == "bert" and pooling.is_file():
        said = read_json(pooling)
        for number, key in ((1, "pooling_mode_mean_tokens"), (2, "pooling_mode_cls_token")):
            if said.get(key) is True:
                fields["bert.pooling_type"] = (UINT32, number)
    more, trouble = _tokenizer(checkpoint)
    return fields | more, trouble


def _tokenizer(checkpoint: Any) -> tuple[Fields, str]:
    """What the tokenizer's files say, and what is missing from them."""
    folder = checkpoint.path
    said = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    fields, trouble = Fields(), "there is no tokenizer.json: the file has no tokenizer"
    tokenizer = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
    if tokenizer:
        fields, trouble = tokenizer_fields(tokenizer, checkpoint.config, said)
    if trouble and (folder / "tokenizer.model").is_file():
        raw = read_bounded(folder / "tokenizer.model", MAX_JSON)[0]
        fields, trouble = sentencepiece_fields(raw, tokenizer, checkpoint.config, said)
    if trouble and not tokenizer:
        return {}, trouble
    template = said.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_bounded(folder / "chat_template.jinja", MAX_JSON)[0].decode("utf-8")
    return fields | chat_fields(template), trouble
