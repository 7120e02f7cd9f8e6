# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' weights, readable. 4 bits (NF4, FP4): codes of a 16-entry codebook, the even element in the **high**
nibble, absmax per block, itself perhaps quantized. 8 bits: integers with the largest magnitude of each row, ``SCB``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from breccia.bridges.checks import number, numbers, real
from breccia.bridges.common import Array, check_parts, codes, get
from breccia.bridges.contract import FileFormat
from breccia.bridges.parts import Found
from breccia.bridges.written import Dialect
from breccia.checkpoint.files.bounded_json import loads
from breccia.schemes.dialects import integers

NAME = "bitsandbytes"

__all__ = ["from_bitsandbytes"]


def from_bitsandbytes(parts: Mapping[str, Any], dtype: Any = "float32") -> Array:
    """The values of a weight. Its codebooks have no ScaledTensor form.

    Args:
        parts: ``weight``, ``absmax``, ``quant_map``, ``quant_state`` and, where absmax is quantized,
            ``nested_absmax`` and ``nested_quant_map``; of 8 bits ``weight`` and ``SCB``.
        dtype: of the result.

    Returns:
        An array of the logical shape.

    Raises:
        ValueError: a tensor is missing, or the state is not JSON of the known form.
    """
    check_parts(parts, NAME)
    if "SCB" in parts:
        return _int8(get(parts, "weight", NAME), get(parts, "SCB", NAME), dtype)
    state = _state(get(parts, "quant_state", NAME))
    shape, size = _shape(state), number(state["blocksize"], f"{NAME}: blocksize")
    packed = codes(get(parts, "weight", NAME), "weight").reshape(-1)
    count = math.prod(shape)
    if packed.size != (count + 1) // 2:
        raise ValueError(f"{NAME}: weight must have {(count + 1) // 2} bytes for shape {shape}, got {packed.size}")
    absmax = get(parts, "absmax", NAME).reshape(-1)
    if absmax.dtype == np.uint8:
        absmax = _nested(parts, state, absmax)
    if absmax.size != -(-count // size):
        raise ValueError(f"{NAME}: absmax must have {-(-count // size)} entries for shape {shape}, got {absmax.size}")
    book = get(parts, "quant_map", NAME).astype(np.float32).reshape(-1)
    if book.size != 16:
        raise ValueError(f"{NAME}: quant_map must have 16 entries, got {book.size}")
    both = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:count]
    result: Array = (book[both] * np.repeat(absmax, min(size, count))[:count]).reshape(shape)
    return result if dtype == "float32" else result.astype(dtype)


def _nested(parts: Mapping[str, Any], state: Mapping[str, Any], absmax: Array) -> Array:
    """Magnitudes of their codes, which have a codebook, magnitudes and an offset of their own."""
    inner = number(state.get("nested_blocksize"), f"{NAME}: nested_blocksize")
    offset = real(state.get("nested_offset"), f"{NAME}: nested_offset")
    nested, book = (get(parts, role, NAME).reshape(-1) for role in ("nested_absmax", "nested_quant_map"))
    if book.size != 256 or nested.size != -(-absmax.size // inner):
        raise ValueError(
            f"{NAME}: nested_quant_map must have 256 entries and nested_absmax {-(-absmax.size // inner)} for "
            f"{absmax.size} of absmax, got {book.size} and {nested.size}"
        )
    scales = np.repeat(nested, min(inner, absmax.size))[: absmax.size]
    return np.asarray(book[absmax] * scales + np.float32(offset), np.float32)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    return numbers(state["shape"], f"{NAME}: shape")


def _int8(weight: Array, rows: Array, dtype: Any) -> Array:
    if weight.ndim != 2 or rows.reshape(-1).shape != weight.shape[:1]:
        raise ValueError(f"{NAME}: SCB must have one entry per row of weight {weight.shape}, got {rows.shape}")
    # One product after the other, as bitsandbytes multiplies.
    signed = codes(weight, "weight").view(np.int8).astype(np.float32)
    result: Array = signed * rows.astype(np.float32).reshape(-1, 1) * np.float32(1 / 127)
    return result if dtype == "float32" else result.astype(dtype)


def _state(raw: Array) -> dict[str, Any]:
    try:
        state = loads(bytes(codes(raw, "quant_state")))
        keys = {"shape", "blocksize"}
        if not isinstance(state, dict) or not keys <= set(state):
            raise ValueError("shape and blocksize must be there")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME}: quant_state must be bitsandbytes' JSON: {error}") from None
    return state


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    if name.endswith(".SCB"):
        int8 = entries.get(name.removesuffix("SCB") + "weight")
        if int8 is None or int8.dtype != "I8" or entries[name].dtype not in ("F32", "F16", "BF16"):
            return None
        parts = {"weight": int8.name, "SCB": name}
        if int8.name + "_format" in entries:
            parts["weight_format"] = int8.name + "_format"
        return Found(int8.name, NAME, "int8", parts, int8.shape)
    weight, mark, kind = name.partition(".quant_state.bitsandbytes__")
    if not mark or weight not in entries or weight + ".absmax" not in entries:
        return None
    parts = {"weight": weight, "quant_state": name}
    for role in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
        if f"{weight}.{role}" in entries:
            parts[role] = f"{weight}.{role}"
    count = math.prod(entries[weight].shape) * 2
    # The logical shape is in quant_state's bytes, which are not a header: `refine` looks there.
    return Found(weight, NAME, kind, parts, (count,), findings=("the shape is in quant_state: shown flat",))


def refine(found: Found, array: Any) -> Found:
    """The shape, which the bytes of ``quant_state`` say."""
    if "quant_state" not in found.parts:
        return found
    state = _state(array(found.parts["quant_state"]))
    return replace(found, shape=_shape(state), findings=())


BRIDGE = FileFormat(
    name=NAME,
    anchors=(".SCB", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    find=find,
    refine=refine,
    read=lambda parts, found: from_bitsandbytes(parts),
    dialect=Dialect(read=integers.scheme, **integers.SAID),
)
