# SPDX-License-Identifier: Apache-2.0
"""GGUF files as the container of a checkpoint: what is written to one beside the tensors, and what one says of its
model, as files that transformers reads: config.json and the tokenizer's. transformers itself knows how one follows from
the other."""

from __future__ import annotations

import importlib
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.file_kinds import Output
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import JoinedFiles, read_bounded
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.reading.folder import MAX_JSON, read_json
from breccia.gguf.container import LEFT_OUT, GgufFile, GgufWriter, block_type
from breccia.gguf.models import ModelMap, model_map
from breccia.gguf.parameters import OWN, config_fields, gemma_scale, hyperparameters
from breccia.gguf.rope import ROPE_FACTORS, ROPE_TENSORS, llama3_of, longrope_of, rope_of_fields, rope_tensors
from breccia.gguf.tokenizer import chat_fields, sentencepiece_fields, tokenizer_fields
from breccia.gguf.types import ARRAY, STRING, UINT32, Fields, number, whole
from breccia.peers import require

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


# What no config.json can do without, and transformers' names of architectures that are not the file's own.
_SIZES = frozenset({"num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"})
_MAPPED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
_HERE = {"local_files_only": True, "trust_remote_code": False}  # a folder of the file may ask for code
_OWN = ("_name_or_path", "_model_name_or_path", "transformers_version")  # of whoever loads it


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in a GGUF file. Raises ImportError where transformers or gguf is not installed,
    ValueError where transformers does not know the model, or a field is not what it must be."""
    try:
        made = _config(file)
        json.dumps(made, allow_nan=False)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{file.path}: {error}") from error
    return made


def _config(file: GgufFile) -> dict[str, Any]:
    transformers = _transformers()
    architecture = str(file.fields.get("general.architecture", (0, ""))[1])
    at = f"{architecture}.attention"
    layers = whole(file.fields, f"{architecture}.block_count", 0)
    if layers > len(file.entries):  # of each of which transformers makes a list
        raise ValueError(
            f"{architecture}.block_count must be at most {len(file.entries)}, as many tensors as there are"
        )
    _check_sizes(file, architecture)
    if architecture in OWN:
        config = _own(file, architecture)
    else:
        config = _read(lambda: transformers.AutoConfig.from_pretrained(**_of(file.path)), "model")
    made: dict[str, Any] = json.loads(config.to_json_string())
    made = {key: value for key, value in made.items() if key not in _OWN}
    if "head_dim" in made and architecture not in OWN:  # which transformers takes for some models alone
        made["head_dim"] = whole(file.fields, f"{at}.key_length", made["head_dim"])
    if "sliding_window" in made and f"{at}.sliding_window" in file.fields:
        made["sliding_window"] = whole(file.fields, f"{at}.sliding_window")
    if isinstance(file.file, JoinedFiles):  # of which transformers looks for the output layer in the first
        made["tie_word_embeddings"] = "output.weight" not in file.entries
    if isinstance(made.get("pad_token_id"), int) and made["pad_token_id"] >= made["vocab_size"]:
        made["pad_token_id"] = None  # a default of the model's class, for its own vocabulary
    if architecture.startswith("gemma"):
        made = _of_gemma(made, file, architecture)
    made = _with_experts(made, file, architecture)
    if "rope_parameters" in made:
        made = _with_rope(made, file, architecture)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if made["model_type"] in names:
        made["architectures"] = [names[made["model_type"]]]
    return made


def _check_sizes(file: GgufFile, architecture: str) -> None:
    """Whether the file says how large its model is: transformers takes its own defaults for what is missing."""
    known = importlib.import_module("transformers.integrations.ggml").GGUF_CONFIG_MAPPING
    names = known.get(architecture.replace("-", "_"), known.get(_MAPPED.get(architecture, ""), {}))
    keys = [f"{architecture}.{key}" for key, name in names.items() if name in _SIZES]
    missing = [key for key in keys if key not in file.fields]
    if missing:
        raise ValueError(f"{missing[0]} must be there, above 0: without it config.json would be of another model")


def _of_gemma(made: dict[str, Any], file: GgufFile, architecture: str) -> dict[str, Any]:
    """What transformers has defaults for instead: caps of logits and the scale of attention."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        made[key] = number(file.fields, f"{architecture}.{key}")
    made["query_pre_attn_scalar"] = gemma_scale(architecture, made)
    return made


