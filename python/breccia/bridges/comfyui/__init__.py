# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's quantized layers: FP8, NVFP4, MXFP8 and INT8, each with a ``comfy_quant`` of JSON that names its format.

NVFP4 has the even element in the **high** nibble. Scales of blocks are in cuBLAS's tiles, filled up with zeros. Older
files name the formats in the header, under ``_quantization_metadata``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.comfyui.unmarked import decided, in_tiles, may_be_tiles
from breccia.bridges.common import Array, as_numpy, codes, float32, get, swizzle, unswizzle
from breccia.bridges.contract import LIKELY, NAMED, FileFormat, Place
from breccia.bridges.fp8 import FP8_CODES, FP8_DTYPES
from breccia.bridges.packing import code_part, packed_codes
from breccia.bridges.parts import Found, Part, materialize, part, rows_only
from breccia.bridges.scales import made, of_blocks, one_global_scale, one_number
from breccia.bridges.written import FP8_INPUTS, NVFP4_INPUTS, Dialect, InputScale, Written, said_of_inputs
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import others
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import Activations

NAME = "comfyui"
HEADER = "_quantization_metadata"
RECIPES: dict[str, ScalingRecipe] = {
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8": recipes.Float8CurrentScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "int8": recipes.INT8Scaling(),
}
_FP8 = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
_OLD_SCALE = "scale_weight"  # of files with a tensor "scaled_fp8" that marks them
_ROLES = ("weight", "weight_scale", "weight_scale_2", "comfy_quant")
_E5M2_INPUTS = 57344.0  # E5M2's largest number
_FULL = "full_precision_matrix_mult"

