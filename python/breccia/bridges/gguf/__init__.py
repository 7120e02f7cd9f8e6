# SPDX-License-Identifier: Apache-2.0
"""GGUF's block types (ggml). Q8_0, Q4_0, MXFP4 and NVFP4 are ScaledTensors, Q4_1 has a float minimum;
the K-quants, Q5_0, Q5_1 and IQ4_NL are made of values and read as values; IQ1 to IQ3 and TQ are readable.

A row is a run of blocks, each with its scale in front of its codes. Nibbles are split in halves: the
first half of a block's elements is in the low ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from breccia import verbs
from breccia.bridges.common import Array, as_numpy, codes, float32, get
from breccia.bridges.contract import FileFormat, Kind, Place, Readers, stored_name
from breccia.bridges.gguf.blocks import MAKE, TYPES, blocks_of, flat, half, q4_1, split_to_pairs
from breccia.bridges.gguf.file_kind import GGUF
from breccia.bridges.gguf.mixes import MIXES, fitting, type_in_mix
from breccia.bridges.gguf.quantize import QUANTIZE
from breccia.bridges.gguf.values import SCALES, VALUES
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part, materialize, rows_or_outside
from breccia.bridges.scales import global_scale as one_global_scale
from breccia.bridges.scales import made, of_blocks
from breccia.bridges.written import NVFP4_INPUTS, InputScale
from breccia.calibration.error_feedback import gptq, gptq_encoded
from breccia.layouts import PerBlockK
from breccia.peers import require
from breccia.recipes import INT4Scaling, INT8Scaling, MXFP4BlockScaling, NVFP4BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import UNSAID, Activations, Unsaid
from breccia.verbs.cast_options import column_weights

NAME = "gguf"
EXTRA = "gguf"
_INPUTS = "input_scale"  # the last part of its name
RECIPES: dict[str, ScalingRecipe] = {
    "q8_0": INT8Scaling(group_size=32, scale_dtype="fp16"),
    "q4_0": INT4Scaling(group_size=32, scale_dtype="fp16"),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}

_TENSORS = ("Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4")  # types that `from_gguf` knows


RECIPE_OF: dict[str, ScalingRecipe] = {name.upper(): recipe for name, recipe in RECIPES.items()}

__all__ = ["dequantize_gguf", "from_gguf", "quantize_gguf", "to_gguf"]


def from_gguf(raw: Any, kind: str, global_scale: Any = None) -> ScaledTensor | OutsideTensor:
    """A tensor of blocks.

    Args:
        raw: its bytes, ``(..., row bytes)``, as gguf-py's reader gives them.
        kind: "Q8_0", "Q4_0", "Q4_1", "MXFP4" or "NVFP4".
        global_scale: NVFP4's, which GGUF keeps in a tensor of its own (``*.scale``).

    Returns:
        A ScaledTensor of shape ``(..., K)``; an OutsideTensor with the minimums for "Q4_1".

    Raises:
        ValueError: another kind (see `dequantize_gguf`), or rows that are not whole blocks.
    """
    blocks = blocks_of(raw, kind)
    columns = blocks.shape[-2] * TYPES[kind][1]
    shape = (*blocks.shape[:-2], columns)
    match kind:
        case "Q8_0":
            return made(flat(blocks[..., 2:]), half(blocks, "d"), RECIPES["q8_0"], PerBlockK(32))
        case "Q4_0":
            data = flat(split_to_pairs(blocks[..., 2:])) ^ np.uint8(0x88)
            return made(data, half(blocks, "d"), RECIPES["q4_0"], PerBlockK(32), shape=shape)
        case "Q4_1":
            recipe = INT4Scaling(group_size=32, signed=False)
            data = flat(split_to_pairs(blocks[..., 4:]))
            scaled = made(data, half(blocks, "d"), recipe, PerBlockK(32), shape=shape)
            return OutsideTensor(scaled, bias=half(blocks, "m"))
        case "MXFP4":
            data = flat(split_to_pairs(blocks[..., 1:]))
            scale = np.ascontiguousarray(blocks[..., 0])
            return of_blocks(data, scale, MXFP4BlockScaling())
        case "NVFP4":
            groups = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
            data = flat(flat(split_to_pairs(groups)))
            second = None if global_scale is None else np.asarray(as_numpy(global_scale, "global_scale"), np.float32)
            second = second.reshape(()) if second is not None and second.size == 1 else second
            scale = flat(np.ascontiguousarray(blocks[..., :4]))
            return of_blocks(data, scale, NVFP4BlockScaling(two_level=second is not None), second)
    raise ValueError(f"kind must be Q8_0, Q4_0, Q4_1, MXFP4 or NVFP4, got {kind}: use dequantize_gguf for its values")


def to_gguf(scaled: ScaledTensor | OutsideTensor) -> dict[str, Array]:
    """The inverse of `from_gguf`: ``{kind: blocks}`` and, for two-level NVFP4, ``scale``.

    Args:
        scaled: INT8 or INT4 in groups of 32 with float16 scales, MXFP4, NVFP4, or what `from_gguf` makes of Q4_1.

    Returns:
        ``{kind: blocks}``, blocks being uint8 ``(..., row bytes)``, and ``scale`` float32 ``(1,)`` for two-level NVFP4.

    Raises:
        ValueError: no block type has the tensor's recipe, or its rows are not whole blocks.
    """
    return materialize(lay_out(scaled))


@rows_or_outside
def lay_out(scaled: ScaledTensor | OutsideTensor) -> dict[str, Part]:
    """`to_gguf`, each tensor made when it is asked for."""
    if isinstance(scaled, OutsideTensor):
        return {"Q4_1": q4_1(scaled)}
    recipe = scaled.recipe
    kind = next((name for name, row in RECIPE_OF.items() if carries_as(recipe, row)), None)
    if kind is None:
        raise ValueError(f"scaled must be Q8_0, Q4_0, MXFP4 or NVFP4's recipe, got {recipe}")
    _, size, nbytes = TYPES[kind]
    if scaled.shape[-1] % size:
        raise ValueError(f"scaled must have a multiple of {size} columns for {kind}, got shape {scaled.shape}")
    stored = (*scaled.shape[:-1], scaled.shape[-1] // size * nbytes)
    result = {kind: Part("U8", stored, lambda: MAKE[kind](scaled).reshape(stored))}
    second = one_global_scale(scaled, "multiplier")
    if kind == "NVFP4" and second is not None:
        result["scale"] = Part("F32", (second.size,), lambda: second.reshape(-1))
    return result


def carries_as(recipe: ScalingRecipe, row: ScalingRecipe) -> bool:
    """Whether two recipes have the same value grid: they may differ in how scales are found."""
    if type(recipe) is not type(row) or recipe.element != row.element:
        return False
    same = ("group_size", "signed", "symmetric", "scale_dtype")
    return all(getattr(recipe, f, None) == getattr(row, f, None) for f in same)


def carries(recipe: ScalingRecipe) -> bool:
    """Whether a block type holds a recipe's bytes as they are."""
    return any(carries_as(recipe, row) for row in RECIPES.values())


