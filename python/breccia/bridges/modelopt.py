# SPDX-License-Identifier: Apache-2.0
"""NVIDIA ModelOpt's exported checkpoints: NVFP4, FP8, MXFP8, FP8 tiles and INT4-AWQ.

``weight_scale_2`` multiplies. INT4 is packed along the output axis, the even row in the low nibble. Experts in one
tensor are ``X`` with ``X_weight_scale``; Llama 4's have their inputs before their outputs, in codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import FLOATS, check_axes, float_name, kinds_of
from breccia.bridges.common import Array, as_numpy, codes, get, turned_shape
from breccia.bridges.contract import FileFormat, Place, Readers, stored_name
from breccia.bridges.fp8 import FP8_DTYPES, fp8_format_of, fp8_parts, fp8_recipe, is_of_tensor
from breccia.bridges.packing import code_part, pack_nibbles, packed_codes, scale_part, unpack_nibbles
from breccia.bridges.parts import Found, Part, low_rank_of, materialize, part, rows_only
from breccia.bridges.scales import global_scale, group_size_of, made, of_blocks, row_blocks, scale_name
from breccia.bridges.written import FP8_INPUTS, NVFP4_INPUTS, Dialect, InputScale, Written
from breccia.layouts import Layout, PerBlockMN
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import modelopt as words

NAME = "modelopt"
RECIPES: dict[str, ScalingRecipe] = {
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-channel": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-tensor": recipes.Float8CurrentScaling(),
    "fp8-block": recipes.Float8BlockScaling(block_m=128),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "int4": recipes.INT4Scaling(scale_dtype="fp32"),
}

__all__ = ["from_modelopt", "to_modelopt"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor, see `from_modelopt`, and whether inputs stand before outputs."""

    fp8_format: str | None
    turned: bool = False


def from_modelopt(
    parts: Mapping[str, Any], kind: str | None = None, fp8_format: str | None = None
) -> ScaledTensor | Array:
    """The tensors of one module, by the last part of their names.

    Args:
        parts: ``weight``, ``weight_scale`` and, for NVFP4, ``weight_scale_2``: one number, one for each matrix of a
            batch, or two, of the first and of the other half of the rows (gates and others of experts in one tensor).
        kind: "nvfp4", "fp8", "mxfp8" or "int4"; told from the dtypes if None.
        fp8_format: "E4M3" or "E5M2"; told from the weight's dtype if None, E4M3 where that is of plain bytes.

    Returns:
        A ScaledTensor of the logical shape ``(..., N, K)``; float32 numbers where the halves of rows have other second
        scales.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
    """
    weight = get(parts, "weight", NAME, 1)
    scale = get(parts, "weight_scale", NAME)
    if kind is None:
        if weight.dtype == np.uint8:
            kind = "nvfp4" if scale.dtype.itemsize == 1 else "int4"
        else:
            kind = "mxfp8" if scale.dtype.itemsize == 1 else "fp8"
    if kind == "nvfp4":
        return _nvfp4(weight, scale, np.asarray(get(parts, "weight_scale_2", NAME), np.float32))
    fp8_format = fp8_format_of(weight, fp8_format)
    if kind == "mxfp8":
        return of_blocks(weight, scale, recipes.MXFP8BlockScaling(fp8_format=fp8_format))
    if kind == "int4":
        return _int4(weight, scale)
    recipe8, layout, scale_shape = fp8_recipe(fp8_format, weight.shape, scale.shape, scale.dtype.name)
    return made(codes(weight, "weight"), scale.reshape(scale_shape), recipe8, layout)


