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
from breccia.checkpoint.files.gguf_parameters import ROPE_FACTORS, gemma_scale, llama3_of
from breccia.peers import require

__all__ = ["config_of", "write_tokenizer"]

_OWN = ("_name_or_path", "_model_name_or_path", "transformers_version")  # of whoever loads it


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in a GGUF file.

    Raises:
        ImportError: transformers or gguf is not installed; the message names the extra.
        ValueError: transformers does not know the model.
    """
    transformers = _transformers()
    config = _read(transformers.AutoConfig, file.path, "model")
    made: dict[str, Any] = json.loads(config.to_json_string())
    made = {key: value for key, value in made.items() if key not in _OWN}
    _, architecture = file.fields.get("general.architecture", (0, ""))
    width = file.fields.get(f"{architecture}.attention.key_length")
    if width is not None and "head_dim" in made:  # which transformers takes for some models alone
        made["head_dim"] = width[1]
    window = file.fields.get(f"{architecture}.attention.sliding_window")
    if window is not None and "sliding_window" in made:
        made["sliding_window"] = window[1]
    if isinstance(made.get("pad_token_id"), int) and made["pad_token_id"] >= made["vocab_size"]:
        made["pad_token_id"] = None  # a default of the model's class, for its own vocabulary
    if str(architecture).startswith("gemma"):
        made = _of_gemma(made, file, str(architecture))
    made = _with_experts(made, file, str(architecture))
    made = _with_factors(made, file)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if made["model_type"] in names:
        made["architectures"] = [names[made["model_type"]]]
    return made


def _of_gemma(made: dict[str, Any], file: GgufFile, architecture: str) -> dict[str, Any]:
    """What transformers has defaults for instead: caps of logits, the scale of attention, RoPE of layers that see
    all."""
    said = {key.removeprefix(f"{architecture}."): value for key, (_, value) in file.fields.items()}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        made[key] = said.get(key)
    made["query_pre_attn_scalar"] = gemma_scale(architecture, made)
    if architecture == "gemma3" and "rope.freq_base" in said:
        scaling = {"rope_type": "default", "rope_theta": said["rope.freq_base"]}
        if said.get("rope.scaling.type") == "linear":
            scaling |= {"rope_type": "linear", "factor": said["rope.scaling.factor"]}
        made["rope_parameters"] = {**made["rope_parameters"], "full_attention": scaling}
    return made


def _with_experts(made: dict[str, Any], file: GgufFile, architecture: str) -> dict[str, Any]:
    """What transformers does not take: the size of an expert, and that a Llama with experts is a Mixtral."""
    inner = file.fields.get(f"{architecture}.expert_feed_forward_length")
    if inner is not None and "moe_intermediate_size" in made:
        made["moe_intermediate_size"] = inner[1]
    count = file.fields.get(f"{architecture}.expert_count")
    if architecture != "llama" or count is None or not count[1]:
        return made
    used = file.fields.get(f"{architecture}.expert_used_count", (0, 2))
    more = {"num_local_experts": count[1], "num_experts_per_tok": used[1]}
    own = {key: value for key, value in made.items() if key not in ("model_type", "architectures")}
    mixtral = json.loads(_transformers().MixtralConfig(**own, **more).to_json_string())
    return {key: value for key, value in mixtral.items() if key not in _OWN}


def _with_factors(made: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Llama 3's scaling of RoPE, which the file has as a tensor."""
    if ROPE_FACTORS not in file.entries:
        return made
    if file.kinds[ROPE_FACTORS] != "F32":
        raise ValueError(f"{file.path}: {ROPE_FACTORS} must be F32, it is {file.kinds[ROPE_FACTORS]}")
    try:
        return {**made, "rope_parameters": llama3_of(file.raw(ROPE_FACTORS).view("<f4"), made)}
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def write_tokenizer(path: Path, folder: Path) -> str:
    """Write the files of a GGUF file's tokenizer.

    Returns:
        Why there are none, empty where there are.
    """
    try:
        made = _read(_transformers().AutoTokenizer, path, "tokenizer")
    except ValueError as error:
        return f"there are no files of a tokenizer: {error}"
    with tempfile.TemporaryDirectory() as place:
        made.save_pretrained(place)
        for file in sorted(Path(place).iterdir()):
            disk.copy_file(file, folder / file.name)
    return ""


def _transformers() -> Any:
    require("gguf", "gguf")
    return require("transformers", "transformers")


def _read(kind: Any, path: Path, what: str) -> Any:
    """What a class of transformers makes of the file; its errors and those of its readers as ValueErrors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{path}: transformers makes no {what} of it: {first}") from error
