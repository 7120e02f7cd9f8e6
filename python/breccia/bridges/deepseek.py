# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's FP8 checkpoints: V3 and everything that copied it (Qwen3-FP8, GLM-FP8, Kimi-K2), V4's
E8M0 scales and its experts, MXFP4 in tensors that call themselves I8.

``weight_scale_inv`` multiplies, despite its name. The fused projections of MiMo were quantized in chunks of rows, each
with tiles of its own, of which the last is short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import kinds_of, numbers
from breccia.bridges.common import Array, check_parts, check_upright, codes, get
from breccia.bridges.contract import FileFormat, Place, Readers, Sample
from breccia.bridges.fp8 import FP8_DTYPES, fp8_format_of
from breccia.bridges.packing import code_part, packed_codes, scale_part
from breccia.bridges.parts import Found, Part, materialize, part, rows_only
from breccia.bridges.scales import made, row_blocks
from breccia.bridges.written import FP8_INPUTS, Dialect, InputScale, Written
from breccia.layouts import Layout, PerBlockMN, PerTensor
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import fp8 as words

NAME = "deepseek"
RECIPES: dict[str, ScalingRecipe] = {
    "block": recipes.Float8BlockScaling(block_m=128, block_k=128),
    "block-ue8m0": recipes.Float8BlockScaling(block_m=128, block_k=128, scale_format="e8m0"),
    "mxfp4": recipes.MXFP4BlockScaling(),
}

__all__ = ["from_deepseek", "from_deepseek_v3", "to_deepseek", "to_deepseek_v3"]


