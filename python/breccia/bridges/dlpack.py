# SPDX-License-Identifier: Apache-2.0
"""The buffers of a ScaledTensor from framework to framework without copying.

`ScaledTensor.to` is the everyday spelling. Codes of formats that DLPack's importers do not know travel as ``uint8``
(and bfloat16 scales as ``uint16``), and get their dtype back on the other side.
"""

from __future__ import annotations

from typing import Any

from breccia import frameworks
from breccia.bridges.contract import FileFormat
from breccia.scaled_tensor import ScaledTensor

NAME = "dlpack"

__all__ = ["from_dlpack", "to_dlpack"]


class Capsules(tuple[Any, Any]):
    """``(data, scale)`` as DLPack capsules. ``zero_point`` and ``global_scale`` are capsules or None; ``dtypes`` has
    the names of the four dtypes. A capsule can be consumed once."""

    zero_point: Any
    global_scale: Any
    dtypes: tuple[str | None, ...]


def to_dlpack(scaled: ScaledTensor) -> Capsules:
    """Export the buffers.

    Args:
        scaled: a ScaledTensor of any framework.

    Returns:
        A pair of capsules that any framework's ``from_dlpack`` takes, with the optional parts as attributes.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or is traced.
    """
    _check(scaled)
    export = frameworks.of(scaled.data).to_dlpack
    parts = (scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale)
    pairs = [(None, None) if part is None else export(part) for part in parts]
    exported = [None if array is None else array.__dlpack__() for array, _ in pairs]
    capsules = Capsules(exported[:2])
    capsules.zero_point, capsules.global_scale = exported[2:]
    capsules.dtypes = tuple(name for _, name in pairs)
    return capsules


def from_dlpack(scaled: ScaledTensor, framework: str) -> ScaledTensor:
    """The tensor in another framework; recipe, layout, zero point and global scale come along.

    Args:
        scaled: a ScaledTensor of any framework.
        framework: "numpy", "torch", "mlx" or "jax".

    Returns:
        ScaledTensor over the same memory, where both frameworks can share it.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or is traced.
        ValueError: there is no such framework.
        ImportError: it is not installed.
    """
    _check(scaled)
    frameworks.named(framework)
    return scaled.to(framework)


def _check(scaled: Any) -> None:
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"scaled must be a ScaledTensor, got {type(scaled).__name__}")


BRIDGE = FileFormat(
    name=NAME,
)
