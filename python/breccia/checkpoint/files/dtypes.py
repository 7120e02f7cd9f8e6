# SPDX-License-Identifier: Apache-2.0
"""The element types of a safetensors header, and the NumPy, torch and MLX types that hold them.

NumPy has no 8-bit floats of its own: with ml_dtypes installed their arrays are typed, without it they
are ``uint8`` (``uint16`` for BF16) and the header's name says what the bytes mean. Types below 8 bits
are packed in the file; their arrays are the packed bytes, the last axis counted in bytes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredType:
    """One row of the table.

    Attributes:
        name: as safetensors spells it.
        bits: of one element.
        numpy: NumPy or ml_dtypes name.
        torch: attribute of torch, or "" where torch has no such type.
    """

    name: str
    bits: int
    numpy: str
    torch: str


DTYPES: dict[str, StoredType] = {
    row.name: row
    for row in (
        StoredType("BOOL", 8, "bool", "bool"),
        StoredType("F4", 4, "float4_e2m1fn", "float4_e2m1fn_x2"),
        StoredType("F6_E2M3", 6, "float6_e2m3fn", ""),
        StoredType("F6_E3M2", 6, "float6_e3m2fn", ""),
        StoredType("U8", 8, "uint8", "uint8"),
        StoredType("I8", 8, "int8", "int8"),
        StoredType("F8_E5M2", 8, "float8_e5m2", "float8_e5m2"),
        StoredType("F8_E4M3", 8, "float8_e4m3fn", "float8_e4m3fn"),
        StoredType("F8_E8M0", 8, "float8_e8m0fnu", "float8_e8m0fnu"),
        StoredType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "float8_e4m3fnuz"),
        StoredType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        StoredType("I16", 16, "int16", "int16"),
        StoredType("U16", 16, "uint16", "uint16"),
        StoredType("F16", 16, "float16", "float16"),
        StoredType("BF16", 16, "bfloat16", "bfloat16"),
        StoredType("I32", 32, "int32", "int32"),
        StoredType("U32", 32, "uint32", "uint32"),
        StoredType("F32", 32, "float32", "float32"),
        StoredType("C64", 64, "complex64", "complex64"),
        StoredType("F64", 64, "float64", "float64"),
        StoredType("I64", 64, "int64", "int64"),
        StoredType("U64", 64, "uint64", "uint64"),
    )
}

_BY_NUMPY = {row.numpy: row.name for row in DTYPES.values()}
_ML_DTYPES = frozenset(row.numpy for row in DTYPES.values() if row.numpy.startswith(("float8", "bfloat")))


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError where its elements do not fill whole bytes."""
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8:
        raise ValueError(f"shape {shape} of dtype {dtype} must fill whole bytes, it has {bits} bits")
    return bits // 8


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype an array of the header's ``dtype`` has here (see the module's text)."""
    row = DTYPES[dtype]
    if row.bits < 8:
        return np.dtype(np.uint8)
    if row.numpy not in _ML_DTYPES:
        native = np.dtype(row.numpy)
        return native if sys.byteorder == "little" or row.bits == 8 else native.newbyteorder("<")
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint8 if row.bits == 8 else np.uint16)
    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.numpy))
    return extended


def torch_dtype(dtype: str) -> Any:
    """torch's type of the header's ``dtype``; uint8 where torch has none."""
    import torch

    return getattr(torch, DTYPES[dtype].torch or "uint8", torch.uint8)


def stored_name(array: Any) -> str:
    """The header's name of an array's dtype, whatever its framework. Raises TypeError where safetensors has none."""
    name = _BY_NUMPY.get(getattr(array.dtype, "name", str(array.dtype).rpartition(".")[2]))
    if name is None or DTYPES[name].bits < 8:
        raise TypeError(
            f"dtype must be one safetensors can store, got {array.dtype}; store 4- and 6-bit codes as uint8"
        )
    return name


def little_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in the file's order of bytes; itself where it has that."""
    return array if array.dtype.kind == "V" else array.astype(array.dtype.newbyteorder("<"), copy=False)


def typed(raw: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A typed view of a flat byte array, in the array's shape: that of the header, the last axis in
    bytes where elements are smaller than one."""
    bits = DTYPES[dtype].bits
    if bits < 8:
        last = shape[-1] if shape else 1
        if last * bits % 8:
            return raw  # rows do not end on a byte: flat
        shape = (*shape[:-1], last * bits // 8)
    return raw.view(numpy_dtype(dtype)).reshape(shape)
