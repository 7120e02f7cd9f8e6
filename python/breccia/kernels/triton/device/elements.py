# SPDX-License-Identifier: Apache-2.0
"""One row per element format, which is all that the kernels know of it, and what they are compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from breccia import formats

# The formats with conversion instructions, by the names of Triton's types.
_HARDWARE = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}


@dataclass(frozen=True)
class Element:
    """One element format. A code is a sign, an exponent and a mantissa, or an integer."""

    name: str
    bits: int
    exponent: int = 0  # bits of it
    mantissa: int = 0  # bits of it
    emin: int = 0  # exponent of the smallest normal value
    max: float = 0.0
    nan: int = 0  # the NaN that a cast makes, without its sign; 0 where there is none
    infinity: int = 0  # 0 where there is none, and NaN, if there is one, is the last code alone
    lo: int = 0  # of an integer
    hi: int = 0

    def __hash__(self) -> int:  # of each launch that has no plan: short
        return hash(self.name)

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return int(np.frexp(self.max)[1]) - 1

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return 1.0 if self.is_integer else 2.0 ** (self.emin - self.mantissa)

    @property
    def has_nan(self) -> bool:
        return self.nan != 0

    @property
    def is_integer(self) -> bool:
        return self.hi != 0

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.bits - 1)

    @property
    def packed(self) -> bool:
        """Whether casts put two codes into a byte."""
        return self.bits == 4

    @property
    def hardware(self) -> str:
        """Triton's type with conversion instructions, "" where there is none."""
        return _HARDWARE.get(self.name, "")

    def values(self) -> NDArray[np.float32]:
        """The float32 of every code, as the kernels decode it."""
        codes = np.arange(1 << self.bits)
        if self.is_integer:
            signed = (self.lo < 0) & (codes >= self.sign)
            return (codes - signed * 2 * self.sign).astype(np.float32)
        magnitude = codes % self.sign
        field, fraction = magnitude >> self.mantissa, magnitude % (1 << self.mantissa)
        significand = fraction + np.where(field > 0, 1 << self.mantissa, 0)
        made = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - 1 + self.emin - self.mantissa)
        if self.infinity:
            made = np.where(magnitude > self.infinity, np.nan, np.where(magnitude == self.infinity, np.inf, made))
        elif self.has_nan:
            made = np.where(magnitude == self.sign - 1, np.nan, made)
        return np.asarray(np.where(codes >= self.sign, -made, made), np.float32)


def _row(fmt: str) -> Element | None:
    """The row of a format; None where its codes are of another kind."""
    info = formats.finfo(fmt)
    name = re.sub(r"^float\d_(e\dm\d)(fn)?$", r"\1", fmt)
    if info.mantissa_bits == 0 and info.smallest == 1:
        row = Element(name, info.bits, max=info.max, lo=int(info.min), hi=int(info.max))
    else:
        values = formats.decode(np.arange(1 << (info.bits - 1), dtype=np.uint8), fmt)
        infinite = np.flatnonzero(np.isinf(values))
        row = Element(
            name,
            info.bits,
            info.bits - 1 - info.mantissa_bits,
            info.mantissa_bits,
            int(np.frexp(info.smallest)[1]) - 1 + info.mantissa_bits,
            info.max,
            nan=int(formats.encode(np.nan, fmt)) & ((1 << (info.bits - 1)) - 1) if info.has_nan else 0,
            infinity=int(infinite[0]) if infinite.size else 0,
        )
    made, known = row.values(), formats.decode(np.arange(1 << info.bits, dtype=np.uint8), fmt)
    signs = np.isnan(known) | (np.signbit(made) == np.signbit(known))
    return row if np.array_equal(made, known, equal_nan=True) and signs.all() else None


def _rows() -> Iterator[tuple[str, Element]]:
    taken: set[str] = set()
    for fmt in formats.names():
        row = _row(fmt)
        if row is not None:
            # float8_e4m3 is no float8_e4m3fn: the short name is that of the first in the registry.
            row = replace(row, name=fmt) if row.name in taken else row
            taken.add(row.name)
            yield fmt, row


BY_FORMAT = dict(_rows())
ELEMENTS = {row.name: row for row in BY_FORMAT.values()}


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the codes, their scales, and what else there is."""

    element: Element
    scale: str = "float"  # what a scale is stored as: float, e8m0 or e4m3
    rule: str = "divide"  # how a cast makes one
    rows: int = 0  # that share a scale, 0 for all
    cols: int = 0
    packed: bool = False
    zero_point: bool = False
    global_scale: bool = False


def form_of(
    fmt: str, scale: str, block: tuple[int, int], packed: bool, zero_point: object, global_scale: object
) -> Form:
    """The form of operands whose scale is for `block` rows and columns; None where there is no zero point or global
    scale."""
    return Form(
        ELEMENTS[fmt],
        scale,
        rows=block[0],
        cols=block[1],
        packed=packed,
        zero_point=zero_point is not None,
        global_scale=global_scale is not None,
    )
