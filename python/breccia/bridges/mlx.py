# SPDX-License-Identifier: Apache-2.0
"""MLX's quantized weights: ``weight`` uint32 words with ``scales`` and, in affine mode, ``biases``.

affine: value = code · scale + bias, in the float domain, codes of 2 to 8 bits one after another. mxfp4,
mxfp8 and nvfp4 store the codes of the formats of those names. Shapes alone do not tell bits from group
size: config.json says both, for single modules too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import check_axes, float_name
from breccia.bridges.common import Array, as_numpy, codes, float32, get
from breccia.bridges.contract import LIKELY, NAMED, FileFormat, Readers
from breccia.bridges.integers import offset_codes
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import float_part, from_words, pack_nibbles, packed_codes, scale_part, unpack_bits, words
from breccia.bridges.parts import Found, Part, materialize, rows_or_outside
from breccia.bridges.scales import amax_of_scale, global_scale, made, of_blocks, row_blocks, scale_name
from breccia.bridges.written import Dialect, Written
from breccia.formats import finfo
from breccia.layouts import PerBlockMN
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import others

NAME = "mlx"
EXTRA = "mlx"
RECIPES: dict[str, ScalingRecipe] = {
    "mxfp4": recipes.MXFP4BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(two_level=False),
    "int4": recipes.INT4Scaling(group_size=64, signed=False, symmetric=False, scale_dtype="fp16"),
    "int8": recipes.INT8Scaling(group_size=64, symmetric=False, scale_dtype="fp16"),
}
_BLOCKS = ("mxfp4", "mxfp8", "nvfp4")  # modes whose scales are codes
_BITS = (2, 3, 4, 5, 6, 8)
_SIZES = (32, 64, 128)

__all__ = ["from_mlx", "to_mlx"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_mlx`."""

    mode: str
    bits: int = 4


def from_mlx(parts: Mapping[str, Any], *, mode: str | None = None, bits: int = 4) -> ScaledTensor | OutsideTensor:
    """The tensors of one module.

    Args:
        parts: ``weight``, ``scales``, in affine mode ``biases``, for NVFP4 perhaps ``global_scale``.
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4"; told from dtypes and shapes if None.
        bits: of an affine code: 2, 3, 4, 5, 6 or 8.

    Returns:
        A ScaledTensor; an OutsideTensor with the biases in affine mode.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
    """
    weight, scales = get(parts, "weight", NAME, 1), get(parts, "scales", NAME, 1)
    raw = words(weight, "weight")
    if mode is None:
        mode = "affine" if "biases" in parts else _mode(raw.shape[-1], scales.shape[-1])
    if mode == "affine":
        return _affine(parts, raw, scales, bits)
    if mode not in _BLOCKS:
        raise ValueError(f"mode must be 'affine', 'mxfp4', 'mxfp8' or 'nvfp4', got {mode!r}")
    second = None
    if mode == "nvfp4" and "global_scale" in parts:  # MLX keeps the tensor's amax
        amax = np.asarray(get(parts, "global_scale", NAME), np.float32)
        second = amax.reshape(() if amax.size == 1 else (*amax.shape, 1, 1)) / np.float32(448 * 6)
    return of_blocks(raw, codes(scales, "scales"), _of_mode(mode, second is not None), second)


def _of_mode(mode: str, two_level: bool) -> ScalingRecipe:
    return recipes.NVFP4BlockScaling(two_level=two_level) if mode == "nvfp4" else RECIPES[mode]


def _mode(row_bytes: int, groups: int) -> str:
    for mode, nbytes in (("mxfp4", 16), ("mxfp8", 32), ("nvfp4", 8)):
        if row_bytes == groups * nbytes:
            return mode
    raise ValueError(f"{NAME}: scales must have one entry per 16 or 32 elements of {row_bytes} bytes, got {groups}")


