# SPDX-License-Identifier: Apache-2.0
"""Buffers to other frameworks through DLPack: see `breccia.dlpack`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from breccia.bridges._bridge import FileFormat
from breccia.recipes import ScalingRecipe

if TYPE_CHECKING:
    from breccia.scaled_tensor import ScaledTensor

NAME = "dlpack"
PEER = None
EXTRA = ""
RECIPES: dict[str, ScalingRecipe] = {}

__all__ = ["from_dlpack", "to_dlpack"]


def to_dlpack(scaled: ScaledTensor) -> Any:
    """``(data, scale)`` as DLPack capsules: see `breccia.dlpack.to_dlpack`."""
    from breccia import dlpack

    return dlpack.to_dlpack(scaled)


def from_dlpack(scaled: Any, framework: str) -> Any:
    """The buffers of a ScaledTensor in another framework: see `breccia.dlpack.from_dlpack`."""
    from breccia import dlpack

    return dlpack.from_dlpack(scaled, framework)


BRIDGE = FileFormat(
    name=NAME,
    peer=PEER,
    extra=EXTRA,
    recipes=RECIPES,
)
