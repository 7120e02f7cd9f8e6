# SPDX-License-Identifier: Apache-2.0
"""How far a tensor is from its reference, in one pass of the core: no float copy of either is made.

Tensors are ScaledTensors in memory the CPU reads, or NumPy arrays; ``uint16`` is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breccia import _core
from breccia.formats import decode, finfo
from breccia.scaled_tensor import ScaledTensor, check_kernels, ready
from breccia.value.inputs import FLOATS, refuse_mask

__all__ = ["CodeCounts", "Comparison", "Magnitudes", "compare", "count_codes", "error_magnitudes", "kept", "magnitudes"]


@dataclass(frozen=True)
class Comparison:
    """Sums over x of the reference and y of the tensor, in float64; the same whatever threads and CPU there are.

    Printed it is the figures that are asked for first, rounded; the attributes have every digit.

    Where both hold a NaN, both count as zero; one NaN alone makes the sums it enters NaN.

    Attributes:
        count: elements.
        signal: sum of x².
        other: sum of y².
        dot: sum of x · y.
        noise: sum of (x - y)².
        max_error: largest absolute difference.
        max_error_at: place in C order of an element that is so far off, -1 where none is off.
        reference_nans: elements of the reference that are NaN.
        nans: elements of the tensor that are NaN.
        equal: whether every value is the same.
        sqnr_db: signal to quantization noise: infinite where equal, -infinite where the noise is not finite, NaN
            where the reference is zero.
        cosine: of the two as vectors.
    """

    count: int
    signal: float
    other: float
    dot: float
    noise: float
    max_error: float
    max_error_at: int
    reference_nans: int
    nans: int
    equal: bool
    sqnr_db: float
    cosine: float

    def __repr__(self) -> str:
        if self.equal:
            return f"Comparison(equal, {self.count:,} elements{self._nans()})"
        at = f" at {self.max_error_at}" if self.max_error_at >= 0 else ""
        return (
            f"Comparison({self.sqnr_db:.2f} dB, cosine {self.cosine:.6g}, max_error {self.max_error:.4g}{at}, "
            f"{self.count:,} elements{self._nans()})"
        )

    def _nans(self) -> str:
        if not (self.nans or self.reference_nans):
            return ""
        return f", {self.nans:,} NaN where the reference has {self.reference_nans:,}"


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """How many numbers have a magnitude of each half octave.

    Attributes:
        first: half octave of ``counts[0]``: ``counts[i]`` is of magnitudes from 2^((first + i) / 2) up to the next.
        counts: one for each half octave of float32's range.
        zeros: how many are zero.
        not_finite: how many are infinite or NaN.
        largest: of those that are finite.
    """

    first: int
    counts: NDArray[np.int64]
    zeros: int
    not_finite: int
    largest: float

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Counts of the half octaves from 2^low to 2^high; what is beyond, but for zero, counts at the ends.

        Args:
            low: exponent of the first.
            high: exponent past the last.

        Returns:
            int64, two for each power of two.
        """
        start, stop = 2 * low - self.first, 2 * high - self.first
        counts = self.counts[start:stop].copy()
        counts[0] += self.counts[:start].sum()
        counts[-1] += self.counts[stop:].sum()
        return counts


@dataclass(frozen=True, eq=False)
class CodeCounts:
    """How often each code occurs.

    Attributes:
        counts: by code.
        zero: codes of zero.
        saturated: codes of the format's largest magnitudes.
        nan: codes of NaN.
    """

    counts: NDArray[np.int64]
    zero: int
    saturated: int
    nan: int


def compare(reference: Any, tensor: Any) -> Comparison:
    """A tensor against its reference.

    Args:
        reference: a ScaledTensor, or an array of numbers of any framework.
        tensor: the same, of the same shape.

    Returns:
        The figures of `Comparison`.

    Raises:
        TypeError: one is neither a ScaledTensor nor an array of numbers.
        ValueError: the shapes differ.

    Examples:
        >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> fp8, fp4 = (breccia.compare(w, breccia.cast(w, recipe)) for recipe in ("fp8-block", "nvfp4"))
        >>> fp8.sqnr_db > fp4.sqnr_db
        True
        >>> breccia.compare(w, w).max_error
        0.0
    """
    return Comparison(**_core.compare(_operand(reference, "reference"), _operand(tensor, "tensor")))


def magnitudes(x: Any) -> Magnitudes:
    """A histogram of the numbers of ``x``, as float32.

    Args:
        x: a ScaledTensor, or an array of numbers of any framework.

    Returns:
        Counts by half octaves.

    Raises:
        TypeError: it is neither a ScaledTensor nor an array of numbers.
    """
    return Magnitudes(**_core.magnitudes(_operand(x, "x")))


def error_magnitudes(reference: Any, tensor: Any, unit: float = 1.0) -> Magnitudes:
    """A histogram of errors in multiples of ``unit``, in float32.

    Args:
        reference: a ScaledTensor, or an array of numbers of any framework.
        tensor: the same, of the same shape.
        unit: what counts as 1, positive.

    Returns:
        Counts by half octaves.

    Raises:
        TypeError: one is neither a ScaledTensor nor an array of numbers.
        ValueError: the shapes differ, or ``unit`` is not positive and finite.
    """
    return Magnitudes(**_core.error_magnitudes(_operand(reference, "reference"), _operand(tensor, "tensor"), unit))


def count_codes(scaled: ScaledTensor) -> CodeCounts:
    """Counts of a tensor's codes, whatever their scales.

    Args:
        scaled: a ScaledTensor.

    Returns:
        The counts, by code.

    Raises:
        TypeError: the recipe or layout is another library's.
    """
    check_kernels(scaled)
    scaled = ready(scaled)
    counts = _core.count_codes(scaled._core)
    element = scaled.recipe.element
    values = np.abs(decode(np.arange(len(counts), dtype=np.uint8), element))
    return CodeCounts(
        counts,
        zero=int(counts[values == 0].sum()),
        saturated=int(counts[values >= finfo(element).max].sum()),
        nan=int(counts[np.isnan(values)].sum()),
    )


def kept(old: Any, new: Any, change: Any) -> tuple[float, float]:
    """How much of a change that was asked for was made: the first number by the second. 1 is all of it, 0 is none.

    Args:
        old: values before, an array of NumPy or torch.
        new: values after, likewise.
        change: what was to be added to ``old``.

    Returns:
        (Σ change · (new - old), Σ change²).
    """
    return float((change * (new - old)).sum()), float((change * change).sum())


def _operand(x: Any, argument: str) -> Any:
    if isinstance(x, ScaledTensor):
        check_kernels(x)
        return x.cpu()._core
    refuse_mask(x, argument)
    if hasattr(x, "detach"):  # torch's, whose bfloat16 NumPy has not
        x = x.detach().cpu()
        x = x.float() if "bfloat16" in str(x.dtype) else x
    array = np.asarray(x)
    name = array.dtype.name
    if name not in (*FLOATS, "uint16"):
        if not name.startswith(("float", "int", "uint", "bool")):
            raise TypeError(f"{argument} must be a ScaledTensor or an array of real numbers, got dtype {array.dtype}")
        array = array.astype(np.float64 if array.dtype.itemsize > 2 else np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
