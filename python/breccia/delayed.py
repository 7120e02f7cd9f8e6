# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: a tensor is quantized with a scale from its recent past.

The algorithm is TransformerEngine's (``transformer_engine/pytorch/quantization.py``): a step casts with the current
scale and records the tensor's amax at the front of a history; between steps the scale becomes
(fp8_max / amax) / 2^margin for the history's largest or newest amax, and the history moves on by one.

States are immutable: each function returns a new one. They work with arrays of any framework, inside ``jax.jit`` too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import formats, frameworks
from breccia.recipes import DelayedScaling
from breccia.scaled_tensor import ScaledTensor
from breccia.value.inputs import refuse_mask
from breccia.verbs.cast_options import CastOptions, Rounding

__all__ = ["AmaxHistory", "cast", "init", "record", "update"]


@dataclass(frozen=True, eq=False)
class AmaxHistory:
    """The state of one tensor.

    Attributes:
        amax: float32 ``(amax_history_len,)``; the newest first.
        scale: float32 ``()``: what values are multiplied with. Its reciprocal is the dequantization scale.
    """

    amax: Any
    scale: Any


def init(recipe: DelayedScaling, like: Any = None) -> AmaxHistory:
    """An empty history with scale 1, in the framework and on the device of ``like`` (default: NumPy).

    Args:
        recipe: its ``amax_history_len`` is the length.
        like: an array.

    Returns:
        The state to pass to `cast`.
    """
    like = np.zeros((), np.float32) if like is None else like
    xp = frameworks.of(like).namespace
    zeros = np.zeros(_checked(recipe).amax_history_len, np.float32)
    return AmaxHistory(xp.constant(zeros, "float32", like), xp.constant(1.0, "float32", like))


def record(state: AmaxHistory, x: Any) -> AmaxHistory:
    """The state with the amax of ``x`` at the front of its history, where that is larger than what is there:
    a tensor may be cast several times in a step.

    Args:
        state: of `init` or `cast`.
        x: a float array.

    Returns:
        A new state; ``state`` stays as it is.
    """
    refuse_mask(x, "x")
    xp = frameworks.of(x).namespace
    amax = abs(xp.astype(x, "float32")).max() if 0 not in x.shape else xp.constant(0.0, "float32", x)
    front = xp.maximum(_history(state).amax[:1], amax.reshape(1))
    return AmaxHistory(xp.concatenate([front, state.amax[1:]], 0), state.scale)


def update(state: AmaxHistory, recipe: DelayedScaling, algorithm: str = "max") -> AmaxHistory:
    """The state for the next step.

    Args:
        state: with this step's amax recorded.
        recipe: its format's maximum and its margin are used.
        algorithm: "max" of the history, or "most_recent".

    Returns:
        The history moved on by one, and the scale. An amax of zero, infinity or NaN leaves the scale as it
        is; one too small for float32 gives float32's largest number.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm must be 'max' or 'most_recent', got {algorithm!r}")
    xp = frameworks.of(_history(state).amax).namespace
    largest = xp.constant(3.4028234663852886e38, "float32", state.amax)  # float32's; torch.compile leaves names open
    amax = state.amax.max() if algorithm == "max" else state.amax[0]
    reach = xp.constant(formats.finfo(_checked(recipe).element).max, "float32", state.amax)
    warns = isinstance(amax, (np.ndarray, np.generic))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore") if warns else contextlib.nullcontext():
        scale = xp.minimum(
            xp.divide(xp.divide(reach, amax), xp.constant(2.0**recipe.margin, "float32", reach)), largest
        )
    usable = (amax > 0.0) & (amax <= largest)
    zero = xp.constant(np.zeros(1, np.float32), "float32", reach)
    moved = xp.concatenate([zero, state.amax[2:], state.amax[:1]], 0) if state.amax.shape[0] > 1 else zero
    return AmaxHistory(moved, xp.where(usable, scale, state.scale))


def cast(
    x: Any, recipe: DelayedScaling, state: AmaxHistory, *, rounding: Rounding = "nearest", seed: Any = None
) -> tuple[ScaledTensor, AmaxHistory]:
    """Quantize with the state's scale, and record the amax of ``x``.

    Args:
        x: float array of any shape with at least one axis.
        recipe: the format to quantize to.
        state: see `init` and `update`.
        rounding: as in `breccia.cast`.
        seed: as in `breccia.cast`.

    Returns:
        (ScaledTensor, state). Values beyond the format's range at that scale saturate.
    """
    made = frameworks.of(x).cast_scaled(x, _checked(recipe), _history(state).scale, CastOptions(rounding, seed))
    return made, record(state, x)


def _history(state: Any) -> AmaxHistory:
    if not isinstance(state, AmaxHistory):
        raise TypeError(f"state must be an AmaxHistory, which init makes, got {type(state).__name__}")
    return state


def _checked(recipe: DelayedScaling) -> DelayedScaling:
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"recipe must be a DelayedScaling, got {type(recipe).__name__}")
    return recipe