__all__ = ["from_comfyui", "to_comfyui"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_comfyui`."""

    tiles: bool | None = True


def from_comfyui(parts: Mapping[str, Any], kind: str | None = None, tiles: bool | None = True) -> ScaledTensor:
    """The tensors of one layer, by the last part of their names.

    Args:
        parts: ``weight``, ``weight_scale``, for NVFP4 ``weight_scale_2``, and perhaps ``comfy_quant``.
        kind: the format as ComfyUI names it; told by ``comfy_quant`` or the dtypes if None.
        tiles: whether scales of blocks are in tiles and NVFP4's even elements high. False is ModelOpt's order: files
            without marks may have either. Their numbers are looked at if None.

    Returns:
        NVFP4, MXFP8, INT8 or FP8 of shape ``(N, K)``.

    Raises:
        ValueError: a tensor is missing or does not fit, the format is another one, or nothing tells the order.
    """
    weight, scale = get(parts, "weight", NAME), get(parts, "weight_scale", NAME)
    if "comfy_quant" in parts:
        kind = _kind_said(as_numpy(parts["comfy_quant"], "comfy_quant"))
    kind = kind or _kind(weight.dtype.name, scale.dtype.itemsize)
    if weight.ndim != 2:
        raise ValueError(f"{NAME}: weight must be a matrix, got shape {weight.shape}")
    data = codes(weight, "weight")
    if tiles is None:
        tiles = _decided(scale, kind)
    if kind == "nvfp4":
        second = one_number(get(parts, "weight_scale_2", NAME), f"{NAME}: weight_scale_2")
        blocks = _untiled(scale, weight.shape[0], weight.shape[1] // 8) if tiles else scale
        return of_blocks(_swapped(data) if tiles else data, blocks, RECIPES["nvfp4"], second)
    if kind == "mxfp8":
        columns = -(-weight.shape[1] // 32)
        return of_blocks(data, _untiled(scale, weight.shape[0], columns) if tiles else scale, RECIPES["mxfp8"])
    scale = scale.astype(np.float32)
    if kind == "int8_tensorwise":
        rows = (weight.shape[0], 1)
        if scale.size != 1 and scale.shape != rows:
            raise ValueError(f"{NAME}: weight_scale must be one number or have shape {rows}, got {scale.shape}")
        every = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, 1), rows))
        return made(data, every, recipes.INT8Scaling(), PerChannel())
    if scale.size != 1:
        raise ValueError(f"{NAME}: weight_scale must be one number for {kind}, got shape {scale.shape}")
    return made(data, scale.reshape(()), recipes.Float8CurrentScaling(fp8_format=_FP8[kind]), PerTensor())


def _decided(scale: Array, kind: str) -> bool:
    return decided(scale, "float8_e4m3fn" if kind == "nvfp4" else "float8_e8m0fnu", "weight_scale")


def _kind(dtype: str, scale_bytes: int) -> str:
    if scale_bytes == 1:
        return "mxfp8" if dtype in FP8_CODES else "nvfp4"
    return "int8_tensorwise" if dtype == "int8" else "float8_e5m2" if dtype == "float8_e5m2" else "float8_e4m3fn"


def _kind_said(raw: Array) -> str:
    """The format that a layer's ``comfy_quant`` names."""
    try:
        return _checked(json.loads(bytes(codes(raw, "comfy_quant").reshape(-1)).decode()))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{NAME}: comfy_quant must be JSON in UTF-8: {error}") from None


def _checked(said: Any) -> str:
    kind = said.get("format") if isinstance(said, Mapping) else None
    if kind not in (*_FP8, "nvfp4", "mxfp8", "int8_tensorwise"):
        raise ValueError(f"{NAME}: format must be FP8, NVFP4, MXFP8 or INT8, got {kind!r}")
    inner = said.get("params")
    if said.get("convrot") or (isinstance(inner, Mapping) and inner.get("convrot")):
        raise ValueError(f"{NAME}: weights must not be rotated (convrot), which no other format can say")
    return str(kind)


def _untiled(scale: Array, rows: int, columns: int) -> Array:
    tiled = (-(-rows // 128) * 128, -(-columns // 4) * 4)
    if scale.size != tiled[0] * tiled[1]:
        raise ValueError(f"{NAME}: weight_scale must have shape {tiled}, in tiles, got {scale.shape}")
    return unswizzle(codes(scale, "weight_scale").reshape(-1), rows, columns)


def _swapped(packed: Array) -> Array:
    """Packed codes with the two of each byte in the other order."""
    result: Array = (packed >> 4) | (packed << 4)
    return result


def to_comfyui(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_comfyui`.

    Args:
        scaled: NVFP4, MXFP8, INT8 with a scale per row, or FP8 with one scale; a matrix.

    Returns:
        ``weight``, ``weight_scale``, ``comfy_quant`` and, for NVFP4, ``weight_scale_2``, in the dtypes that the file
        has.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_comfyui`, each tensor made when it is asked for."""
    if not carries(scaled.recipe):
        raise ValueError(f"scaled must have a recipe that {NAME} can store, got {scaled.recipe}")
    if scaled.ndim != 2:
        raise ValueError(f"scaled must be a matrix for {NAME}, got shape {scaled.shape}")
    scale = as_numpy(scaled.scale, "scale")
    match scaled.recipe:
        case recipes.NVFP4BlockScaling():
            _check_multiples(scaled, 16)
            packed = packed_codes(scaled)
            parts = {
                "weight": Part("U8", packed.shape, lambda: _swapped(packed)),
                "weight_scale": _tiled(scale, "F8_E4M3"),
                "weight_scale_2": part(one_global_scale(scaled, NAME), "F32"),
            }
        case recipes.MXFP8BlockScaling():
            _check_multiples(scaled, 32)
            parts = {"weight": code_part(scaled), "weight_scale": _tiled(scale, "U8")}
        case recipes.INT8Scaling():
            rows = float32(scale).reshape(scaled.shape[0], 1)
            parts = {"weight": code_part(scaled), "weight_scale": part(rows, "F32")}
        case _:
            parts = {"weight": code_part(scaled), "weight_scale": part(float32(scale).reshape(()), "F32")}
    return {**parts, "comfy_quant": _said(scaled.recipe, inputs=False)}


def lay_out_for_checkpoint(scaled: ScaledTensor, place: Place) -> dict[str, Part]:
    """As `lay_out`; FP8 layers without a scale of their inputs multiply in high precision: ComfyUI would round the
    inputs with the scale 1."""
    return {**lay_out(scaled), "comfy_quant": _said(scaled.recipe, place.inputs)}


def _check_multiples(scaled: ScaledTensor, size: int) -> None:
    if any(n % size for n in scaled.shape):
        raise ValueError(f"scaled must have rows and columns in multiples of {size} for {NAME}, got {scaled.shape}")


def _tiled(scale: Array, dtype: str) -> Part:
    rows, columns = (-(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4)
    return Part(dtype, (rows, columns), lambda: swizzle(codes(scale, "scale")).reshape(rows, columns))


def _layer(recipe: ScalingRecipe, inputs: bool) -> dict[str, Any]:
    """What ``comfy_quant`` says of a layer."""
    if recipe.element.startswith("float8") and recipe.name != "mxfp8":
        return {"format": recipe.element, **({} if inputs else {_FULL: True})}
    return {"format": "int8_tensorwise" if recipe.name == "int8" else recipe.name}


def _said(recipe: ScalingRecipe, inputs: bool) -> Part:
    text = json.dumps(_layer(recipe, inputs)).encode()
    return part(np.frombuffer(text, np.uint8), "U8")


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    match recipe:
        case recipes.NVFP4BlockScaling() | recipes.DelayedScaling():
            return True
        case recipes.Float8CurrentScaling():
            return recipe.granularity == "tensor"
        case recipes.MXFP8BlockScaling():
            return recipe.fp8_format == "E4M3"
        case recipes.INT8Scaling():
            return recipe.group_size is None and recipe.symmetric and recipe.scale_dtype == "fp32"
    return False


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs, which are quantized to the format of the weights. Older files call it ``scale_input``."""
    match recipe:
        case recipes.NVFP4BlockScaling():
            return InputScale("input_scale", NVFP4_INPUTS)
        case recipes.Float8CurrentScaling() | recipes.DelayedScaling():
            amax = _E5M2_INPUTS if recipe.element == "float8_e5m2" else FP8_INPUTS
            return InputScale("input_scale", amax, other_roles=("scale_input",))
    return None


def header(names: Sequence[str], recipes: Mapping[str, ScalingRecipe], inputs: frozenset[str]) -> dict[str, str]:
    """Entries of the header's metadata of a file with these layers."""
    layers = {name: _layer(recipe, name in inputs) for name, recipe in recipes.items()}
    return {HEADER: json.dumps({"format_version": "1.0", "layers": layers})} if layers else {}


def config(written: Written) -> dict[str, Any]:
    """ComfyUI reads no config.json: the method is for other programs, which must not take the codes for weights, and
    says how ComfyUI quantizes inputs."""
    inputs = {m: one for m, recipe in written.recipes.items() if (one := inputs_here(recipe, m in written.inputs))}
    said = {"quant_method": NAME, "ignore": written.ignored}
    return {"quantization_config": said | said_of_inputs(written.recipes, inputs)}


def inputs_here(recipe: ScalingRecipe, static: bool) -> Activations | None:
    """How ComfyUI quantizes the inputs of a layer that is written here: FP8 by a static scale or not at all; others by
    scales made of the inputs, NVFP4 perhaps with a static second one."""
    if not static and recipe.element.startswith("float8") and not isinstance(recipe, recipes.MXFP8BlockScaling):
        return None
    return inputs_for(recipe, "static" if static else "dynamic")


def find_all(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> list[Found]:
    """The layers that a header's metadata names. Raises ValueError where it is not JSON of the known form."""
    if HEADER not in metadata:
        return []
    try:
        layers = json.loads(metadata[HEADER])["layers"]
        said = {str(name): dict(layer) for name, layer in layers.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"metadata {HEADER!r} must be JSON with the formats of layers: {error}") from None
    found = []
    for layer, kind in said.items():
        if f"{layer}.comfy_quant" in entries or f"{layer}.weight" not in entries:
            continue  # the tensor says it; or the layer is of another file
        one = _of_layer(f"{layer}.", entries)
        if one is None or one.kind != _checked(kind):
            raise ValueError(f"tensor {layer + '.weight'!r} must have parts as {kind.get('format')!r} has them")
        found.append(one)
    return found


def claims(context: Mapping[str, Any]) -> int:
    """Where nothing names a format, this one comes first: it alone tells scales in tiles from those in rows."""
    return NAMED if context.get("quant_method") == NAME else LIKELY + 1


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix, dot, role = name.rpartition(".")
    if role == _OLD_SCALE:
        return _of_layer(prefix + dot, entries, {"weight": f"{prefix}{dot}weight", "weight_scale": name})
    if role == "weight_scale" and f"{prefix}{dot}comfy_quant" not in entries:
        return _unmarked(prefix + dot, entries, context)
    if role not in _ROLES or f"{prefix}{dot}comfy_quant" not in entries:
        return None
    return _of_layer(prefix + dot, entries)


def _unmarked(prefix: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """A layer that may be ComfyUI's by the shape of its scales; whether it is, `refine` looks where headers do not
    tell."""
    tiles = may_be_tiles(prefix, entries) and in_tiles(prefix, entries, context)
    found = None if tiles is False else _of_layer(prefix, entries)
    return found and replace(found, details=Details(tiles))


def _of_layer(prefix: str, entries: Mapping[str, Any], parts: dict[str, str] | None = None) -> Found | None:
    parts = parts or {role: prefix + role for role in _ROLES if prefix + role in entries}
    weight, scale = entries.get(parts.get("weight", "")), entries.get(parts.get("weight_scale", ""))
    if weight is None or scale is None or len(weight.shape) != 2:
        return None
    shape, layout, dtype = weight.shape, PerTensor(), "float32"
    recipe: ScalingRecipe
    form: Layout = layout
    if scale.dtype in ("U8", "F8_E8M0", "F8_E4M3") and weight.dtype == "U8" and "weight_scale_2" in parts:
        kind, recipe, form, dtype = "nvfp4", RECIPES["nvfp4"], PerBlockMN(1, 16), "uint8"
        shape = (shape[0], shape[1] * 2)
        parts["global_scale"] = parts["weight_scale_2"]
    elif scale.dtype in ("U8", "F8_E8M0") and weight.dtype == "F8_E4M3":
        kind, recipe, form, dtype = "mxfp8", RECIPES["mxfp8"], PerBlockMN(1, 32), "uint8"
    elif scale.dtype in ("F32", "F16", "BF16") and weight.dtype == "I8":
        kind, recipe, form = "int8_tensorwise", RECIPES["int8"], PerChannel()
    elif scale.dtype in ("F32", "F16", "BF16") and weight.dtype in FP8_DTYPES:
        kind = next(name for name, fp8 in _FP8.items() if fp8 == FP8_DTYPES[weight.dtype])
        recipe = recipes.Float8CurrentScaling(fp8_format=FP8_DTYPES[weight.dtype])
    else:
        return None
    if kind in _FP8 and math.prod(scale.shape) != 1:
        raise ValueError(f"{scale.name} must be one number, got shape {scale.shape}")
    return Found(weight.name, NAME, kind, parts, shape, recipe, form, dtype, details=Details())


def refine(found: Found, array: Callable[[str], Array]) -> Found:
    """What the bytes of ``comfy_quant`` say. Raises ValueError where it is another format than the tensors have."""
    if found.record(Details).tiles is None:
        tiles = _decided(array(found.parts["weight_scale"]), found.kind)
        return replace(found, details=Details(tiles))
    if "comfy_quant" not in found.parts:
        return found
    kind = _kind_said(array(found.parts["comfy_quant"]))
    if kind != found.kind:
        raise ValueError(f"{NAME}: comfy_quant must say {found.kind!r} of such tensors, it says {kind!r}")
    return found


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("ComfyUI",),
    recipes=RECIPES,
    anchors=(".comfy_quant", ".weight_scale", f".{_OLD_SCALE}"),
    marks=("scaled_fp8", "*.scaled_fp8"),
    input_scales=True,
    input_scale=input_scale,
    claims=claims,
    find=find,
    find_all=find_all,
    refine=refine,
    read=lambda parts, found: from_comfyui(parts, found.kind, found.record(Details).tiles),
    carries=carries,
    lay_out=lay_out_for_checkpoint,
    header=header,
    dialect=Dialect(read=others.scheme, write=config),
)
