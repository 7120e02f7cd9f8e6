# SPDX-License-Identifier: Apache-2.0
"""Write how GGUF spells the modules of models, so that a conversion knows it without transformers and gguf.

    python benchmarks/make_gguf_names.py            # write python/breccia/gguf/names.json
    python benchmarks/make_gguf_names.py --check    # exit 1 where it would change

Modules are those of transformers' classes, as their checkpoints call them, with experts as MLX calls those of a layer
together; their names in GGUF are those of the gguf package. What GGUF keeps as two has the names of the two.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1] / "python" / "breccia" / "gguf" / "names.json"
_CLASSES = {
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "gpt-oss": ("GptOssForCausalLM",),
    "deepseek2": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "bert": ("BertModel",),
}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "pad_token_id": 0,
}
_VARIANTS: dict[str, dict[str, Any]] = {"DeepseekV2ForCausalLM": {"q_lora_rank": None}}  # as V2-Lite is
_EXPERT = re.compile(r"(.*)\.experts\.\{\}\.(\w+)\.weight")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_HALVES = {"kv_b_proj": ("k_b_proj", "v_b_proj"), "experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj")}


def tensors(name: str) -> Iterator[str]:
    """The tensors of a class as its checkpoints call them, with {} for the number of a layer."""
    import torch
    import transformers

    kind = getattr(transformers, name)
    known, loading = kind.config_class().to_dict(), importlib.import_module("transformers.core_model_loading")
    tied = known.get("tie_word_embeddings")
    with torch.device("meta"):
        sizes = {key: value for key, value in _SIZES.items() if key in known} | _VARIANTS.get(name, {})
        model = kind._from_config(kind.config_class(**sizes))
        state: dict[str, Any] = loading.revert_weight_conversion(model, model.state_dict())
    for tensor in state:
        one = re.sub(r"(?<=\.)\d+(?=\.)", "{}", tensor)
        if not one.startswith("pooler.") and not (tied and one.startswith("lm_head.")):
            yield one


def spelled(one: str, gguf_name: Any) -> Iterator[tuple[str, str]]:
    """The names of a tensor, or of the two that GGUF keeps it as, and those that GGUF has for them."""
    for whole, halves in _HALVES.items():
        if whole in one and (whole != "experts.gate_up_proj" or "{}.mlp" in one):
            for half in halves:
                yield from spelled(one.replace(whole, half), gguf_name)
            return
    if match := _EXPERT.fullmatch(one):
        last = _PROJECTIONS.get(match[2], match[2])
        yield f"{match[1]}.switch_mlp.{last}.weight", gguf_name(f"{match[1]}.experts.{match[2]}") + ".weight"
        return
    end = next(end for end in (".weight", ".bias", "_bias", "") if one.endswith(end))
    yield one, gguf_name(one.removesuffix(end)) + (end.replace("_", ".") or ".weight")


def names() -> dict[str, dict[str, dict[str, str]]]:
    """By architecture, modules → modules; and of tensors that are not called as a module's weight or bias, names →
    names."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    modules: dict[str, dict[str, str]] = {}
    others: dict[str, dict[str, str]] = {}
    for architecture, classes in _CLASSES.items():
        known = gguf.get_tensor_name_map(kinds[architecture], 1)

        def gguf_name(stem: str, known: Any = known) -> str:
            return str(known.get_name(stem.replace("{}", "0"))).replace("blk.0.", "blk.{}.")

        for tensor in (tensor for name in classes for tensor in tensors(name)):
            for outside, inside in spelled(tensor, gguf_name):
                module, dot, last = outside.rpartition(".")
                if dot and last in ("weight", "bias"):
                    modules.setdefault(architecture, {})[module] = inside.rpartition(".")[0]
                else:
                    others.setdefault(architecture, {})[outside] = inside
    return {"modules": modules, "tensors": others}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(names(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(PLACE.read_text() != text)
    PLACE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