def kind_of(recipe: ScalingRecipe) -> str:
    """The block type of a recipe."""
    return next(name for name, row in RECIPE_OF.items() if carries_as(recipe, row))


def dequantize_gguf(raw: Any, kind: str) -> Array:
    """The values of a tensor of blocks as float32. Types of codebooks and of three values, IQ1 to IQ3 and TQ, are
    decoded by gguf-py, and so is every other that it decodes.

    Args:
        raw: bytes of whole blocks, uint8 ``(..., row bytes)``.
        kind: the block type, a name of `TYPES` such as "Q6_K".

    Returns:
        float32 ``(..., K)``.

    Raises:
        ValueError: a kind that gguf-py does not decode either, or rows that are not whole blocks.
        ImportError: gguf is not installed, which may decode this kind.
    """
    if kind in _TENSORS:
        made = from_gguf(raw, kind)
        return made.dequantize() if isinstance(made, OutsideTensor) else verbs.dequantize(made)
    blocks_of(raw, kind)  # rows must be whole blocks
    if kind not in VALUES:
        return _decoded_by_peer(codes(raw, "raw"), kind)
    return flat(VALUES[kind](blocks_of(raw, kind)).astype(np.float32))


def _decoded_by_peer(raw: Array, kind: str) -> Array:
    require("gguf", EXTRA)
    import gguf

    rows = np.ascontiguousarray(raw).reshape(-1, raw.shape[-1])
    try:
        values = np.asarray(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]), np.float32)
    except (KeyError, NotImplementedError):
        raise ValueError(
            f"kind must be one that breccia or gguf-py decodes, got {kind!r}: gguf {version('gguf')} does not, and a "
            f"newer one may"
        ) from None
    return values.reshape(*raw.shape[:-1], values.shape[-1])


