# SPDX-License-Identifier: Apache-2.0
"""AMD Quark's checkpoints: INT4 in words, FP8, and MXFP4, MXFP6 and NVFP4, which are read. INT4 is stored turned: a
word holds eight neighbours along N."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import FLOATS, check_axes, float_name, mapping, number, shown
from breccia.bridges.common import Array, as_numpy, check_matrix, codes, get, get_matrix
from breccia.bridges.contract import NAMED, NO, FileFormat
from breccia.bridges.fp8 import FP8_CODES, FP8_DTYPES, fp8_format_of, fp8_parts, fp8_recipe, is_of_tensor
from breccia.bridges.integers import int4, integer_zero_point, offset_codes, turned
from breccia.bridges.packing import pack_nibbles, unpack_nibbles, word_matrix
from breccia.bridges.parts import Found, Part, materialize, rows_only
from breccia.bridges.scales import made, of_blocks, one_number, row_blocks, scale_name
from breccia.bridges.written import FP8_INPUTS, NVFP4_INPUTS, Dialect, InputScale, Written
from breccia.layouts import PerBlockMN
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import quark as words
from breccia.schemes.value import Activations
from breccia.value import sixes

NAME = "quark"
RECIPES: dict[str, ScalingRecipe] = {
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-tensor": recipes.Float8CurrentScaling(),
    "fp8-block": recipes.Float8BlockScaling(block_m=128),
    "int4": recipes.INT4Scaling(),
    "int4-asym": recipes.INT4Scaling(signed=False, symmetric=False),
}
_ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}  # of the neighbours in a word

__all__ = ["from_quark", "to_quark"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_quark`."""

    signed: bool | None = None
    symmetric: bool | None = None
    pack_method: str = "reorder"


