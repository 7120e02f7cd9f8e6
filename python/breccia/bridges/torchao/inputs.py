# SPDX-License-Identifier: Apache-2.0
"""How torchao says that a layer's inputs are quantized: in the attributes of its weight's tensor
(``act_quant_kwargs``), in static scales beside it, and in its configurations, as torchao 0.18 writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from breccia import recipes
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import inputs_for
from breccia.schemes.rules import MXFP4_DYNAMIC, MXFP8_DYNAMIC, NVFP4_DYNAMIC, NVFP4_LOCAL, Activations

# Roles of stored tensors that are static scales of inputs, by the class of the weight's tensor.
STATIC = {"NVFP4Tensor": "act_per_tensor_scale", "Int8Tensor": "act_quant_scale"}


def config_of(kind: str, version: int, **fields: Any) -> dict[str, Any]:
    """One of torchao's configurations in its JSON."""
    return {"_type": kind, "_version": version, "_data": fields}


def torch_dtype(name: str) -> dict[str, Any]:
    """A dtype in torchao's JSON."""
    return {"_type": "torch.dtype", "_data": name}


_ROWS = {"_type": "PerRow", "_data": {"dim": -1}}
_TENSOR = {"_type": "PerTensor", "_data": {}}
AUTO = {"_type": "KernelPreference", "_data": "AUTO"}
_CONFIGS = {"PerRow": config_of("PerRow", 1, dim=-1), "PerTensor": config_of("PerTensor", 1)}
_TOKENS = Activations("int8", "token", "dynamic"), Activations("int8", "token", "dynamic", symmetric=False)
_INT8_STATIC = Activations("int8", "tensor", "static")
_NVFP4_OF_TWO = replace(NVFP4_DYNAMIC, two_level=True)


def said_of_inputs(kind: str, recipe: ScalingRecipe, inputs: Activations) -> dict[str, Any]:
    """The attributes that say how inputs are quantized beside a weight of torchao's class ``kind``; none where torchao
    has no such inputs beside such weights."""
    if inputs.bound is not None:
        return {}
    if kind == "IntxUnpackedToInt8Tensor":
        asymmetric = inputs == _TOKENS[1]
        return {"activation_quantization": "int8_asym_per_token"} if asymmetric else {}
    made = _kwargs(recipe, inputs)
    return {} if made is None else {"act_quant_kwargs": {"_type": made[0], "_data": made[1]}}


def _kwargs(recipe: ScalingRecipe, inputs: Activations) -> tuple[str, dict[str, Any]] | None:
    match recipe:
        case recipes.Float8CurrentScaling() if _fp8(inputs) and _granularity(recipe, inputs):
            said = {"float8_dtype": torch_dtype(inputs.element), "granularity": _granularity(recipe, inputs)}
            bounds = {"mm_config": None, "hp_value_lb": None, "hp_value_ub": None}
            return "QuantizeTensorToFloat8Kwargs", said | bounds | {"kernel_preference": AUTO}
        case recipes.INT8Scaling() if inputs in (*_TOKENS, _INT8_STATIC):
            mapping = {"_type": "MappingType", "_data": "SYMMETRIC" if inputs.symmetric else "ASYMMETRIC"}
            return "QuantizeTensorToInt8Kwargs", {
                "granularity": _ROWS if inputs.per == "token" else _TENSOR,
                "mapping_type": mapping,
                "reduce_range": False,
            }
        case recipes.MXFP8BlockScaling() | recipes.MXFP4BlockScaling() if inputs == inputs_for(recipe, "dynamic"):
            four = isinstance(recipe, recipes.MXFP4BlockScaling)
            return "QuantizeTensorToMXKwargs", {
                "elem_dtype": torch_dtype("float4_e2m1fn_x2" if four else inputs.element),
                "block_size": 32,
                "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"},
                "kernel_preference": AUTO,
                "is_swizzled_scales": False,
            }
        case recipes.NVFP4BlockScaling() if inputs in (NVFP4_DYNAMIC, _NVFP4_OF_TWO, NVFP4_LOCAL):
            return "QuantizeTensorToNVFP4Kwargs", {
                "block_size": 16,
                "is_swizzled_scales": False,
                "use_triton_kernel": False,
                "use_dynamic_per_tensor_scale": inputs.two_level,
            }
    return None


def _fp8(inputs: Activations) -> bool:
    return (inputs.element, inputs.when, inputs.scale) == ("float8_e4m3fn", "dynamic", "float32")


def inputs_written(recipe: ScalingRecipe, inputs: Activations | None) -> Activations | None:
    """See `FileFormat.inputs_written`."""
    kind = "IntxUnpackedToInt8Tensor" if isinstance(recipe, recipes.INT4Scaling) else ""
    return inputs if inputs is not None and said_of_inputs(kind, recipe, inputs) else None


