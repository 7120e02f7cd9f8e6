# SPDX-License-Identifier: Apache-2.0
"""How torchao says that a layer's inputs are quantized by scales made of them: in the attributes of its weight's tensor
(``act_quant_kwargs``) and in its configurations, as torchao 0.18 writes them."""

from __future__ import annotations

from typing import Any

from breccia.recipes import (
    Float8CurrentScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import Activations

__all__ = ["quantizer_of_inputs", "said_of_inputs"]

_ROWS = {"_type": "PerRow", "_data": {"dim": -1}}
_TENSOR = {"_type": "PerTensor", "_data": {}}
_AUTO = {"_type": "KernelPreference", "_data": "AUTO"}
_CONFIG = {"PerRow": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}}
_CONFIG["PerTensor"] = {"_type": "PerTensor", "_version": 1, "_data": {}}


def said_of_inputs(kind: str, recipe: ScalingRecipe, inputs: Activations) -> dict[str, Any]:
    """The attributes that say it.

    Args:
        kind: torchao's class of the weight.
        recipe: of the weight.
        inputs: of its layer.

    Returns:
        Nothing where torchao has no such inputs beside such weights.
    """
    if inputs.when != "dynamic" or inputs.bound is not None:
        return {}
    if kind == "IntxUnpackedToInt8Tensor":
        asymmetric = inputs == Activations("int8", "token", "dynamic", symmetric=False)
        return {"activation_quantization": "int8_asym_per_token"} if asymmetric else {}
    made = _kwargs(recipe, inputs)
    return {} if made is None else {"act_quant_kwargs": {"_type": made[0], "_data": made[1]}}


def _kwargs(recipe: ScalingRecipe, inputs: Activations) -> tuple[str, dict[str, Any]] | None:
    match recipe:
        case Float8CurrentScaling() if inputs.element == "float8_e4m3fn" and _granularity(recipe, inputs):
            said = {"float8_dtype": _dtype(inputs.element), "granularity": _granularity(recipe, inputs)}
            bounds = {"mm_config": None, "hp_value_lb": None, "hp_value_ub": None}
            return "QuantizeTensorToFloat8Kwargs", said | bounds | {"kernel_preference": _AUTO}
        case INT8Scaling() if inputs.element == "int8" and inputs.per == "token":
            mapping = {"_type": "MappingType", "_data": "SYMMETRIC" if inputs.symmetric else "ASYMMETRIC"}
            return "QuantizeTensorToInt8Kwargs", {
                "granularity": _ROWS,
                "mapping_type": mapping,
                "reduce_range": False,
            }
        case MXFP8BlockScaling() | MXFP4BlockScaling() if inputs == inputs_for(recipe, "dynamic"):
            four = isinstance(recipe, MXFP4BlockScaling)
            return "QuantizeTensorToMXKwargs", {
                "elem_dtype": _dtype("float4_e2m1fn_x2" if four else inputs.element),
                "block_size": 32,
                "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"},
                "kernel_preference": _AUTO,
                "is_swizzled_scales": False,
            }
        case NVFP4BlockScaling() if inputs == inputs_for(recipe, "dynamic"):
            return "QuantizeTensorToNVFP4Kwargs", {
                "block_size": 16,
                "is_swizzled_scales": False,
                "use_triton_kernel": False,
                "use_dynamic_per_tensor_scale": recipe.two_level,
            }
    return None


def _granularity(recipe: Float8CurrentScaling, inputs: Activations) -> dict[str, Any] | None:
    """torchao multiplies rows by rows, and tensors by tensors."""
    if recipe.granularity == "row":
        return _ROWS if inputs.per == "token" else None
    return _TENSOR if inputs.per == "tensor" else None


def quantizer_of_inputs(recipe: ScalingRecipe, inputs: Activations) -> dict[str, Any] | None:
    """torchao's configuration of such weights and inputs, in its JSON; what is left out has its default.

    Args:
        recipe: of the weights.
        inputs: of the layers.

    Returns:
        None where there is none.
    """
    if isinstance(recipe, INT4Scaling):
        if inputs != Activations("int8", "token", "dynamic", symmetric=False):
            return None
        group = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": recipe.group_size}}
        said = {"weight_dtype": _dtype("int4"), "weight_granularity": group}
        return _object("Int8DynamicActivationIntxWeightConfig", 2, said)
    made = _kwargs(recipe, inputs)
    if made is None:
        return None
    match made:
        case "QuantizeTensorToFloat8Kwargs", said:
            each = _CONFIG[said["granularity"]["_type"]]
            return _object("Float8DynamicActivationFloat8WeightConfig", 2, {"granularity": [each, each]})
        case "QuantizeTensorToInt8Kwargs", said:
            fields = {"act_mapping_type": said["mapping_type"], "granularity": _CONFIG["PerRow"]}
            return _object("Int8DynamicActivationInt8WeightConfig", 2, fields)
        case "QuantizeTensorToNVFP4Kwargs", _:
            return _object("NVFP4DynamicActivationNVFP4WeightConfig", 1, {})
        case _, said:
            dtype = said["elem_dtype"]
            return _object("MXDynamicActivationMXWeightConfig", 1, {"activation_dtype": dtype, "weight_dtype": dtype})


def _object(kind: str, version: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": fields}


def _dtype(name: str) -> dict[str, Any]:
    return {"_type": "torch.dtype", "_data": name}
