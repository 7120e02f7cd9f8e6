# SPDX-License-Identifier: Apache-2.0
"""GGUF's block types (ggml). Q8_0, Q4_0, MXFP4 and NVFP4 are ScaledTensors, Q4_1 has a float minimum;
the K-quants are made of values and read as values; Q5_0, Q5_1, IQ1 to IQ4 and TQ are readable.

A row is a run of blocks, each with its scale in front of its codes. Nibbles are split in halves: the
first half of a block's elements is in the low ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from breccia.bridges.common import Array, as_numpy, codes, float32, get, made, packed_codes, unpack_nibbles
from breccia.bridges.common import global_scale as one_global_scale
from breccia.bridges.contract import FileFormat, Kind, Place, stored_name
from breccia.bridges.gguf.file_kind import GGUF
from breccia.bridges.gguf.quantize import QUANTIZE
from breccia.bridges.gguf.values import VALUES
from breccia.bridges.integers import offset_codes
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part, materialize, rows_or_outside
from breccia.bridges.readers import Readers
from breccia.bridges.written import NVFP4_INPUTS, InputScale
from breccia.layouts import PerBlockK, PerBlockMN
from breccia.peers import require
from breccia.recipes import INT4Scaling, INT8Scaling, MXFP4BlockScaling, NVFP4BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import UNSAID, Activations, Unsaid
from breccia.verbs.cast_options import column_weights

NAME = "gguf"
PEER = "gguf"
EXTRA = "gguf"
_INPUTS = "input_scale"  # the last part of its name
RECIPES: dict[str, ScalingRecipe] = {
    "q8_0": INT8Scaling(group_size=32, scale_dtype="fp16"),
    "q4_0": INT4Scaling(group_size=32, scale_dtype="fp16"),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}

# Type name -> (number, elements per block, bytes per block): ggml.h.
TYPES: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1),
    "I16": (25, 1, 2),
    "I32": (26, 1, 4),
    "I64": (27, 1, 8),
    "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}
NUMBERS = {number: name for name, (number, _, _) in TYPES.items()}
_TENSORS = ("Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4")  # types that `from_gguf` knows


def _values_of(raw: Array, kind: str) -> Array:
    """The values of a type that is decoded here, float32."""
    return _flat(VALUES[kind](_blocks(raw, kind)).astype(np.float32))


KINDS: dict[str, Kind] = {
    "f16": Kind("F16"),
    "bf16": Kind("BF16"),
    **{
        name.lower(): Kind(name, TYPES[name][1], encode, RECIPES["q8_0"], partial(_values_of, kind=name))
        for name, encode in QUANTIZE.items()
    },
}
RECIPE_OF: dict[str, ScalingRecipe] = {name.upper(): recipe for name, recipe in RECIPES.items()}

__all__ = ["dequantize_gguf", "from_gguf", "quantize_gguf", "to_gguf"]


def _blocks(raw: Any, kind: str) -> Array:
    data = codes(raw, "raw")
    if kind not in TYPES:
        raise ValueError(f"kind must be one of {', '.join(TYPES)}, got {kind!r}")
    _, _, size = TYPES[kind]
    if data.ndim == 0 or data.shape[-1] % size:
        raise ValueError(f"raw must have rows of whole {kind} blocks of {size} bytes, got shape {data.shape}")
    return data.reshape(*data.shape[:-1], data.shape[-1] // size, size)


def _half(blocks: Array, name: str) -> Array:
    """A little-endian float16 field."""
    at = {"d": 0, "m": 2}[name]
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _flat(per_block: Array) -> Array:
    return per_block.reshape(*per_block.shape[:-2], -1)


def _split_to_pairs(halves: Array) -> Array:
    """Nibbles split in halves of a block to neighbours in a byte."""
    n = halves.shape[-1]
    both = np.concatenate([halves & 15, halves >> 4], axis=-1)
    pairs: Array = (both[..., ::2] | (both[..., 1::2] << 4)).reshape(*halves.shape[:-1], n)
    return pairs


def _pairs_to_split(pairs: Array) -> Array:
    n = pairs.shape[-1]
    both = unpack_nibbles(pairs, 2 * n)
    halves: Array = both[..., :n] | (both[..., n:] << 4)
    return halves


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
    blocks = _blocks(raw, kind)
    columns = blocks.shape[-2] * TYPES[kind][1]
    shape = (*blocks.shape[:-2], columns)
    match kind:
        case "Q8_0":
            return made(_flat(blocks[..., 2:]), _half(blocks, "d"), RECIPES["q8_0"], PerBlockK(32))
        case "Q4_0":
            data = _flat(_split_to_pairs(blocks[..., 2:])) ^ np.uint8(0x88)
            return made(data, _half(blocks, "d"), RECIPES["q4_0"], PerBlockK(32), shape=shape)
        case "Q4_1":
            recipe = INT4Scaling(group_size=32, signed=False)
            data = _flat(_split_to_pairs(blocks[..., 4:]))
            scaled = made(data, _half(blocks, "d"), recipe, PerBlockK(32), shape=shape)
            return OutsideTensor(scaled, bias=_half(blocks, "m"))
        case "MXFP4":
            data = _flat(_split_to_pairs(blocks[..., 1:]))
            scale = np.ascontiguousarray(blocks[..., 0])
            return made(data, scale, MXFP4BlockScaling(), PerBlockMN(1, 32), shape=shape)
        case "NVFP4":
            groups = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
            data = _flat(_flat(_split_to_pairs(groups)))
            second = None if global_scale is None else np.asarray(as_numpy(global_scale, "global_scale"), np.float32)
            second = second.reshape(()) if second is not None and second.size == 1 else second
            return made(
                data,
                _flat(np.ascontiguousarray(blocks[..., :4])),
                NVFP4BlockScaling(two_level=second is not None),
                PerBlockMN(1, 16),
                global_scale=second,
                shape=shape,
            )
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
        return {"Q4_1": _q4_1(scaled)}
    recipe = scaled.recipe
    kind = next((name for name, row in RECIPE_OF.items() if carries_as(recipe, row)), None)
    if kind is None:
        raise ValueError(f"scaled must be Q8_0, Q4_0, MXFP4 or NVFP4's recipe, got {recipe}")
    _, size, nbytes = TYPES[kind]
    if scaled.shape[-1] % size:
        raise ValueError(f"scaled must have a multiple of {size} columns for {kind}, got shape {scaled.shape}")
    stored = (*scaled.shape[:-1], scaled.shape[-1] // size * nbytes)
    result = {kind: Part("U8", stored, lambda: _MAKE[kind](scaled).reshape(stored))}
    second = one_global_scale(scaled, "multiplier")
    if kind == "NVFP4" and second is not None:
        result["scale"] = Part("F32", (second.size,), lambda: second.reshape(-1))
    return result


def _join(*columns: Array) -> Array:
    return np.concatenate([c.view(np.uint8) for c in columns], axis=-1)


def _scale16(scaled: ScaledTensor) -> Array:
    return np.ascontiguousarray(as_numpy(scaled.scale, "scale").astype("<f2"))[..., None]


def _q8_0(scaled: ScaledTensor) -> Array:
    data = codes(scaled.data, "data").reshape(*scaled.scale.shape, 32)
    return _join(_scale16(scaled), np.ascontiguousarray(data))


def _q4_0(scaled: ScaledTensor) -> Array:
    return _join(_scale16(scaled), _pairs_to_split(offset_codes(scaled).reshape(*scaled.scale.shape, 16)))


def _q4_1(outside: OutsideTensor) -> Part:
    scaled, bias = outside.scaled, outside.bias
    if bias is None or outside.columns is not None or scaled.scale.shape[-1] * 32 != scaled.shape[-1]:
        raise ValueError(f"scaled must have a bias for 32 elements and its columns in order for Q4_1, got {outside}")
    if bias.dtype != np.float16 or scaled.scale.dtype != np.float16:
        raise ValueError(f"scale and bias must be float16 for Q4_1, got {scaled.scale.dtype} and {bias.dtype}")

    def make() -> Array:
        pairs = _pairs_to_split(packed_codes(scaled).reshape(*scaled.scale.shape, 16))
        blocks = _join(_scale16(scaled), np.ascontiguousarray(bias.astype("<f2"))[..., None], pairs)
        return blocks.reshape(*scaled.shape[:-1], -1)

    return Part("U8", (*scaled.shape[:-1], scaled.shape[-1] // 32 * 20), make)


def _mxfp4(scaled: ScaledTensor) -> Array:
    pairs = packed_codes(scaled).reshape(*scaled.scale.shape, 16)
    return _join(codes(scaled.scale, "scale")[..., None], _pairs_to_split(pairs))


def _nvfp4(scaled: ScaledTensor) -> Array:
    scale = codes(scaled.scale, "scale")
    lead = (*scale.shape[:-1], scale.shape[-1] // 4)
    pairs = _pairs_to_split(packed_codes(scaled).reshape(*lead, 4, 8)).reshape(*lead, 32)
    return _join(np.ascontiguousarray(scale).reshape(*lead, 4), pairs)


_MAKE: dict[str, Callable[[ScaledTensor], Array]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


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
        from breccia.verbs import dequantize

        made = from_gguf(raw, kind)
        return made.dequantize() if isinstance(made, OutsideTensor) else dequantize(made)
    _blocks(raw, kind)  # rows must be whole blocks
    if kind not in VALUES:
        return _decoded_by_peer(codes(raw, "raw"), kind)
    return _values_of(raw, kind)


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


def quantize_gguf(x: Any, kind: str, importance: Any = None) -> Array:
    """Values as a K-quant: scales and minimums of the least squared error, for which no calibration data is needed.

    Args:
        x: floats ``(..., K)``, K a multiple of 256.
        kind: "Q2_K", "Q3_K", "Q4_K", "Q5_K" or "Q6_K".
        importance: what errors of each column count, ``(K,)``, or ``(…, K)`` for stacked experts: see `breccia.cast`.

    Returns:
        uint8 ``(..., row bytes)``, which `dequantize_gguf` reads.

    Raises:
        ValueError: another kind, rows that are not whole blocks, values that are not finite, or an importance of
            another shape or with a negative number.
    """
    if kind not in QUANTIZE:
        raise ValueError(f"kind must be one of {', '.join(QUANTIZE)}, got {kind!r}")
    values = as_numpy(x, "x")
    if not values.ndim or values.shape[-1] % TYPES[kind][1]:
        raise ValueError(f"x must have a multiple of {TYPES[kind][1]} columns for {kind}, got shape {values.shape}")
    weights = None if importance is None else column_weights(importance, values.shape)
    return QUANTIZE[kind](float32(values), weights)


def found_of(name: str, kind: str, shape: tuple[int, ...], second: str | None) -> Found:
    """A tensor of a file, of its table's row.

    Args:
        name: in the table.
        kind: a name of `TYPES` that has blocks.
        shape: logical.
        second: the tensor that has the global scale, if there is one; it is NVFP4's alone.
    """
    parts = {"blocks": name}
    recipe = RECIPE_OF.get(kind)
    if isinstance(recipe, NVFP4BlockScaling):
        recipe = replace(recipe, two_level=second is not None)
        parts |= {} if second is None else {"global_scale": second}
    layout = None if recipe is None else recipe.layout
    dtype = "uint8" if kind in ("MXFP4", "NVFP4") else "float16"
    return Found(name, NAME, kind, parts, shape, recipe, layout, dtype)


def read_blocks(parts: Mapping[str, Any], found: Found) -> ScaledTensor | OutsideTensor | Array:
    """A tensor of a file: ``blocks`` and perhaps ``global_scale``.

    Args:
        parts: the stored tensors by role.
        found: the tensor; its kind is a name of `TYPES`.

    Raises:
        ValueError: the blocks do not fit.
    """
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
    """See `Bridge.inputs_written`."""
    local = isinstance(recipe, NVFP4BlockScaling) and inputs == inputs_for(recipe, "local")
    return inputs if local and inputs is not None else UNSAID


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("llama.cpp",),
    peer=PEER,
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