def _affine(parts: Mapping[str, Any], raw: Array, scales: Array, bits: int) -> OutsideTensor:
    biases = get(parts, "biases", NAME)
    if biases.shape != scales.shape:
        raise ValueError(f"{NAME}: biases must be shaped like scales {scales.shape}, got {biases.shape}")
    columns, size = _columns(raw.shape[-1], scales.shape[-1], bits)
    shape, layout = (*raw.shape[:-1], columns), row_blocks(size, columns)
    dtype = scale_name(scales.dtype.name)
    if bits <= 4:
        data = raw if bits == 4 else pack_nibbles(unpack_bits(raw, bits))
        scaled = made(data, scales, recipes.INT4Scaling(size, signed=False, scale_dtype=dtype), layout, shape=shape)
    else:
        # Codes from 0 up as INT8 whose zero point is the least code.
        data = (raw if bits == 8 else unpack_bits(raw, bits)) ^ np.uint8(0x80)
        zero = np.full(scales.shape, -128, np.int8)
        scaled = made(data, scales, recipes.INT8Scaling(size, scale_dtype=dtype, symmetric=False), layout, zero)
    arithmetic = "bfloat16" if scales.dtype == np.uint16 else scales.dtype.name
    return OutsideTensor(scaled, bias=biases, arithmetic=arithmetic)


def _columns(row_bytes: int, groups: int, bits: int) -> tuple[int, int]:
    """Columns and group size of a row of affine codes."""
    if bits not in _BITS:
        raise ValueError(f"{NAME}: bits must be one of {', '.join(map(str, _BITS))}, got {bits}")
    columns, rest = divmod(row_bytes * 8, bits)
    size = columns // groups if groups else 0
    if rest or size not in _SIZES or size * groups != columns:
        raise ValueError(
            f"{NAME}: affine weights must have groups of 32, 64 or 128 codes of {bits} bits, "
            f"got {row_bytes} bytes and {groups} groups a row"
        )
    return columns, size


def to_mlx(scaled: ScaledTensor | OutsideTensor) -> dict[str, Array]:
    """The inverse of `from_mlx`. INT4 becomes affine: bias = -zero point · scale, in
    the scale's dtype where that is exact and in float32 where it is not.

    Args:
        scaled: MXFP4, MXFP8, NVFP4, INT4 or INT8 in groups of 32, 64 or 128, or what `from_mlx` makes of affine
            weights.

    Returns:
        ``weight`` uint32 ``(..., N, words)``, ``scales``, and ``biases`` or ``global_scale`` where the format has them.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


@rows_or_outside
def lay_out(scaled: ScaledTensor | OutsideTensor) -> dict[str, Part]:
    """`to_mlx`, each tensor made when it is asked for."""
    if isinstance(scaled, OutsideTensor):
        inner, bias = scaled.scaled, scaled.bias
        if scaled.columns is not None or bias is None:
            raise ValueError(f"scaled must have a bias and its columns in order, for MLX stores no g_idx, got {scaled}")
        if isinstance(inner.recipe, recipes.INT8Scaling) and not _counts_from_zero(inner):
            raise ValueError(f"scaled must have zero points of -128 beside a bias, which MLX adds alone, got {scaled}")
        return {
            "weight": Part("U32", _words_shape(inner), lambda: from_words(_unsigned(inner), "<u4")),
            "scales": scale_part(inner),
            "biases": float_part(bias),
        }
    recipe = scaled.recipe
    if isinstance(recipe, recipes.INT4Scaling) or (isinstance(recipe, recipes.INT8Scaling) and carries(recipe)):
        return _to_affine(scaled)
    if not carries(recipe):
        raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")

    def words_of() -> Array:
        eight = isinstance(recipe, recipes.MXFP8BlockScaling)
        return from_words(codes(scaled.data, "data") if eight else packed_codes(scaled), "<u4")

    result = {
        "weight": Part("U32", _words_shape(scaled), words_of),
        "scales": scale_part(scaled),
    }
    if (second := global_scale(scaled, "multiplier")) is not None:
        number = () if scaled.ndim < 3 else scaled.shape[:-2]
        result["global_scale"] = Part("F32", number, lambda: amax_of_scale(second).reshape(number))
    return result


def _words_shape(scaled: ScaledTensor) -> tuple[int, ...]:
    each = 4 if isinstance(scaled.recipe, (recipes.INT8Scaling, recipes.MXFP8BlockScaling)) else 8
    return (*scaled.shape[:-1], -(-scaled.shape[-1] // each))


def _unsigned(scaled: ScaledTensor) -> Array:
    """Codes counted from 0, packed."""
    if isinstance(scaled.recipe, recipes.INT8Scaling):
        return np.asarray(codes(scaled.data, "data") ^ np.uint8(0x80))
    return offset_codes(scaled)


def _counts_from_zero(scaled: ScaledTensor) -> bool:
    return scaled.zero_point is not None and bool((as_numpy(scaled.zero_point, "zero_point") == -128).all())


def _to_affine(scaled: ScaledTensor) -> dict[str, Part]:
    scale = as_numpy(scaled.scale, "scale")
    middle = {"int4": 8.0, "int8": 128.0}.get(scaled.recipe.element, 0.0)

    def wide() -> Array:
        zero: Any = middle
        if scaled.zero_point is not None:
            zero = zero + as_numpy(scaled.zero_point, "zero_point").astype(np.float32)
        return np.asarray(-zero * float32(scale), np.float32)

    return {
        "weight": Part("U32", _words_shape(scaled), lambda: from_words(_unsigned(scaled), "<u4")),
        "scales": Part("F32", tuple(scale.shape), lambda: float32(scale)),
        "biases": Part("F32", tuple(scale.shape), wide),
    }


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, (recipes.INT4Scaling, recipes.INT8Scaling)):
        return recipe.group_size in _SIZES
    if isinstance(recipe, recipes.MXFP8BlockScaling):
        return recipe.fp8_format == "E4M3"
    return isinstance(recipe, (recipes.MXFP4BlockScaling, recipes.NVFP4BlockScaling))


def _said(module: str, context: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of one module: its own entry, or that of all."""
    for key in ("quantization", "quantization_config"):
        every = context.get(key)
        if isinstance(every, Mapping) and "bits" in every and "quant_method" not in every:
            own = every.get(module)
            said = own if isinstance(own, Mapping) else every
            return {key: value for key, value in said.items() if value is not None}  # null is what is not there
    return {}


