# SPDX-License-Identifier: Apache-2.0
"""Formats of weights alone, most of them integers: GPTQ, AWQ, auto-round, bitsandbytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia.bridges.checks import mapping, number
from breccia.recipes import INT4Scaling, INT8Scaling, ScalingRecipe
from breccia.schemes.dialects.common import LINEAR, Said, names, skipped
from breccia.schemes.matching import Match
from breccia.schemes.value import Activations, ModelScheme, Rule

SAID: dict[str, Any] = {
    "words": "quant_method method bits w_bit group_size q_group_size sym zero_point desc_act dynamic lm_head "
    "checkpoint_format format version modules_to_not_convert modules_in_block_to_quantize extra_config data_type "
    "act_bits act_group_size act_sym act_data_type act_dynamic packing_format block_name_to_quantize load_in_8bit "
    "_load_in_8bit load_in_4bit _load_in_4bit bnb_4bit_quant_type llm_int8_skip_modules llm_int8_threshold meta "
    "quantizer uri damp_percent damp_auto_increment true_sequential static_groups act_group_aware mse fallback "
    "model_name_or_path model_file_base_name model_seqlen module_name_preceding_first_block tokenizer dataset "
    "batch_size pad_token_id max_input_length cache_block_outputs backend pack_dtype pack_impl offload_to_disk "
    "offload_to_disk_path use_exllama disable_exllama exllama_config use_cuda_fp16 do_fuse fuse_max_seq_len "
    "modules_to_fuse autoround_version iters lr minmax_lr nsamples seqlen seed amp gradient_accumulate_steps "
    "low_gpu_mem_usage low_cpu_mem_usage enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning "
    "enable_torch_compile not_use_best_mse dynamic_max_gap scale_dtype quant_block_list to_quant_block_names "
    "supported_types provider model_dtype super_bits super_group_size bnb_4bit_compute_dtype "
    "bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight",
    "names": ("dynamic", "extra_config"),
    "closed": ("exllama_config", "fallback", "meta", "modules_to_fuse"),
}


def scheme(said: Said) -> ModelScheme:
    """The scheme that ``quantization_config`` describes."""
    told, method = said.quantization, str(said.quantization.get("quant_method"))
    rules = {"gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "bitsandbytes": _bitsandbytes}[method](told)
    return ModelScheme(tuple(rules), None, (), method, json.dumps(dict(told)))


def integers(bits: Any, size: Any, symmetric: bool, what: str) -> ScalingRecipe | str:
    """A recipe of so many bits; a format's name where none makes it. A group of -1 is a whole row."""
    bits = number(bits, f"{what}: bits")
    if bits == 4 and type(size) is int and size > 0:
        return INT4Scaling(group_size=size, symmetric=symmetric, signed=symmetric)
    if bits == 8:
        group = size if type(size) is int and size > 0 else None
        return INT8Scaling(group_size=group, symmetric=symmetric)
    return f"INT{bits} g{size}"


def _gptq(told: Mapping[str, Any]) -> list[Rule]:
    every = {"bits": told.get("bits", 4), "group_size": told.get("group_size", 128), "sym": told.get("sym", True)}
    rules: list[Rule] = []
    for pattern, other in mapping(told.get("dynamic") or {}, "gptq: dynamic").items():
        match = (Match("regex-start", pattern.removeprefix("-:").removeprefix("+:")),)
        if pattern.startswith("-:"):
            rules.append(Rule(match, None, None))
        else:
            rules.append(Rule(match, _gptq_weights({**every, **mapping(other, "gptq: dynamic")}), None))
    if not told.get("lm_head"):
        rules.append(Rule((Match("name", "lm_head"),), None, None))
    return [*rules, Rule(LINEAR, _gptq_weights(every), None)]


def _gptq_weights(said: Mapping[str, Any]) -> ScalingRecipe | str:
    return integers(said["bits"], said["group_size"], said["sym"] is not False, "gptq")


def _awq(told: Mapping[str, Any]) -> list[Rule]:
    left = names(told.get("modules_to_not_convert"), "awq: modules_to_not_convert")
    size = told.get("group_size", told.get("q_group_size", 128))
    weights = integers(told.get("bits", told.get("w_bit", 4)), size, told.get("zero_point") is False, "awq")
    return [*skipped(Match("contains", one) for one in left), Rule(LINEAR, weights, None)]


def _auto_round(told: Mapping[str, Any]) -> list[Rule]:
    """Names, then ends of names, then expressions where they have special characters; 16 bits are none."""
    rules: list[Rule] = []
    extra = mapping(told.get("extra_config") or {}, "auto-round: extra_config")
    for name, other in sorted(extra.items(), key=lambda one: any(c in one[0] for c in "*+?^$()[]|\\")):
        special = any(c in name for c in "*+?^$()[]|\\")
        match = Match("regex-search", name) if special else Match("glob", f"*{name}")
        matches = (match,) if special else (Match("name", name), match)
        rules.append(Rule(matches, *_auto_round_part({**told, **mapping(other, "auto-round: extra_config")})))
    return [*rules, Rule(LINEAR, *_auto_round_part(told))]


def _auto_round_part(part: Mapping[str, Any]) -> tuple[ScalingRecipe | str | None, Activations | None]:
    bits, act = number(part.get("bits", 4), "auto-round: bits"), number(part.get("act_bits") or 16, "act_bits")
    if bits >= 16:
        return None, None
    kind = str(part.get("data_type", "int"))
    sym, size = part.get("sym", True) is not False, part.get("group_size", 128)
    weights = integers(bits, size, sym, "auto-round") if kind == "int" else f"{kind}{bits}"
    if act >= 16:
        return weights, None
    element = f"int{act}" if "int" in str(part.get("act_data_type", "int")) else f"float{act}"
    group = part.get("act_group_size")
    per = "group" if isinstance(group, int) and group > 0 else "tensor" if group == 0 else "token"
    when = "dynamic" if part.get("act_dynamic", True) else "static"
    symmetric = part.get("act_sym", True) is not False
    return weights, Activations(element, per, when, group if per == "group" else None, symmetric)


def _bitsandbytes(told: Mapping[str, Any]) -> list[Rule]:
    left = names(told.get("llm_int8_skip_modules"), "bitsandbytes: llm_int8_skip_modules")
    rules = skipped(Match("contains", one) for one in left)
    if told.get("load_in_8bit") or told.get("_load_in_8bit"):
        return [*rules, Rule(LINEAR, INT8Scaling(), Activations("int8", "token", "dynamic"))]
    return [*rules, Rule(LINEAR, str(told.get("bnb_4bit_quant_type", "fp4")).upper(), None)]
