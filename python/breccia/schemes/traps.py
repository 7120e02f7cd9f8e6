# SPDX-License-Identifier: Apache-2.0
"""What programs do with a complete checkpoint that its configuration leads astray: scales that are said and are not
there, which they take for any number, and declarations that one of them refuses or takes for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from breccia.schemes.value import Activations, KVCache, ModelScheme

if TYPE_CHECKING:
    from breccia.checkpoint.reading.source import Checkpoint

# Algorithms of ModelOpt that these programs do not know, as vLLM 0.33 and SGLang 0.5.23 list them.
_NOT_VLLM = {"W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ", "NVFP4_SVD", "W8A8_SQ_PER_CHANNEL", "W8A16", "MXFP4"}
_NOT_VLLM |= {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}
_NOT_SGLANG = {"FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"}
_METHODS = ("compressed-tensors", "modelopt", "fp8")


def scales(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Names of modules whose configuration and tensors do not say one thing, for which programs answer nonsense, and
    what is wrong."""
    scheme = checkpoint.scheme_or_none
    if scheme is None or checkpoint.quantization.get("quant_method") not in _METHODS:
        return []
    modules = [one.name.removesuffix(".weight") for one in checkpoint.found if one.format != "plain"]
    return [*_inputs(scheme, modules), *_caches(scheme), *_unquantized(scheme, modules)]


def _inputs(scheme: ModelScheme, modules: list[str]) -> Iterator[tuple[str, str]]:
    there = {one.module for one in scheme.scales if one.of == "input"}
    for module in modules:
        rule = scheme.rule(module)
        inputs = None if rule is None else rule.inputs
        if isinstance(inputs, Activations) and inputs.when != "dynamic" and module not in there:
            taken = "memory that was never written" if inputs.when == "local" else "-3.4e38"
            yield module, f"the scale of its inputs is missing, {inputs}: vLLM and SGLang take {taken}"


def _caches(scheme: ModelScheme) -> Iterator[tuple[str, str]]:
    kinds: dict[str, set[str]] = {}
    for one in scheme.scales:
        if one.of in ("k", "v"):
            kinds.setdefault(one.module, set()).add(one.of)
    for module, there in kinds.items():
        if scheme.kv_cache is None:
            yield module, "scales of keys and values are there, and config.json says of no quantized cache"
        elif isinstance(scheme.kv_cache, KVCache) and len(there) == 1:
            which = "keys" if there == {"k"} else "values"
            yield module, f"only the scale of {which} is there: vLLM takes it for both"


def _unquantized(scheme: ModelScheme, modules: list[str]) -> Iterator[tuple[str, str]]:
    for module in modules:
        rule = scheme.rule(module, ("Linear", "Embedding"))
        if rule is None or rule.weights is None:
            yield module, "it is quantized, and config.json says that it is not: programs take its codes for weights"


def readers(checkpoint: Checkpoint) -> list[str]:
    """What single programs refuse, or take for something else, though the checkpoint is whole."""
    said = checkpoint.quantization
    method = said.get("quant_method")
    if method == "modelopt":
        return list(_of_modelopt(said, checkpoint))
    return list(_of_compressed_tensors(said)) if method == "compressed-tensors" else []


def _of_modelopt(said: dict[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    layers = said.get("quantized_layers")
    if str(said.get("quant_algo")).upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        algorithms = {str(one.get("quant_algo")) for one in layers.values() if isinstance(one, dict)}
        if not any("NVFP4" in one for one in algorithms):
            yield "SGLang takes MIXED_PRECISION without a layer in NVFP4 for w4afp8"
        for algorithm in sorted(algorithms & _NOT_VLLM):
            yield f"vLLM refuses {algorithm}"
    top = str(said.get("quant_algo")).upper()
    if top in _NOT_VLLM:
        yield f"vLLM refuses {top}"
    if top in _NOT_SGLANG:
        yield f"SGLang refuses {top}"
    excluded = said.get("exclude_modules", said.get("ignore", []))
    if excluded is None:
        yield "vLLM refuses ignore: null: it must be a list"
        return
    modules = [one.name.removesuffix(".weight") for one in checkpoint.found if one.format != "plain"]
    for name in excluded if isinstance(excluded, list) else ():
        inside = [one for one in modules if str(name) in one and one != name]
        if "*" not in str(name) and inside:
            yield f"vLLM leaves out every layer that has {name} in its name, {inside[0]} too"


def _of_compressed_tensors(said: dict[str, Any]) -> Iterator[str]:
    groups = said.get("config_groups")
    groups = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    targets = [str(name) for one in groups for name in one.get("targets") or ()]
    classes = [name for name in targets if name[:1].isupper() and "." not in name]
    if len(groups) > 1 and classes:
        yield f"TensorRT-LLM refuses groups by a class ({classes[0]}) where there are several"
    for group in groups:
        yield from _of_group(group, str(group.get("format") or said.get("format")))
    if said.get("ignore", []) is None:
        yield "vLLM refuses ignore: null: it must be a list"
    cache = said.get("kv_cache_scheme")
    if isinstance(cache, dict) and not cache.get("strategy"):
        yield "vLLM refuses a kv_cache_scheme without strategy"
    if isinstance(cache, dict) and cache.get("dynamic"):
        yield "vLLM takes 1 for the scales of a dynamic KV cache"


def _of_group(group: dict[str, Any], form: str) -> Iterator[str]:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None and (targets := group.get("targets")):
        yield f"vLLM skips a group without weights ({', '.join(map(str, targets))}): attention is not quantized by it"
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return
    if form == "nvfp4-pack-quantized" and inputs.get("dynamic") != "local":
        yield "vLLM refuses NVFP4 whose inputs are quantized to anything but NVFP4 local"
    if form == "pack-quantized":
        yield "vLLM and SGLang refuse packed integers whose inputs are quantized"