def claims(context: Mapping[str, Any]) -> int:
    """config.json of MLX's programs names no method: it says bits."""
    return NAMED if _said("", context) else LIKELY


def _affine_bits(row_bytes: int, groups: int, said: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Bits and group size: config.json's, else MLX's own default where it fits."""
    bits = said.get("bits", 4)
    if not isinstance(bits, int):
        raise ValueError(f"{name}: bits must be a number in config.json, got {bits!r}")
    _, size = _columns(row_bytes, groups, bits)
    if "bits" in said and size != said.get("group_size", size):
        raise ValueError(f"{name}: config.json must say a group_size of {size} for {bits} bits, got {dict(said)}")
    if "bits" not in said and size != 64:
        raise ValueError(f"{name}: config.json must say bits and group_size: shapes alone fit several")
    return bits, size


def why_not(name: str) -> str:
    """Why a weight must not be quantized though the format could hold it."""
    if name.endswith("kv_b_proj.weight"):
        return "mlx-lm takes kv_b_proj apart and knows it in floats, or in 4 bits with biases"
    if name.endswith(("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")):
        return "mlx-lm takes Granite's experts apart and knows them in floats"
    return ""


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix = name.removesuffix("scales")
    weight, scales, biases = entries.get(prefix + "weight"), entries[name], entries.get(prefix + "biases")
    if weight is None or weight.dtype != "U32" or len(weight.shape) < 2:
        return None
    check_axes(1, scales)
    row = weight.shape[-1] * 4
    parts = {"weight": weight.name, "scales": name}
    if prefix + "global_scale" in entries:
        parts["global_scale"] = prefix + "global_scale"
    if biases is None:
        mode = _mode(row, scales.shape[-1])
        shape = (*weight.shape[:-1], row * (1 if mode == "mxfp8" else 2))
        recipe = _of_mode(mode, "global_scale" in parts)
        layout = PerBlockMN(1, recipe.layout.block.columns)
        return Found(prefix + "weight", NAME, mode, parts, shape, recipe, layout, details=Details(mode))
    parts["biases"] = biases.name
    said = _said(prefix[:-1], context)
    bits, size = _affine_bits(row, scales.shape[-1], said, prefix + "weight")
    shape = (*weight.shape[:-1], row * 8 // bits)
    findings = () if said else ("nothing says how many bits the codes have: 4 are assumed, MLX's default",)
    return Found(
        prefix + "weight",
        NAME,
        f"affine {bits} bits",
        parts,
        shape,
        None,
        row_blocks(size, shape[-1]),
        float_name(scales),
        details=Details("affine", bits),
        findings=findings,
    )


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: most modules' numbers, and others' by their names; and the
    model's numbers by the names that mlx-lm reads, where transformers 5 has others."""
    groups = written.groups()
    said = _said_of_kept(written) if written.kept else _numbers(groups.pop(0)[0])
    for recipe, modules in groups:
        said |= {module: _numbers(recipe) for module in modules}
    model = _as_mlx_reads(written.original)
    for place in ("text_config", "language_config"):
        inner = written.original.get(place)
        if isinstance(inner, Mapping) and (more := _as_mlx_reads(inner)):
            model[place] = {**inner, **more}
    return {"quantization": said, "quantization_config": said, **model}


def _said_of_kept(written: Written) -> dict[str, Any]:
    """What the source says of the modules that stay as they are, and of all."""
    every: Mapping[str, Any] = {}
    for key in ("quantization", "quantization_config"):
        there = written.original.get(key)
        every = every or (there if isinstance(there, Mapping) and "quant_method" not in there else {})
    numbers = {key: every[key] for key in ("group_size", "bits", "mode") if every.get(key) is not None}
    own = {module: every[module] for module in sorted(written.kept) if isinstance(every.get(module), Mapping)}
    return {"group_size": 64, "bits": 4, **numbers, **own}


def _as_mlx_reads(model: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that transformers 5 keeps under other names: of rotary embeddings, whose numbers mlx-lm takes for its
    defaults where they are not there, and how many experts there are."""
    result: dict[str, Any] = {}
    rope = model.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    local = rope.get("sliding_attention")
    every = rope.get("full_attention", rope)
    every = every if isinstance(every, Mapping) else {}
    if "rope_theta" in every:
        result["rope_theta"] = every["rope_theta"]
    if every:
        scaling = {key: value for key, value in every.items() if key != "rope_theta"}
        kind = every.get("rope_type", "default")
        result["rope_scaling"] = {**scaling, "type": kind} if kind != "default" else None  # some ask for it
    if isinstance(local, Mapping) and "rope_theta" in local:
        result["rope_local_base_freq"] = local["rope_theta"]
    if "partial_rotary_factor" in every:
        result["partial_rotary_factor"] = every["partial_rotary_factor"]
    if "num_local_experts" in model:
        result["num_experts"] = model["num_local_experts"]
    return {key: value for key, value in result.items() if key not in model}


def _numbers(recipe: ScalingRecipe) -> dict[str, Any]:
    mode = recipe.name if recipe.name in _BLOCKS else "affine"
    return {"group_size": recipe.layout.block.columns, "bits": finfo(recipe.element).bits, "mode": mode}


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("mlx-lm",),
    peer="mlx.core",
    extra=EXTRA,
    recipes=RECIPES,
    anchors=(".scales",),
    claims=claims,
    readers=Readers(
        experts_together=True,
        gates_apart=True,
        embeddings=True,
        fused_experts=True,
        one_level="mlx-lm loads no second scale",
    ),
    find=find,
    row_axis=0,
    read=lambda parts, found: from_mlx(parts, **asdict(found.record(Details))),
    carries=carries,
    why_not=why_not,
    keeps=lambda found: found.recipe is None and found.kind.startswith("affine"),
    lay_out=lambda scaled, place: lay_out(scaled),
    dialect=Dialect((), others.scheme, config, ("quantize_activations",), words=others.MLX, names=("",)),
)