def inputs_beside(kind: str, attributes: Mapping[str, Any], static: bool) -> Activations | None:
    """What `said_of_inputs` wrote, and whether a static scale is beside the weight; None where inputs stay in high
    precision, or what is said is not known here."""
    if attributes.get("activation_quantization") == "int8_asym_per_token":
        return _TOKENS[1]
    said = attributes.get("act_quant_kwargs")
    values = said.get("_data") if isinstance(said, Mapping) else None
    if not isinstance(values, Mapping):
        return None
    each = "token" if _name(values.get("granularity")) == "PerRow" else "tensor"
    match kind:
        case "Float8Tensor":
            return Activations("float8_e4m3fn", each, "dynamic")
        case "Int8Tensor":
            symmetric = _name(values.get("mapping_type"), "_data") != "ASYMMETRIC"
            how = ("tensor", "static") if static else (each, "dynamic")
            return Activations("int8", *how, symmetric=symmetric)
        case "MXTensor":
            four = "float4" in _name(values.get("elem_dtype"), "_data")
            return MXFP4_DYNAMIC if four else MXFP8_DYNAMIC
        case "NVFP4Tensor":
            two_level = values.get("use_dynamic_per_tensor_scale")
            return NVFP4_LOCAL if static else _NVFP4_OF_TWO if two_level else NVFP4_DYNAMIC
    return None


def _name(value: Any, key: str = "_type") -> str:
    return str(value.get(key)) if isinstance(value, Mapping) else ""


def _granularity(recipe: recipes.Float8CurrentScaling, inputs: Activations) -> dict[str, Any] | None:
    """torchao multiplies rows by rows, and tensors by tensors."""
    if recipe.granularity == "row":
        return _ROWS if inputs.per == "token" else None
    return _TENSOR if inputs.per == "tensor" else None


def _quantizer_of_inputs(recipe: ScalingRecipe, inputs: Activations) -> dict[str, Any] | None:
    """torchao's configuration of such weights and inputs, in its JSON, where what is left out has its default; None
    where there is none."""
    if isinstance(recipe, recipes.INT4Scaling):
        if inputs != _TOKENS[1]:
            return None
        group, dtype = config_of("PerGroup", 1, group_size=recipe.group_size), torch_dtype("int4")
        return config_of("Int8DynamicActivationIntxWeightConfig", 2, weight_dtype=dtype, weight_granularity=group)
    made = _kwargs(recipe, inputs)
    if made is None:
        return None
    match made:
        case "QuantizeTensorToFloat8Kwargs", said:
            each = _CONFIGS[said["granularity"]["_type"]]
            return config_of("Float8DynamicActivationFloat8WeightConfig", 2, granularity=[each, each])
        case "QuantizeTensorToInt8Kwargs", _ if inputs.when == "static":
            return None  # the configuration has the scale as a tensor, of which there is no JSON
        case "QuantizeTensorToInt8Kwargs", said:
            fields = {"act_mapping_type": said["mapping_type"], "granularity": _CONFIGS["PerRow"]}
            return config_of("Int8DynamicActivationInt8WeightConfig", 2, **fields)
        case "QuantizeTensorToNVFP4Kwargs", said:
            levels: dict[str, Any] = {} if inputs.two_level else {"use_dynamic_per_tensor_scale": False}
            return config_of("NVFP4DynamicActivationNVFP4WeightConfig", 1, **levels)
        case _, said:
            dtype = said["elem_dtype"]
            return config_of("MXDynamicActivationMXWeightConfig", 1, activation_dtype=dtype, weight_dtype=dtype)


def quantizer_of(recipe: ScalingRecipe, inputs: Activations | None) -> dict[str, Any]:
    """torchao's configuration of such weights and inputs, in its JSON, where it has one, else of such weights; what is
    left out has its default."""
    if inputs is not None and (of_inputs := _quantizer_of_inputs(recipe, inputs)) is not None:
        return of_inputs
    match recipe:
        case recipes.NVFP4BlockScaling():
            return config_of("NVFP4WeightOnlyConfig", 1)
        case recipes.MXFP8BlockScaling() | recipes.MXFP6BlockScaling() | recipes.MXFP4BlockScaling():
            return config_of("MXDynamicActivationMXWeightConfig", 1)
        case recipes.INT4Scaling():
            group = config_of("PerGroup", 1, group_size=recipe.group_size)
            return config_of("IntxWeightOnlyConfig", 2, weight_dtype=torch_dtype("int4"), granularity=group)
        case recipes.INT8Scaling():
            size = recipe.group_size
            granularity = config_of("PerRow", 1) if size is None else config_of("PerGroup", 1, group_size=size)
            return config_of("Int8WeightOnlyConfig", 2, granularity=granularity)
        case _:
            name = "float8_e5m2" if recipe.element == "float8_e5m2" else "float8_e4m3fn"
            return config_of("Float8WeightOnlyConfig", 2, weight_dtype=torch_dtype(name))