def _nvfp4(weight: Array, scale: Array, second: Array) -> ScaledTensor | Array:
    matrices, nvfp4 = weight.shape[:-2], recipes.NVFP4BlockScaling()
    if second.size == 1:
        return of_blocks(weight, scale, nvfp4, second.reshape(()))
    halves = second.reshape(-1, 2).T if second.size == 2 * math.prod(matrices) else second.reshape(1, -1)
    if halves[0].size != math.prod(matrices) or weight.shape[-2] % len(halves):
        raise ValueError(
            f"{NAME}: weight_scale_2 must be one number, or one or two per matrix of {matrices}, "
            f"got shape {second.shape}"
        )
    halves = halves.reshape(len(halves), *matrices, 1, 1)
    if np.array_equal(halves[0], halves[-1]):
        return of_blocks(weight, scale, nvfp4, halves[0])
    rows = zip(np.split(weight, 2, -2), np.split(scale, 2, -2), halves, strict=True)
    return np.concatenate([of_blocks(codes, scales, nvfp4, level).dequantize() for codes, scales, level in rows], -2)


def _int4(weight: Array, scale: Array) -> ScaledTensor:
    if weight.ndim < 2 or scale.ndim == 0:
        raise ValueError(
            f"{NAME}: 'weight' must have at least 2 axes and 'weight_scale' one, "
            f"got shapes {weight.shape}, {scale.shape}"
        )
    rows, columns = weight.shape[-2] * 2, weight.shape[-1]
    by_row = unpack_nibbles(np.swapaxes(weight, -1, -2), rows)
    size = group_size_of(columns, scale.shape[-1], "weight_scale")
    return made(
        pack_nibbles(np.swapaxes(by_row, -1, -2)),
        scale,
        recipes.INT4Scaling(group_size=size, scale_dtype=scale_name(scale.dtype.name)),
        row_blocks(size, columns),
        shape=(*weight.shape[:-2], rows, columns),
    )


