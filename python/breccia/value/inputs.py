# SPDX-License-Identifier: Apache-2.0
"""What no function takes of a NumPy array, though NumPy would convert it: a mask, and numbers beyond float32; and what
all take for an integer and for a dtype of floats."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOATS = ("float32", "float64", "float16", "bfloat16")  # that the verbs take and make
SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def float_name(dtype: Any) -> str:
    """The name of a float dtype, given by its name or as any framework has it."""
    if dtype is np.float32:
        return "float32"
    if isinstance(dtype, str) and dtype in FLOATS:
        return dtype
    try:
        name = "" if dtype is None else np.dtype(dtype).name  # of None NumPy would make float64
    except (TypeError, UnicodeError):
        name = str(dtype).rpartition(".")[2]  # another framework's dtype
    name = SHORT_NAMES.get(name, name)
    if name not in FLOATS:
        raise TypeError(f"out_dtype must be float32, float64, float16 or bfloat16, got {dtype!r}")
    return str(name)


def is_integer(number: Any) -> bool:
    """Whether it is one of Python's or NumPy's."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def refuse_mask(array: Any, argument: str) -> None:
    """Refuses a masked array, whose values are no numbers where its mask is set."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{argument} must be an array without a mask, got a {type(array).__name__}: fill it first, as "
            f"in {argument}.filled(0)"
        )


def side_array(given: Any, argument: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What is given beside a tensor (importance, amax), of any framework, as float32 in the CPU's memory. Raises
    TypeError where it has a mask or is not of numbers with values, ValueError where one is beyond float32."""
    refuse_mask(given, argument)
    if hasattr(given, "detach"):  # torch: a GPU's too
        given = given.detach().cpu()
        given = given.float() if given.is_floating_point() and given.itemsize < 4 else given
    wanted = "a number or an array of numbers" if argument == "amax" else "an array of numbers"
    try:
        array = np.asarray(given)
    except Exception as error:  # JAX and torch have errors of their own for what is traced
        raise TypeError(f"{argument} must be {wanted} with values, got {type(given).__name__}: {error}") from None
    if array.dtype.kind not in "fiub" and not array.dtype.name.startswith(("bfloat16", "float8")):
        got = f"dtype {array.dtype}" if hasattr(given, "dtype") else repr(given)
        raise TypeError(f"{argument} must be {wanted}, got {got}")
    check_float32(array, argument)
    return np.ascontiguousarray(array, np.float32) if array.ndim else array.astype(np.float32)


def check_float32(array: np.ndarray[Any, Any], argument: str) -> None:
    """Refuses finite float64 numbers that are not finite as float32, in which all is computed."""
    if array.dtype.kind != "f" or array.dtype.itemsize < 8 or not array.size:
        return
    ends = np.array([array.min(), array.max()])
    with np.errstate(over="ignore"):
        if np.isfinite(ends.astype(np.float32)).all():
            return
        beyond = np.isfinite(array) & ~np.isfinite(array.astype(np.float32))
    if beyond.any():
        place = tuple(int(i) for i in np.argwhere(beyond)[0])
        raise ValueError(
            f"{argument} must have numbers within float32's range, up to {np.finfo(np.float32).max:.5g}, got "
            f"{array[place]:.5g} at {place}"
        )
