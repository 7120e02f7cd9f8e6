# SPDX-License-Identifier: Apache-2.0
"""The least signal to quantization noise that an honest conversion has, by the bits of its format.

    bits per element    2     3     4     5     6     8
    bound, in dB        6     9    12    15    18    24

A bit is worth 6 dB at most. On gaussian weights the targets of `convert` reach 3.2 dB a bit (FP8 of E5M2) to 5.8
(Q2_K), on weights with outliers integers reach less: half of a bit's worth is left for that.
"""

from __future__ import annotations

import math
from typing import Any

from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found
from breccia.checkpoint.reading.source import Checkpoint
from breccia.formats import finfo
from breccia.scaled_tensor import ScaledTensor

__all__ = ["FLOATS_DB", "bits_of", "least"]

VALUES_DB = 40.0  # of what was quantized, in floats: of 8 bits of precision or more, without an error of its own
FLOATS_DB = 12.0  # of plain floats, which do not say from what they were made
_DB_PER_BIT = 3.0


def bits_of(checkpoint: Checkpoint, found: Found, tensor: Any) -> int | None:
    """Bits per element of a loaded tensor's codes, scales left out; None where it is plain floats."""
    if found.format == "plain":
        return None
    stored = 8 * checkpoint.nbytes(found) // max(math.prod(found.shape), 1)
    scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
    # Codes may be stored wider than they are, and made wider than they are stored.
    bits = finfo(scaled.recipe.element).bits if isinstance(scaled, ScaledTensor) else stored
    return max(min(bits, stored), 1)


def least(reference: int | None, checked: int | None) -> float:
    """The bound of two tensors in dB, by their bits per element, None of floats: that of the fewer, for the reference's
    own error counts, too."""
    if checked is None:
        return FLOATS_DB if reference is None else VALUES_DB
    return _DB_PER_BIT * min(checked, checked if reference is None else reference)