def from_quark(
    parts: Mapping[str, Any],
    *,
    signed: bool | None = None,
    symmetric: bool | None = None,
    pack_method: str = "reorder",
) -> ScaledTensor:
    """The tensors of one module as a ScaledTensor.

    Args:
        parts: arrays by role. FP8: ``weight`` ``(N, K)`` and ``weight_scale``, one number, ``(N,)``, or one to a square
            tile. INT4: ``weight`` int32 ``(K, N / 8)``, ``weight_scale`` float ``(K / g, N)`` and perhaps
            ``weight_zero_point`` int32 ``(K / g, N / 8)``.
        signed: whether config.json says "int4" of the codes, and not "uint4"; if None, whether they are symmetric.
        symmetric: whether it says that zero points are 0, of unsigned codes 8; if None, whether there are none.
        pack_method: "reorder" or "order", as ``export`` in config.json says.

    Returns:
        FP8 or INT4 of shape ``(N, K)``.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit, or a zero point is not what it must be.
    """
    weight, scale = get(parts, "weight", NAME, 1), get(parts, "weight_scale", NAME)
    if weight.dtype.name == "uint8" and scale.dtype.itemsize == 1:
        return _packed(weight, scale, parts.get("weight_scale_2"))
    if weight.dtype.itemsize != 4:
        recipe, layout, shape = fp8_recipe(fp8_format_of(weight), weight.shape, scale.shape, scale.dtype.name)
        return made(codes(weight, "weight"), scale.reshape(shape), recipe, layout)
    if pack_method not in _ORDERS:
        raise ValueError(f"{NAME}: pack_method must be 'reorder' or 'order', got {shown(pack_method)}")
    words, scale = get_matrix(parts, "weight", NAME), get_matrix(parts, "weight_scale", NAME)
    zero = get_matrix(parts, "weight_zero_point", NAME) if "weight_zero_point" in parts else None
    columns, rows, groups = words.shape[0], words.shape[1] * 8, scale.shape[0]
    fits = scale.shape == (groups, rows) and groups and columns % groups == 0
    if not fits or (zero is not None and zero.shape != (groups, rows // 8)):
        raise ValueError(
            f"{NAME}: weight (K, N / 8), weight_scale (K / g, N) and weight_zero_point (K / g, N / 8) must fit, got "
            f"{words.shape}, {scale.shape}, {None if zero is None else zero.shape}"
        )
    data = _from_words(words, "weight", pack_method)
    zeros = None if zero is None else _from_words(zero, "weight_zero_point", pack_method)
    symmetric = zeros is None if symmetric is None else symmetric
    signed = symmetric if signed is None else signed
    middle = 0 if signed else 8
    if symmetric and zeros is not None and (zeros != middle).any():
        raise ValueError(f"{NAME}: weight_zero_point must be {middle} where config.json says symmetric, it is not")
    if not symmetric and zeros is None:
        raise ValueError(
            f"{NAME}: 'weight_zero_point' must be among the tensors where config.json says symmetric false"
        )
    if signed != symmetric:  # a ScaledTensor's codes have zero points where they are unsigned, and there alone
        data, zeros = data ^ 8, None if zeros is None else zeros ^ 8
    packed = pack_nibbles(data)
    scales = np.ascontiguousarray(scale.T)
    return int4(packed, scales, None if symmetric else zeros, (rows, columns), columns // groups)


def _packed(weight: Array, scale: Array, second: Any) -> ScaledTensor:
    """MXFP4, MXFP6 or NVFP4: which of them follows from the scales."""
    if second is not None:
        one = one_number(as_numpy(second, "weight_scale_2"), f"{NAME}: weight_scale_2")
        return of_blocks(weight, scale, recipes.NVFP4BlockScaling(), one)
    if scale.ndim and weight.shape[-1] * 4 == scale.shape[-1] * 96:
        return of_blocks(sixes.unpack(weight), scale, recipes.MXFP6BlockScaling())
    return of_blocks(weight, scale, recipes.MXFP4BlockScaling())


def _from_words(words: Array, argument: str, pack_method: str) -> Array:
    """Codes, one to a byte, with N in front of words that hold eight neighbours of it."""
    shifts = 4 * np.argsort(_ORDERS[pack_method]).astype(np.uint32)
    each = (word_matrix(words, argument)[:, :, None] >> shifts) & np.uint32(15)
    return np.ascontiguousarray(each.astype(np.uint8).reshape(len(words), -1).T)


def _to_words(values: Array) -> Array:
    """The inverse, as Quark packs by default."""
    each = values.T.reshape(values.shape[1], -1, 8)[:, :, _ORDERS["reorder"]].astype(np.uint32)
    shifts = 4 * np.arange(8, dtype=np.uint32)
    words: Array = np.bitwise_or.reduce(each << shifts, axis=-1)
    return words.view(np.int32)


def to_quark(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_quark`, packed as Quark does by default.

    Args:
        scaled: FP8, or INT4 of shape ``(N, K)`` with N a multiple of 8.

    Returns:
        Arrays by role, in the dtypes that the file has.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_quark`, each tensor made when it is asked for."""
    recipe, scale = scaled.recipe, as_numpy(scaled.scale, "scale")
    if not carries(recipe):
        raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")
    if not isinstance(recipe, recipes.INT4Scaling):
        return fp8_parts(scaled)
    check_matrix(scaled, NAME)
    rows, columns = scaled.shape
    groups = scale.shape[-1]
    if rows % 8 or columns % groups:
        raise ValueError(f"scaled must have a multiple of 8 rows, and whole groups, for {NAME}, got {scaled.shape}")

    def weight() -> Array:
        flip = np.uint8(8 if recipe.signed else 0)
        return _to_words(unpack_nibbles(offset_codes(scaled), columns) ^ flip)

    result = {"weight": Part("I32", (columns, rows // 8), weight), "weight_scale": turned(scale)}
    if not recipe.symmetric:
        zeros = (groups, rows // 8)
        result["weight_zero_point"] = Part("I32", zeros, lambda: _to_words(integer_zero_point(scaled, 15)))
    return result


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.block_m == recipe.block_k and recipe.scale_format != "e8m0"
    if isinstance(recipe, recipes.INT4Scaling):
        return recipe.signed == recipe.symmetric
    return isinstance(recipe, (recipes.DelayedScaling, recipes.Float8CurrentScaling))


def claims(context: Mapping[str, Any]) -> int:
    """Its names are those of others, and what they mean is in config.json alone."""
    return NAMED if context.get("quant_method") == NAME else NO


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix = name.removesuffix("weight_scale")
    weight, scale = entries.get(prefix + "weight"), entries[name]
    if weight is None:
        return None
    parts = {"weight": weight.name, "weight_scale": name}
    if weight.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0", "F8_E4M3"):
        return _find_packed(prefix, weight, scale, parts, entries, context)
    if scale.dtype not in FLOATS:
        return None
    if weight.dtype in FP8_DTYPES:
        check_axes(1, weight)
        recipe, layout, _ = fp8_recipe(FP8_DTYPES[weight.dtype], weight.shape, scale.shape, float_name(scale))
        return Found(prefix + "weight", NAME, "fp8", parts, weight.shape, recipe, layout, float_name(scale))
    if weight.dtype != "I32":
        return None
    check_axes(2, weight, scale, most=2)
    if prefix + "weight_zero_point" in entries:
        parts["weight_zero_point"] = prefix + "weight_zero_point"
    said, signed = _said(prefix[:-1], context)
    rows, columns, groups = weight.shape[1] * 8, weight.shape[0], scale.shape[0]
    if columns % groups or said.group_size != columns // groups:
        raise ValueError(
            f"{name}: group_size must divide the columns as config.json says, {said.group_size}: there are {groups} "
            f"groups of {columns}"
        )
    details = Details(signed, said.symmetric, _pack_method(context))
    recipe = replace(said, scale_dtype=scale_name(float_name(scale)))
    layout = row_blocks(columns // groups, columns)
    return Found(
        prefix + "weight", NAME, "int4", parts, (rows, columns), recipe, layout, float_name(scale), details=details
    )


def _find_packed(
    prefix: str,
    weight: Any,
    scale: Any,
    parts: dict[str, str],
    entries: Mapping[str, Any],
    context: Mapping[str, Any],
) -> Found | None:
    """MXFP4, MXFP6 of E2M3 or NVFP4, packed in bytes; None where config.json says another or shapes are of none."""
    check_axes(2, weight, scale)
    shape, groups = (*weight.shape[:-1], weight.shape[-1] * 2), scale.shape[-1]
    recipe: recipes.MXFP4BlockScaling | recipes.MXFP6BlockScaling | None = None
    if scale.dtype == "F8_E4M3" and prefix + "weight_scale_2" in entries:
        parts["weight_scale_2"] = parts["global_scale"] = prefix + "weight_scale_2"
        return Found(prefix + "weight", NAME, "nvfp4", parts, shape, recipes.NVFP4BlockScaling(), PerBlockMN(1, 16))
    said = _spec_of(prefix[:-1], context["quantization_config"]).get("dtype")
    if shape[-1] == groups * 32:
        recipe = recipes.MXFP4BlockScaling()
    elif weight.shape[-1] * 4 == groups * 96 and said in (None, "fp6_e2m3"):
        shape, recipe = (*weight.shape[:-1], groups * 32), recipes.MXFP6BlockScaling()
    if recipe is None or scale.dtype == "F8_E4M3":
        return None
    return Found(prefix + "weight", NAME, recipe.name, parts, shape, recipe, PerBlockMN(1, 32))


def _said(module: str, context: Mapping[str, Any]) -> tuple[recipes.INT4Scaling, bool]:
    """What config.json says of a module's INT4: the recipe, whose codes are signed where there are no zero points, and
    whether the stored ones are. Raises ValueError where it says that the weight is of another kind."""
    said = _spec_of(module, context["quantization_config"])
    dtype, size, symmetric = said.get("dtype"), said.get("group_size"), said.get("symmetric", True) is not False
    if dtype not in ("int4", "uint4") or said.get("qscheme", "per_group") != "per_group":
        raise ValueError(
            f"{module}: config.json must say int4 or uint4 per_group of 32-bit words, it says {shown(said)}"
        )
    size = number(size, f"{module}: group_size")
    return recipes.INT4Scaling(group_size=size, signed=symmetric, symmetric=symmetric), dtype == "int4"


def _spec_of(module: str, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of a linear module's weight: by the pattern of its name, by its class, or that of all."""
    layers = mapping(quantization.get("layer_quant_config") or {}, f"{NAME}: layer_quant_config")
    types = mapping(quantization.get("layer_type_quant_config") or {}, f"{NAME}: layer_type_quant_config")
    parts = [part for pattern, part in layers.items() if fnmatchcase(module, pattern)]
    parts += [part for kind, part in types.items() if kind.endswith("Linear")]
    parts += [quantization.get("global_quant_config") or {}]
    return dict(mapping(mapping(parts[0], f"{NAME}: a layer's").get("weight") or {}, f"{NAME}: weight"))


def _pack_method(context: Mapping[str, Any]) -> str:
    export = context["quantization_config"].get("export")
    said = export.get("pack_method", "reorder") if isinstance(export, Mapping) else "reorder"
    if not isinstance(said, str) or said not in _ORDERS:
        raise ValueError(f"{NAME}: pack_method must be 'reorder' or 'order', config.json says {shown(said)}")
    return said


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs of FP8 with one scale, and that of NVFP4, which stands for those of blocks."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return InputScale("input_scale_2", NVFP4_INPUTS)
    return InputScale("input_scale", FP8_INPUTS) if is_of_tensor(recipe) else None


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: the form of most modules is that of all, others are named."""
    layers: dict[str, dict[str, Any]] = {}
    for module, recipe in written.recipes.items():
        layers[module] = {
            "weight": _spec(recipe),
            "input_tensors": _inputs(module in written.inputs, written.dynamic(module)),
            "output_tensors": None,
            "bias": None,
        }
    kinds = list(layers.values())
    most = max(kinds, key=kinds.count)
    said: dict[str, Any] = {
        "quant_method": NAME,
        "global_quant_config": most,
        "layer_type_quant_config": {},
        "layer_quant_config": {glob.escape(module): kind for module, kind in layers.items() if kind != most},
        "exclude": written.ignored,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
    }
    if written.cache:
        outputs = {"weight": None, "input_tensors": None, "output_tensors": _FP8, "bias": None}
        said["kv_cache_quant_config"] = {"*k_proj": outputs, "*v_proj": outputs}
    return {"quantization_config": said}


def _of(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    usual = {"ch_axis": None, "group_size": None, "symmetric": True, "is_dynamic": False, "round_method": "half_even"}
    return {"dtype": dtype, "qscheme": qscheme, **usual, "scale_type": "float", **more}


_FP8 = _of("fp8_e4m3", "per_tensor")


def _spec(recipe: ScalingRecipe) -> dict[str, Any]:
    if isinstance(recipe, recipes.INT4Scaling):
        dtype = "int4" if recipe.signed else "uint4"
        return _of(dtype, "per_group", ch_axis=-1, group_size=recipe.group_size, symmetric=recipe.symmetric)
    dtype = f"fp8_{FP8_CODES[recipe.element].lower()}"
    if isinstance(recipe, recipes.Float8BlockScaling):
        return _of(dtype, "per_block", block_size=[recipe.block_m, recipe.block_k])
    rows = getattr(recipe, "granularity", "tensor") == "row"
    return _of(dtype, "per_channel", ch_axis=0) if rows else _of(dtype, "per_tensor")


def _inputs(static: bool, dynamic: Activations | None) -> dict[str, Any] | None:
    if static:
        return _FP8
    if dynamic is None or dynamic.element != "float8_e4m3fn" or dynamic.per not in ("tensor", "token"):
        return None
    how = {"tensor": "per_tensor", "token": "per_channel"}[dynamic.per]
    return _of("fp8_e4m3", how, ch_axis=1 if dynamic.per == "token" else None, is_dynamic=True)


def _read(parts: Mapping[str, Any], found: Found) -> ScaledTensor:
    said = Details() if found.details is None else found.record(Details)  # of INT4 alone is there more to say
    return from_quark(parts, signed=said.signed, symmetric=said.symmetric, pack_method=said.pack_method)


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("transformers with AMD Quark", "vLLM"),
    refused=dict.fromkeys(("int4", "int4-asym"), ("vLLM",)),  # its scheme for them ends in an assertion, 0.32
    needs="vLLM: --activations dynamic",
    recipes=RECIPES,
    recipes_with_inputs={"fp8": RECIPES["fp8-tensor"]},
    anchors=("weight_scale",),
    input_scales=True,
    input_scale=input_scale,
    cache_scales={which: (f"{{}}.{which}_proj.output_scale", ()) for which in "kv"},
    claims=claims,
    find=find,
    read=_read,
    carries=carries,
    lay_out=lambda scaled, place: lay_out(scaled),
    dialect=Dialect(read=words.scheme, write=config, **words.SAID),
)