def quantize_gguf(x: Any, kind: str, importance: Any = None, moments: Any = None) -> Array:
    """Values as blocks of a type: scales, and minimums where it has them, of the least squared error, and the codes
    nearest to the values, or with moments those of GPTQ. Without either no data is needed.

    Args:
        x: floats ``(..., K)``, K a multiple of 256 for K-quants, of 64 for NVFP4 and else of 32; with moments a weight
            ``(N, K)``, or ``(E, N, K)`` of experts.
        kind: "Q2_K" to "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", or "NVFP4" without a global
            scale.
        importance: what errors of each column count, ``(K,)``, or ``(…, K)`` for stacked experts: see `breccia.cast`.
        moments: of the inputs of the layer whose weight ``x`` is, as `breccia.gptq` takes them; their diagonal is the
            importance that scales are found by.

    Returns:
        uint8 ``(..., row bytes)``, which `dequantize_gguf` reads.

    Raises:
        ValueError: another kind, rows that are not whole blocks, values that are not finite, both an importance and
            moments, or one of another shape or with a negative number.

    Examples:
        >>> from breccia import bridges
        >>> w = np.ones((64, 256), np.float32)
        >>> blocks = bridges.quantize_gguf(w, "Q4_K")
        >>> blocks.shape, blocks.dtype  # 4.5 bits a weight
        ((64, 144), dtype('uint8'))
    """
    names = (*QUANTIZE, *RECIPE_OF)
    if kind not in names:
        raise ValueError(f"kind must be one of {', '.join(names)}, got {kind!r}")
    if importance is not None and moments is not None:
        raise ValueError("importance must be left out where moments are given: their diagonal is an importance")
    values = as_numpy(x, "x")
    if not values.ndim or values.shape[-1] % TYPES[kind][1]:
        raise ValueError(f"x must have a multiple of {TYPES[kind][1]} columns for {kind}, got shape {values.shape}")
    if kind in RECIPE_OF:
        return _cast(float32(values), kind, importance, moments)
    if moments is not None:
        return gptq_encoded(float32(values), moments, QUANTIZE[kind])[0]
    weights = None if importance is None else column_weights(importance, values.shape)
    return QUANTIZE[kind](float32(values), weights)


def _cast(values: Array, kind: str, importance: Any, moments: Any) -> Array:
    """Blocks of a type that a recipe makes, in one level."""
    recipe: Any = replace(RECIPE_OF[kind], scale_search="mse")  # type: ignore[call-arg]  # which each of them has
    recipe = replace(recipe, two_level=False) if kind == "NVFP4" else recipe
    if moments is not None:
        return to_gguf(gptq(values, moments, recipe))[kind]
    return to_gguf(verbs.cast(values, recipe, importance=importance))[kind]


def _kind(name: str, mix: str = "") -> Kind:
    """A type, or a mix of it and others."""
    return Kind(
        name,
        TYPES[name][1],
        QUANTIZE[name],
        decode=partial(dequantize_gguf, kind=name),
        of=partial(_type_of, name, mix),
        whole=bool(mix),
    )


def _type_of(base: str, mix: str, names: Any, name: str, columns: int) -> str:
    """The key of the type that a tensor is written as."""
    inside = names.inside(name) if mix and names is not None else None
    return fitting(base if inside is None else type_in_mix(mix, inside, names), columns).lower()