def _with_experts(made: dict[str, Any], file: GgufFile, architecture: str) -> dict[str, Any]:
    """What transformers does not take: the size of an expert, and that a Llama with experts is a Mixtral."""
    if "moe_intermediate_size" in made:
        inner = whole(file.fields, f"{architecture}.expert_feed_forward_length", made["moe_intermediate_size"])
        made["moe_intermediate_size"] = inner
    count = whole(file.fields, f"{architecture}.expert_count")
    if architecture != "llama" or count is None:
        return made
    more = {"num_local_experts": count}
    more["num_experts_per_tok"] = whole(file.fields, f"{architecture}.expert_used_count", 2)
    own = {key: value for key, value in made.items() if key not in ("model_type", "architectures")}
    config = _read(lambda: _transformers().MixtralConfig(**own, **more), "model")
    return {key: value for key, value in json.loads(config.to_json_string()).items() if key not in _OWN}


def _with_rope(made: dict[str, Any], file: GgufFile, architecture: str) -> dict[str, Any]:
    """RoPE and its scaling, of which transformers reads the base alone."""
    tensors = {}
    for name in sorted(ROPE_TENSORS & file.entries.keys()):
        if file.kinds[name] != "F32":
            raise ValueError(f"{name} must be F32, it is {file.kinds[name]}")
        tensors[name] = file.raw(name).view("<f4")
    rope = rope_of_fields(file.fields, architecture, made)
    if ROPE_FACTORS in tensors:
        rope = llama3_of(tensors[ROPE_FACTORS], {**made, "rope_parameters": rope})
    elif tensors or file.fields.get(f"{architecture}.rope.scaling.type", (0, ""))[1] == "longrope":
        rope = longrope_of(tensors, file.fields, architecture, made, rope)
    if "original_max_position_embeddings" in made and "original_max_position_embeddings" in rope:
        made = {**made, "original_max_position_embeddings": rope["original_max_position_embeddings"]}
    if architecture == "gemma3":  # whose layers that see a window have their own
        rope = {**made["rope_parameters"], "full_attention": rope}
    return {**made, "rope_parameters": rope}


def _own(file: GgufFile, architecture: str) -> Any:
    """The config of a model that transformers' reader of GGUF does not know, or trips over."""
    kind, said = config_fields(file.fields, architecture)
    for name in ("bos", "eos"):
        said[f"{name}_token_id"] = file.fields.get(f"tokenizer.ggml.{name}_token_id", (0, None))[1]
    embeddings = file.shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise ValueError("tensor 'token_embd.weight' must be there, with 2 axes")
    said["vocab_size"] = embeddings[0]
    said["tie_word_embeddings"] = "output.weight" not in file.shapes
    return _read(lambda: getattr(_transformers(), kind)(**said), "model")


def write_tokenizer(path: Path, folder: Path) -> str:
    """Write the files of a GGUF file's tokenizer; why there are none, empty where there are."""
    try:
        made = _read(lambda: _transformers().AutoTokenizer.from_pretrained(**_of(path)), "tokenizer")
    except ValueError as error:
        return f"there are no files of a tokenizer: {path}: {error}"
    with tempfile.TemporaryDirectory() as place:
        made.save_pretrained(place)
        for file in sorted(Path(place).iterdir()):
            disk.copy_file(file, folder / file.name)
    return ""


def _transformers() -> Any:
    require("gguf", "gguf")
    return require("transformers", "transformers")


def _of(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, **_HERE}


def _read(read: Callable[[], Any], what: str) -> Any:
    """What transformers makes of the file; its errors and those of its readers as ValueErrors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"transformers makes no {what} of it: {first}") from error