def to_modelopt(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_modelopt`.

    Args:
        scaled: NVFP4, MXFP8, FP8 per tensor, row or square tile, or signed INT4 with an even number of rows.

    Returns:
        ``weight``, ``weight_scale`` and, for NVFP4, ``weight_scale_2``, in the dtypes that the file has.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_modelopt`, each tensor made when it is asked for."""
    recipe = scaled.recipe
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        second = global_scale(scaled, "multiplier")
        second = np.ones((), np.float32) if second is None else second
        second = second.reshape(()) if second.size == 1 else second
        return {
            "weight": code_part(scaled),
            "weight_scale": scale_part(scaled, "F8_E4M3"),
            "weight_scale_2": part(second, "F32"),
        }
    if isinstance(recipe, recipes.MXFP8BlockScaling):
        return {"weight": code_part(scaled), "weight_scale": scale_part(scaled)}
    if isinstance(recipe, recipes.INT4Scaling) and recipe.signed:
        rows, columns = scaled.shape[-2:]
        if rows % 2:
            raise ValueError(f"scaled must have an even number of rows for {NAME}'s INT4, got shape {scaled.shape}")

        def packed() -> Array:
            by_row = np.swapaxes(unpack_nibbles(packed_codes(scaled), columns), -1, -2)
            return np.swapaxes(pack_nibbles(by_row), -1, -2)

        return {
            "weight": Part("U8", (*scaled.shape[:-2], rows // 2, columns), packed),
            "weight_scale": scale_part(scaled),
        }
    if carries(recipe) and as_numpy(scaled.scale, "scale").dtype.itemsize > 1:
        return fp8_parts(scaled)
    raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")


def lay_out_for_checkpoint(scaled: ScaledTensor, place: Place) -> dict[str, Part]:
    """As `lay_out`; tiles' scales in four axes as ModelOpt exports them, and a tensor's own scale for each row where
    there are no scales of activations (inputs): servers have no FP8 of weights in one scale alone."""
    parts = lay_out(scaled)
    scale = parts["weight_scale"]
    if len(scaled.shape) == 3:
        return _experts(scaled, parts, _is_llama4(place.model))
    if isinstance(scaled.recipe, recipes.Float8BlockScaling) and len(scale.shape) == 2:
        rows, columns = scale.shape
        parts["weight_scale"] = Part(
            scale.dtype, (rows, 1, columns, 1), lambda: scale.make().reshape(rows, 1, columns, 1)
        )
    elif scaled.layout.one_scale and not place.inputs:
        every = scaled.shape[:-1]
        parts["weight_scale"] = Part(scale.dtype, every, lambda: np.full(every, scale.make().reshape(())))
    return parts


def _experts(scaled: ScaledTensor, parts: dict[str, Part], turned: bool) -> dict[str, Part]:
    """Experts in one tensor: as Llama 4's programs load them, or with a second scale of each."""
    second = parts.get("weight_scale_2")
    if turned and second is None and not scaled.layout.one_scale:
        raise ValueError(f"scaled must be NVFP4, or FP8 of one scale, in experts of Llama 4, got {scaled.recipe}")
    if second is not None and (second.shape or not turned):
        parts["weight_scale_2"] = part(np.resize(second.make(), len(scaled)), "F32")
    return {role: _turned(one) if turned and len(one.shape) == 3 else one for role, one in parts.items()}


def _turned(one: Part) -> Part:
    return Part(one.dtype, turned_shape(one.shape), lambda: np.ascontiguousarray(np.swapaxes(one.make(), -1, -2)))


def _is_llama4(model: Mapping[str, Any]) -> bool:
    return not {"llama4", "llama4_text"}.isdisjoint(kinds_of(model))


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.scale_format != "e8m0" and recipe.block_m == recipe.block_k
    if isinstance(recipe, recipes.INT4Scaling):
        return recipe.signed
    return recipe.name in ("nvfp4", "mxfp8", "current", "delayed")


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix = name.removesuffix("weight_scale")
    weight, scale = entries.get(prefix + "weight"), entries[name]
    turned = False
    if weight is None and prefix.endswith("_proj_"):  # experts in one tensor
        weight = entries.get(prefix[:-1])
        if weight is None or len(weight.shape) != 3:
            return None
        ten = scale.shape[-1:] == weight.shape[-1:] and scale.shape[-2] * 8 == weight.shape[-2]
        turned = ten if weight.dtype == "U8" else _is_llama4(context["config"])
    if weight is None or len(weight.shape) < 2:
        return None
    if turned:
        weight, scale = (
            SimpleNamespace(name=o.name, dtype=o.dtype, shape=turned_shape(o.shape)) for o in (weight, scale)
        )
    parts = {"weight": weight.name, "weight_scale": name}
    findings: list[str] = []
    form: tuple[str, tuple[int, ...], ScalingRecipe, Layout, str]
    fp8 = FP8_DTYPES.get(weight.dtype, "")
    parts |= zip(("down", "up"), low_rank_of(prefix, entries), strict=False)
    if prefix + "pre_quant_scale" in entries:
        findings.append("pre_quant_scale multiplies the layer's input: it stays a tensor of its own")
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        if prefix + "weight_scale_2" not in entries:
            return None
        parts["weight_scale_2"] = parts["global_scale"] = prefix + "weight_scale_2"
        if scale.shape != (*shape[:-1], shape[-1] // 16):
            findings.append(f"weight_scale {scale.shape} is not (..., N, K / 16): tiled (swizzled) scales?")
        form = "nvfp4", shape, recipes.NVFP4BlockScaling(), PerBlockMN(1, 16), "uint8"
    elif context.get("quant_method") != NAME:  # whose names others have, too
        return None
    elif weight.dtype == "U8" and scale.dtype in FLOATS:
        check_axes(1, scale)
        shape = (*weight.shape[:-2], weight.shape[-2] * 2, weight.shape[-1])
        size = group_size_of(shape[-1], scale.shape[-1], name)
        int4 = recipes.INT4Scaling(group_size=size, scale_dtype=scale_name(float_name(scale)))
        second = prefix + "weight_scale_2"  # how W4A8's programs split the scales, whose product with 1 / it they take
        parts |= {"weight_scale_2": second} if second in entries else {}
        form = "int4", shape, int4, row_blocks(size, shape[-1]), float_name(scale)
    elif weight.dtype not in FP8_DTYPES:
        return None
    elif scale.dtype in ("U8", "F8_E8M0"):
        form = "mxfp8", weight.shape, recipes.MXFP8BlockScaling(fp8_format=fp8), PerBlockMN(1, 32), "uint8"
    else:
        recipe8, layout, _ = fp8_recipe(fp8, weight.shape, scale.shape, float_name(scale))
        form = "fp8", weight.shape, recipe8, layout, float_name(scale)
    kind, shape, recipe, layout, dtype = form
    one = kind != "nvfp4" or math.prod(entries[parts["weight_scale_2"]].shape) == 1
    level = () if one else (*shape[:-2], 1, 1)
    details, said = Details(fp8 or None, turned), tuple(findings)
    return Found(weight.name, NAME, kind, parts, shape, recipe, layout, dtype, "", level, "", details, findings=said)


def refine(found: Found, array: Callable[[str], Array]) -> Found:
    """Experts in one tensor whose halves of rows have second scales of their own, which no recipe says."""
    if len(found.shape) != 3 or found.kind != "nvfp4":
        return found
    second = array(found.parts["weight_scale_2"])
    alike = second.size <= found.shape[0] or np.array_equal(*second.reshape(-1, 2).T)
    return found if alike else replace(found, recipe=None, layout=None)


def _keeps(found: Found) -> bool:
    split = len(found.shape) == 3 and found.recipe is None  # second scales of halves
    return split or "down" in found.parts or (found.kind == "int4" and "weight_scale_2" in found.parts)


def _read(parts: Mapping[str, Array], found: Found) -> ScaledTensor | Array:
    details = found.record(Details)
    if details.turned:
        parts = {
            role: np.ascontiguousarray(np.swapaxes(one, -1, -2)) if one.ndim == 3 else one
            for role, one in parts.items()
        }
    return from_modelopt(parts, found.kind, details.fp8_format)


def role_name(name: str, role: str) -> str:
    """Where a role of a logical tensor is stored: of experts in one tensor ``X`` as ``X`` and ``X_weight_scale``."""
    if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
        return stored_name(name, role)
    return name if role == "weight" else f"{name}_{role}"


def config(written: Written) -> dict[str, Any]:
    """What config.json and hf_quant_config.json say of a checkpoint written here.

    A server takes "NVFP4" and "FP8" for formats of weights and activations, and reads an ``input_scale`` that is not
    there: modules without one have other names.
    """
    algorithms = {m: _algorithm(recipe, m in written.inputs) for m, recipe in written.recipes.items()}
    algorithms |= {m: _of_kept(m, written.original.get("quantization_config") or {}) for m in sorted(written.kept)}
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for module, algorithm in algorithms.items():
        kinds.setdefault(tuple(algorithm.items()), []).append(module)
    groups = [(dict(kind), modules) for kind, modules in kinds.items()]
    said = groups[0][0] if len(groups) == 1 else {"quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    ignored = [*written.ignored, *(one.pattern for one in written.patterns if one.kind == "glob")]
    producer = {"name": "modelopt", "version": "0.47.0"}
    kept = next((name for name, one in words.CACHES.items() if one == written.cache), None)
    quantization = {
        **said,
        "kv_cache_quant_algo": kept,
        "exclude_modules": ignored,
    }
    cache = {} if kept is None else {"kv_cache_scheme": _FP8_CACHE if kept == "FP8" else kept}
    return {
        "quantization_config": {
            "quant_method": "modelopt",
            "producer": producer,
            **said,
            "config_groups": {
                f"group_{i}": {**_group(kind), "targets": ["Linear"] if len(groups) == 1 else sorted(modules)}
                for i, (kind, modules) in enumerate(groups)
            },
            "ignore": ignored,
            **cache,
        },
        "hf_quant_config": {"producer": producer, "quantization": quantization},
    }


_FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


def of_file(said: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint whose config.json has none, of its hf_quant_config.json."""
    quantization = said.get("quantization")
    return {"quant_method": NAME, **(quantization if isinstance(quantization, dict) else {})}


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs that "NVFP4" and "FP8" mean; algorithms named W4A8 have inputs of another format than their
    weights, and FP8 by rows has none."""
    if "W4A8" in f"{said.get('quant_algo')} {said.get('quantized_layers')}":
        return None
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return InputScale("input_scale", NVFP4_INPUTS)
    return InputScale("input_scale", FP8_INPUTS) if is_of_tensor(recipe) else None


def _of_kept(module: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the source says of a module whose tensors stay as they are."""
    layers = said.get("quantized_layers")
    own = layers.get(module, said) if isinstance(layers, dict) else said
    keys = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "lora_rank")
    return {key: own[key] for key in keys if own.get(key) is not None}


def _algorithm(recipe: ScalingRecipe, inputs: bool) -> dict[str, Any]:
    match recipe:
        case recipes.NVFP4BlockScaling():
            return {"quant_algo": "NVFP4" if inputs else "W4A16_NVFP4", "group_size": 16}
        case recipes.MXFP8BlockScaling():
            return {"quant_algo": "MXFP8", "group_size": 32}
        case recipes.INT4Scaling():
            return {"quant_algo": "W4A16_AWQ", "group_size": recipe.group_size, "has_zero_point": False}
        case recipes.Float8BlockScaling():
            return {"quant_algo": "FP8_PB_WO", "group_size": recipe.block_k}
        case _:
            return {"quant_algo": "FP8" if inputs and is_of_tensor(recipe) else "FP8_PER_CHANNEL_PER_TOKEN"}


def _group(kind: dict[str, Any]) -> dict[str, Any]:
    """A group of modules in compressed-tensors' words, which ModelOpt repeats."""
    algorithm = kind["quant_algo"]
    bits, number = (4, "int") if algorithm == "W4A16_AWQ" else (4 if "NVFP4" in algorithm else 8, "float")
    weights = {"dynamic": False, "num_bits": bits, "type": number}
    size = {"group_size": kind["group_size"]} if "group_size" in kind else {}
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        weights["strategy"] = "channel"
    if algorithm in ("W4A16_AWQ", "W4A16_NVFP4", "FP8_PB_WO"):
        return {"weights": weights | size}
    if algorithm == "W4A8_AWQ":
        four = {"dynamic": False, "num_bits": 4, "type": "int"} | size
        return {"weights": four, "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"}}
    inputs = {"dynamic": False, "num_bits": bits, "type": "float"}
    return {"input_activations": inputs | size, "weights": weights | size}


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers with breccia"),
    refused={"int4": ("vLLM",)},  # knows none of ModelOpt's algorithms for integers, 0.32
    recipes=RECIPES,
    recipes_with_inputs={"fp8": RECIPES["fp8-tensor"]},
    anchors=("weight_scale",),
    input_scales=True,
    input_scale=input_scale,
    cache_scales={which: (f"{{}}.{which}_proj.{which}_scale", ()) for which in "kv"},
    caches=tuple(words.CACHES.values()),
    readers=Readers(
        pre_scales=True,
        shared_global_scale=True,
        turned_experts=_is_llama4,
    ),
    find=find,
    row_axis=0,
    refine=refine,
    keeps=_keeps,
    read=_read,
    carries=carries,
    lay_out=lay_out_for_checkpoint,
    role_name=role_name,
    dialect=Dialect(("modelopt_fp4",), words.scheme, config, file="hf_quant_config", of_file=of_file, **words.SAID),
)
