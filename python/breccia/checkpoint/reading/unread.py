# SPDX-License-Identifier: Apache-2.0
"""Codes that no bridge understands: to copy them as numbers would make a file of garbage."""

from __future__ import annotations

import re
from collections.abc import Iterable

from breccia.bridges.parts import Found
from breccia.checkpoint.reading.source import Checkpoint, is_float

__all__ = ["check_all_is_read"]

_CODES = ("U8", "I8", "I16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4")
# Last parts of the names under which quantized weights and what belongs to them are stored.
_WEIGHT = re.compile(r".*\b_?(weight|qweight|qzeros|weight_packed|W_q|qdata|\w+_blocks|\w+_packed|SCB|absmax)")
_TABLE = re.compile(r".*(\bbias|masked_bias|mask|position_ids|_index|_ids|_table)")


def check_all_is_read(checkpoint: Checkpoint, found: Iterable[Found]) -> None:
    """Refuse a checkpoint whose quantized tensors, of those found in it, are not all understood. Raises ValueError
    where one is not; the message names it, what it looks like, and the method config.json names."""
    method = checkpoint.quantization.get("quant_method")
    unread = [one for one in found if _unread(one, bool(method))]
    if not unread:
        return
    first = next((one for one in unread if _in_trouble(one)), unread[0])
    why = "; ".join(first.findings) or f"{first.dtype} codes whose meaning nothing says"
    said = f", quant_method {method!r} in config.json" if method else ""
    raise ValueError(
        f"{checkpoint.path}: all quantized tensors must be in a format that is read here, {len(unread)} are not{said}: "
        f"{first.name!r} {list(first.shape)}: {why}"
    )


def _unread(found: Found, quantized: bool) -> bool:
    if found.findings and _in_trouble(found):
        return True
    if found.format != "plain" or found.dtype not in _CODES or is_float(found):
        return False
    if _WEIGHT.fullmatch(found.name):
        return len(found.shape) > 0
    return quantized and len(found.shape) > 1 and not _TABLE.fullmatch(found.name)


def _in_trouble(found: Found) -> bool:
    return any(text.startswith("looks quantized") for text in found.findings)
