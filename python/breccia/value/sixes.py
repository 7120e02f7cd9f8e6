# SPDX-License-Identifier: Apache-2.0
"""6-bit codes four in three bytes, the first from the lowest bit on, and one per byte: arrays of any framework."""

from __future__ import annotations

from typing import Any

from breccia import frameworks


def pack(codes: Any) -> Any:
    """Bytes ``(..., 3 K / 4)`` of codes ``(..., K)``, uint8; what a byte holds above six bits is left out."""
    framework = frameworks.of(codes)
    own = getattr(framework, "pack_sixes", None)
    packed = None if own is None else own(codes)
    if packed is not None:
        return packed
    a, b, c, d = _split(codes, 4)
    # By products and quotients: torch's DTensor shifts its parts wrongly, and says nothing.
    return _joined(framework, [(a & 63) | (b & 3) * 64, (b & 63) // 4 | (c & 15) * 16, (c & 63) // 16 | (d & 63) * 4])


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    framework = frameworks.of(packed)
    own = getattr(framework, "unpack_sixes", None)
    codes = None if own is None else own(packed)
    if codes is not None:
        return codes
    a, b, c = _split(packed, 3)
    return _joined(framework, [a & 63, a // 64 | (b & 15) * 4, b // 16 | (c & 3) * 16, c // 4])


def _split(array: Any, parts: int) -> list[Any]:
    """Every ``parts``-th byte of each row, from each of the first on."""
    grouped = array.reshape(*array.shape[:-1], array.shape[-1] // parts, parts)
    return [grouped[..., i] for i in range(parts)]


def _joined(framework: Any, parts: list[Any]) -> Any:
    """The inverse of `_split`."""
    shape = parts[0].shape
    both = framework.namespace.concatenate([part[..., None] for part in parts], len(shape))
    return both.reshape(*shape[:-1], shape[-1] * len(parts))