KINDS: dict[str, Kind] = {
    "f16": Kind("F16"),
    "bf16": Kind("BF16"),
    **{name.lower(): _kind(name) for name in QUANTIZE},
    **{mix: _kind(base, mix) for mix, (base, _) in MIXES.items()},
}


def scales_of_blocks(raw: Any, kind: str) -> Array | None:
    """What the codes of whole blocks are multiplied by, of types that no ScaledTensor can hold: float32, flat, one for
    each run of 16 or 32 values, the super-block's scale in it. None of a type whose scales are not read here."""
    return None if kind not in SCALES else SCALES[kind](blocks_of(raw, kind)).reshape(-1)


def found_of(name: str, kind: str, shape: tuple[int, ...], second: str | None) -> Found:
    """A tensor of a file, of its table's row; ``second`` is the name of the one that has the global scale, NVFP4's
    alone."""
    parts = {"blocks": name}
    recipe = RECIPE_OF.get(kind)
    if isinstance(recipe, NVFP4BlockScaling):
        recipe = replace(recipe, two_level=second is not None)
        parts |= {} if second is None else {"global_scale": second}
    layout = None if recipe is None else recipe.layout
    dtype = "uint8" if kind in ("MXFP4", "NVFP4") else "float16"
    return Found(name, NAME, kind, parts, shape, recipe, layout, dtype)


def read_blocks(parts: Mapping[str, Any], found: Found) -> ScaledTensor | OutsideTensor | Array:
    """A tensor of a file: ``blocks`` and perhaps ``global_scale``. Raises ValueError where the blocks do not fit."""
    blocks = get(parts, "blocks", NAME, 1)
    order = found.origin.row_order
    blocks = blocks if order is None else blocks[np.argsort(order)]
    if found.kind in _TENSORS:
        return from_gguf(blocks, found.kind, parts.get("global_scale"))
    return dequantize_gguf(blocks, found.kind)


def store(name: str, scaled: ScaledTensor | OutsideTensor, place: Place) -> tuple[dict[str, Part], dict[str, str]]:
    """Stored tensors by the names that programs of the model know; a part's dtype is its block type and its shape the
    logical one, as in the file's table."""
    roles = lay_out(scaled)
    kind, name = next(iter(roles)), place.spell(name)
    second = {stored_name(name, "scale"): roles["scale"]} if "scale" in roles else {}
    return {name: Part(kind, scaled.shape, roles[kind].make), **second}, {}


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of a layer's inputs that llama.cpp reads beside NVFP4, in ModelOpt's number."""
    return InputScale(_INPUTS, NVFP4_INPUTS, shape=(1,)) if isinstance(recipe, NVFP4BlockScaling) else None


def inputs_beside(found: Found, names: Collection[str]) -> Activations | Unsaid:
    """NVFP4's inputs are by their scale where it is there; others are the program's choice."""
    there = isinstance(found.recipe, NVFP4BlockScaling) and stored_name(found.parts["blocks"], _INPUTS) in names
    return inputs_for(NVFP4BlockScaling(), "local") if there else UNSAID


def inputs_written(recipe: ScalingRecipe, inputs: Activations | None) -> Activations | Unsaid:
    """See `FileFormat.inputs_written`."""
    local = isinstance(recipe, NVFP4BlockScaling) and inputs == inputs_for(recipe, "local")
    return inputs if local and inputs is not None else UNSAID


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("llama.cpp",),
    peer="gguf",
    extra=EXTRA,
    recipes=RECIPES,
    kinds=KINDS,
    container=GGUF,
    row_axis=0,
    readers=Readers(
        embeddings=True,
        fused_experts=True,
        static_inputs="llama.cpp loads them and rounds inputs as its backend does, not by them",
    ),
    read=read_blocks,
    carries=carries,
    store=store,
    input_scales=True,
    input_scale=input_scale,
    inputs_beside=inputs_beside,
    inputs_written=inputs_written,
)
