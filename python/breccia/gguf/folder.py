# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of its model beside the weights, as files that transformers reads: config.json and the
tokenizer's. transformers itself knows how one follows from the other."""

from __future__ import annotations

import importlib
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import JoinedFiles
from breccia.gguf.container import GgufFile
from breccia.gguf.parameters import OWN, config_fields, gemma_scale
from breccia.gguf.rope import ROPE_FACTORS, ROPE_TENSORS, llama3_of, longrope_of, rope_of_fields
from breccia.gguf.types import number, whole
from breccia.peers import require

__all__ = ["config_of", "write_tokenizer"]

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
