# SPDX-License-Identifier: Apache-2.0
"""torchao's tensor subclasses, and the safetensors layout it saves them in.

The classes are told by name and attributes: reading one needs torch only as far as the tensor itself
does; the layout needs neither torch nor torchao.
"""

from __future__ import annotations

from typing import Any

from breccia import recipes
from breccia.bridges.contract import FileFormat, Readers
from breccia.bridges.file_kinds import Container
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.scales import in_torch
from breccia.bridges.torchao import files
from breccia.bridges.torchao.inputs import inputs_written
from breccia.bridges.torchao.tensors import NAME, describe, from_parts
from breccia.bridges.written import Dialect
from breccia.peers import require
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import others

EXTRA = "torchao"
RECIPES: dict[str, ScalingRecipe] = {
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-tensor": recipes.Float8CurrentScaling(),
    "fp8-block": recipes.Float8BlockScaling(block_m=128),
    "fp8-row-block": recipes.Float8BlockScaling(),
    "int8": recipes.INT8Scaling(),
    "int4": recipes.INT4Scaling(group_size=32, scale_dtype="bf16"),
    "int4-asym": recipes.INT4Scaling(group_size=32, signed=False, symmetric=False, scale_dtype="bf16"),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp6": recipes.MXFP6BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
_MODULES = {  # of classes that are not in torchao.quantization
    "MXTensor": "torchao.prototype.mx_formats.mx_tensor",
    "NVFP4Tensor": "torchao.prototype.mx_formats.nvfp4_tensor",
}
_OPAQUE = {
    "Int4PreshuffledTensor": "CUDA-packed",
    "Int4OpaqueTensor": "CPU-packed",
    "Int4TilePackedTo4dTensor": "CUDA-packed",
    "Int4PlainInt32Tensor": "packed for its device",
    "IntxOpaqueTensor": "CPU-packed",
    "NF4Tensor": "a codebook",
}


__all__ = ["from_torchao", "to_torchao"]


def from_torchao(aqt: Any, recipe: ScalingRecipe | str | None = None) -> ScaledTensor | OutsideTensor:
    """Wrap a torchao tensor's buffers; tiled (swizzled) scales are put in row order.

    Args:
        aqt: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, MXTensor or NVFP4Tensor.
        recipe: recorded instead of the one the buffers say, where the caller knows more.

    Returns:
        A ScaledTensor in torch; for Int4Tensor, whose zero points are floats, an OutsideTensor in NumPy.

    Raises:
        TypeError: not a torchao tensor, or one whose bytes are opaque; the message names the way out.
    """
    kind = type(aqt).__name__
    if kind in _OPAQUE:
        raise TypeError(
            f"aqt is {kind}, whose data is {_OPAQUE[kind]}: quantize to a plain class "
            f"(int4: IntxWeightOnlyConfig; else dequantize it) first"
        )
    names = getattr(aqt, "tensor_data_names", None)
    if names is None:
        raise TypeError(f"aqt must be one of torchao's tensor classes, got {kind}")
    names = [*names, *getattr(aqt, "optional_tensor_data_names", [])]
    parts = {n: getattr(aqt, n) for n in names if getattr(aqt, n, None) is not None}
    attributes: dict[str, Any] = {}
    for n in [*aqt.tensor_attribute_names, *getattr(aqt, "optional_tensor_attribute_names", [])]:
        attributes[n] = getattr(aqt, n, None)
    attributes["shape"] = tuple(aqt.shape)
    made = from_parts(kind, parts, attributes)
    if not isinstance(made, OutsideTensor):
        return in_torch(made, aqt.device, recipe)
    if recipe is not None:
        raise ValueError(f"recipe must be None for {kind}: its float zero points have no recipe")
    return made


def to_torchao(scaled: ScaledTensor | OutsideTensor, dtype: Any = None) -> Any:
    """The torchao tensor of the same bytes, on the CPU.

    Args:
        scaled: what to convert.
        dtype: torch dtype its operations pretend to have (default: bfloat16).

    Returns:
        A tensor of torchao's class for the recipe: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor,
        MXTensor or NVFP4Tensor.

    Raises:
        ImportError: torchao is not installed.
        ValueError: torchao has no class for it.
    """
    require("torchao", EXTRA)
    import torch

    high = torch.bfloat16 if dtype is None else dtype
    kind, parts, attributes = describe(scaled, str(high).removeprefix("torch."))
    tensors = {name: part.in_torch() for name, part in parts.items()}
    values = {k: _object(v) for k, v in attributes.items()}
    return getattr(require(_MODULES.get(kind, "torchao.quantization"), EXTRA), kind)(**tensors, **values)


def _object(value: Any) -> Any:
    """An attribute of the JSON form as torchao's own object."""
    if not isinstance(value, dict):
        return value
    if value["_type"] == "torch.dtype":
        import torch

        return getattr(torch, value["_data"])
    from torchao.quantization.quantize_.common import KernelPreference

    return KernelPreference[value["_data"]]


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.scale_format == "fp32"
    if isinstance(recipe, recipes.INT4Scaling):
        return recipe.signed or not recipe.symmetric
    return True


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("transformers with torchao",),
    peer="torchao",
    extra=EXTRA,
    recipes=RECIPES,
    container=Container(header_of_all=True),  # readers take the last shard's header for that of all
    readers=Readers(
        single_experts=False,  # transformers keeps them in one tensor, which it makes of floats alone
    ),
    find_all=files.find_all,
    refine=files.refine,
    read=files.load,
    carries=carries,
    store=files.store_in_checkpoint,
    plain_metadata=files.plain_metadata,
    header=files.header,
    dialect=Dialect(read=others.scheme, write=files.config, words=others.TORCHAO, closed=("quant_type",)),
    input_scales=True,
    input_scale=files.input_scale,
    inputs_beside=files.beside,
    inputs_written=inputs_written,
)