def from_deepseek_v3(data: Any, scale: Any, block_k: int = 128, fp8_format: str = "E4M3") -> ScaledTensor:
    """Wrap a weight and its scales, without copying.

    Args:
        data: FP8 codes ``(..., M, K)``; or int8 holding packed FP4 ``(..., M, K / 2)``, as V4's experts do.
        scale: ``(ceil(M / 128), ceil(K / 128))`` tiles as in the checkpoints (edges may be short), or
            ``(M, K / block_k)``, one per block of a row; float32, bfloat16 or E8M0.
        block_k: block size along K, and along M where scales are tiles.
        fp8_format: "E4M3" or "E5M2".

    Returns:
        FP8 in blocks of the shape of ``data``; MXFP4 of shape ``(..., M, K)`` where that is int8.

    Raises:
        ValueError: the scale's shape is neither.
        TypeError: wrong dtypes.

    Examples:
        >>> from breccia import bridges
        >>> codes, scale = np.zeros((256, 512), np.uint8), np.ones((2, 4), np.float32)
        >>> q = bridges.from_deepseek_v3(codes, scale)
        >>> q.shape, q.recipe.block_m, q.recipe.block_k
        ((256, 512), 128, 128)
    """
    for argument, array in (("data", data), ("scale", scale)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{argument} must be an array, got {type(array).__name__}")
    if len(data.shape) < 2:
        raise ValueError(f"data must be at least 2-D, got shape {tuple(data.shape)}")
    dtype = str(scale.dtype).removeprefix("torch.")
    if str(data.dtype).removeprefix("torch.") == "int8":
        return made(codes(data, "data"), codes(scale, "scale"), recipes.MXFP4BlockScaling(), PerBlockMN(1, 32))
    recipe, layout = _block(tuple(data.shape), tuple(scale.shape), dtype, block_k, fp8_format)
    return made(data, scale, recipe, layout)


def _block(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_dtype: str, block_k: int, fp8_format: str
) -> tuple[ScalingRecipe, Layout]:
    batch, rows, columns = shape[:-2], shape[-2], shape[-1]
    recipes.Float8BlockScaling(fp8_format=fp8_format, block_k=block_k)  # what is wrong with these, it says
    scale_format = {"float32": "fp32", "bfloat16": "bf16", "uint16": "bf16"}.get(scale_dtype, "e8m0")
    tiles = (*batch, -(-rows // block_k), -(-columns // block_k))
    per_row = (*batch, rows, -(-columns // block_k))
    if scale_shape == per_row:
        recipe = recipes.Float8BlockScaling(fp8_format=fp8_format, block_k=block_k, scale_format=scale_format)
        return recipe, row_blocks(block_k, columns)
    if scale_shape == tiles:
        recipe = recipes.Float8BlockScaling(
            fp8_format=fp8_format, block_k=block_k, block_m=block_k, scale_format=scale_format
        )
        return recipe, PerBlockMN(block_k, block_k)
    raise ValueError(
        f"scale.shape must be {tiles} (tiles) or {per_row} (blocks of rows) for data of shape {shape}, "
        f"got {scale_shape}"
    )


def to_deepseek_v3(scaled: ScaledTensor) -> tuple[Any, Any]:
    """``(data, scale)`` as DeepSeek stores them, without copying.

    Args:
        scaled: FP8 in blocks of 128, or MXFP4.

    Returns:
        The tensor's own data and scale; MXFP4's data as packed int8 ``(..., M, K / 2)``.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor.
        ValueError: the tensor is neither block-scaled FP8 nor MXFP4.

    Examples:
        >>> from breccia import bridges
        >>> tiles = breccia.Float8BlockScaling(block_m=128, block_k=128)
        >>> data, scale = bridges.to_deepseek_v3(breccia.cast(np.ones((256, 512), np.float32), tiles))
        >>> data.shape, scale.shape, scale.dtype
        ((256, 512), (2, 4), dtype('float32'))
    """
    check_upright(scaled)
    if not carries(scaled.recipe):
        raise ValueError(f"scaled must be Float8BlockScaling or MXFP4BlockScaling, got {scaled.recipe}")
    if isinstance(scaled.recipe, recipes.MXFP4BlockScaling):
        return packed_codes(scaled).view("int8"), scaled.scale
    return scaled.data, scaled.scale


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_deepseek`."""

    fp8_format: str | None = None
    block_k: int = 128
    chunks: int = 1


def from_deepseek(
    parts: Mapping[str, Any], fp8_format: str | None = None, block_k: int = 128, chunks: int = 1
) -> ScaledTensor:
    """The tensors of one module as a ScaledTensor.

    Args:
        parts: by the last part of their names: ``weight`` FP8 ``(..., M, K)`` with ``weight_scale_inv`` (V3) or
            ``scale`` (V4).
        fp8_format: "E4M3" or "E5M2"; told from the weight's dtype if None, E4M3 where that is of bytes.
        block_k: block size along K, and along M where scales are tiles.
        chunks: parts of as many rows each whose tiles begin anew.

    Returns:
        FP8 in blocks, of rows where there are chunks, MXFP8, MXFP4, or FP8 with one scale.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
        TypeError: wrong dtypes.
    """
    check_parts(parts, NAME)
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "scale"
    scale = get(parts, name, NAME)
    weight = get(parts, "weight", NAME)
    fp8_format = fp8_format_of(weight, fp8_format)
    if scale.dtype == np.float16:
        scale = scale.astype(np.float32)  # recipes of FP8 have no scales of float16
    if _is_mxfp8(tuple(weight.shape), tuple(scale.shape), scale.dtype.itemsize, block_k):
        recipe8 = recipes.MXFP8BlockScaling(fp8_format=fp8_format)
        return made(codes(weight, "weight"), codes(scale, name), recipe8, PerBlockMN(1, 32))
    if scale.size == 1 and scale.ndim < 2:  # of the whole tensor, as Mistral's checkpoints have it
        recipe = recipes.Float8CurrentScaling(fp8_format=fp8_format)
        return made(codes(weight, "weight"), scale.reshape(()), recipe, PerTensor())
    if chunks > 1:
        of_rows = np.repeat(scale.reshape(chunks, -1, scale.shape[-1]), block_k, axis=1)
        scale = of_rows[:, : weight.shape[0] // chunks].reshape(weight.shape[0], -1)
    return from_deepseek_v3(weight, scale, block_k, fp8_format)


def _chunks(name: str, shape: tuple[int, ...], scale_rows: int, block: int, config: Mapping[str, Any]) -> int:
    """How many chunks of rows of a fused projection have tiles of their own: as many as MiMo has heads of keys, where
    the number of tiles does not say it. Raises ValueError where nothing does."""
    if "qkv" not in name or len(shape) != 2:
        return 1
    text, rows = config.get("text_config"), shape[0]
    places = [place for place in (config, text) if isinstance(place, Mapping)]
    mimo = any(kind.startswith("mimo") for kind in kinds_of(config))
    keys = [place.get(key) for key in ("num_key_value_heads", "swa_num_key_value_heads") for place in places]
    heads = [1, *(n for n in keys if type(n) is int and n > 1 and rows % n == 0)]
    fit = [n for n in heads if -(-rows // n // block) * n == scale_rows]
    fit = list(dict.fromkeys(n if rows // n % block else 1 for n in fit))  # whole tiles lie where those of all rows do
    usual = heads[1] if mimo and len(heads) > 1 else 1
    if len(fit) < 2 or usual in fit:
        return usual if usual in fit else (fit or [1])[0]
    said = " or ".join(map(str, fit))
    raise ValueError(f"{scale_rows} rows of scales of {rows} rows in tiles of {block} may be those of {said} chunks")


def _is_mxfp8(shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_bytes: int, block: int) -> bool:
    """Whether exponents are those of MXFP8, one for 32 columns of a row, and not of tiles or other blocks."""
    return bool(shape) and scale_bytes == 1 and block in (32, 128) and scale_shape == (*shape[:-1], -(-shape[-1] // 32))


def to_deepseek(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_deepseek`: V3's names for float scales, V4's for E8M0.

    Args:
        scaled: FP8 in blocks of 128, or MXFP4.

    Returns:
        ``weight`` with ``weight_scale_inv`` for float scales, with ``scale`` for E8M0, in the file's dtypes.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_deepseek`, each tensor made when it is asked for."""
    data, _ = to_deepseek_v3(scaled)
    weight = part(data, "I8") if isinstance(scaled.recipe, recipes.MXFP4BlockScaling) else code_part(scaled)
    scale = scale_part(scaled, "F8_E8M0")
    return {"weight": weight, "scale" if scale.dtype == "F8_E8M0" else "weight_scale_inv": scale}


def lay_out_for_checkpoint(scaled: ScaledTensor, place: Place) -> dict[str, Part]:
    """As `lay_out`; E8M0 scales of a model before V4 are float32 numbers under V3's name, as in V3.1."""
    parts = lay_out(scaled)
    scale = parts.get("scale")
    if scale is None or isinstance(scaled.recipe, recipes.MXFP4BlockScaling) or _may_be_v4(place.model):
        return parts

    def numbers() -> Array:
        exponents = scale.make().astype(np.int32)
        return np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 127))

    return {"weight": parts["weight"], "weight_scale_inv": Part("F32", scale.shape, numbers)}


def _may_be_v4(model: Mapping[str, Any]) -> bool:
    """Whether a model is DeepSeek V4, or nothing says what it is."""
    return str(model.get("model_type", "deepseek_v4")).startswith("deepseek_v4")


def model_knows(recipe: ScalingRecipe, model: Mapping[str, Any]) -> bool:
    """Whether the model's program reads a recipe: MXFP4 is V4's alone."""
    return not isinstance(recipe, recipes.MXFP4BlockScaling) or _may_be_v4(model)


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.block_k == 128 and recipe.block_m in (1, 128)
    return isinstance(recipe, recipes.MXFP4BlockScaling)


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    entry = entries[name]
    if name.endswith("_scale_inv"):
        weight = name.removesuffix("_scale_inv")
        role = "weight_scale_inv"
    elif name.endswith(".scale") and entry.dtype == "F8_E8M0":
        weight, role = name.removesuffix("scale") + "weight", "scale"
    else:
        return None
    stored = entries.get(weight)
    if stored is None or len(stored.shape) < 2:
        return None
    parts = {"weight": weight, role: name}
    if stored.dtype == "I8" and entry.dtype == "F8_E8M0":
        shape = (*stored.shape[:-1], stored.shape[-1] * 2)
        if entry.shape != (*shape[:-1], -(-shape[-1] // 32)):
            return None
        return Found(
            weight, NAME, "FP4 experts", parts, shape, recipes.MXFP4BlockScaling(), PerBlockMN(1, 32), details=Details()
        )
    if stored.dtype not in FP8_DTYPES:
        return None
    dtypes = {"F32": "float32", "F16": "float32", "BF16": "bfloat16", "F8_E8M0": "uint8", "U8": "uint8"}
    dtype = dtypes.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name} must be of F32, F16, BF16, F8_E8M0 or U8, got {entry.dtype}")
    fp8 = FP8_DTYPES[stored.dtype]
    if math.prod(entry.shape) == 1 and len(entry.shape) < 2:
        one = recipes.Float8CurrentScaling(fp8_format=fp8)
        return Found(weight, NAME, "FP8", parts, stored.shape, one, PerTensor(), dtype, details=Details(fp8))
    said = (context.get("quantization_config") or {}).get("weight_block_size")
    block = (128, 128) if said is None else numbers(said, f"{NAME}: weight_block_size", 2)
    chunks = _chunks(weight, stored.shape, entry.shape[0] if entry.shape else 1, block[-1], context.get("config") or {})
    details = Details(fp8, block[-1], chunks)
    if _is_mxfp8(stored.shape, entry.shape, 1 if dtype == "uint8" else 4, block[-1]):
        mx = recipes.MXFP8BlockScaling(fp8_format=fp8)
        return Found(weight, NAME, "MXFP8", parts, stored.shape, mx, PerBlockMN(1, 32), details=details)
    of_rows = (stored.shape[0], entry.shape[1]) if chunks > 1 else entry.shape
    recipe, layout = _block(stored.shape, of_rows, dtype, block[-1], fp8)
    findings: tuple[str, ...] = ()
    if layout.block.rows == 1 and said is not None and chunks == 1:
        findings = (f"scale {entry.shape} is per row although config.json says weight_block_size {list(block)}",)
    kind = "FP8 tiles" if layout.block.rows > 1 or chunks > 1 else "FP8 row blocks"
    return Found(weight, NAME, kind, parts, stored.shape, recipe, layout, dtype, details=details, findings=findings)


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs of FP8 with one scale, as transformers stores it, and as vLLM reads it. None are written."""
    one = isinstance(recipe, recipes.Float8CurrentScaling) and recipe.fp8_format == "E4M3"
    return InputScale("activation_scale", FP8_INPUTS, other_roles=("input_scale",)) if one else None


def misread(shape: tuple[int, ...], recipe: ScalingRecipe) -> str:
    """Tiles that end with the rows: transformers scales the last ones wrongly."""
    rows = recipe.block_m if isinstance(recipe, recipes.Float8BlockScaling) else 1
    if shape[-2] % rows == 0:
        return ""
    return f"transformers misreads tiles of rows that are no multiple of {rows}: read them by vLLM or SGLang"


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here."""
    if any(not model_knows(recipe, written.original) for recipe in written.recipes.values()):
        kind = written.original.get("model_type")
        raise ValueError(f"{NAME}: MXFP4 is the form of DeepSeek V4's experts, model_type must be its, got {kind!r}")
    result: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": written.ignored,
    }
    written_as = set(written.recipes.values())
    powers = any(said.scale == "float8_e8m0fnu" for said in written.activations.values())
    if powers or any(getattr(recipe, "scale_format", "") == "e8m0" for recipe in written_as):
        result["scale_fmt"] = "ue8m0"
    experts = {"expert_dtype": "fp4"} if any(recipe.name == "mxfp4" for recipe in written_as) else {}
    return {"quantization_config": result, **experts}


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers"),
    methods=("fp8",),
    recipes=RECIPES,
    anchors=("_scale_inv", ".scale"),
    readers=Readers(
        misread=misread,
    ),
    sample=Sample(model={"model_type": "deepseek_v4"}),
    find=find,
    row_axis=0,
    read=lambda parts, found: from_deepseek(parts, **asdict(found.record(Details))),
    keeps=lambda found: isinstance(found.details, Details) and found.details.chunks > 1,
    carries=carries,
    model_knows=model_knows,
    lay_out=lay_out_for_checkpoint,
    input_scale=input_scale,
    dialect=Dialect(("fbgemm_fp8", "mxfp8"), words.scheme, config, owns=("expert_dtype",), **words.SAID),
)
