# SPDX-License-Identifier: Apache-2.0
"""Products of the rows of many experts by the weights of each (mixture of experts)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from breccia import frameworks
from breccia.scaled_tensor import A, ScaledTensor, check_kernels, data_of, ready
from breccia.verbs import _result_dtype, matmul

__all__ = ["grouped_matmul"]


def grouped_matmul(x: ScaledTensor[A] | A, w_stack: ScaledTensor[A], offsets: Any, out_dtype: Any = np.float32) -> A:
    """Rows ``offsets[e]`` to ``offsets[e + 1]`` of ``x`` times the transpose of the weight of expert e.

    Args:
        x: ScaledTensor or array ``(T, K)``, rows sorted by expert. On CUDA plain arrays are taken as
            bfloat16 or float16, and others rounded to bfloat16.
        w_stack: ScaledTensor ``(E, N, K)``.
        offsets: integers ``(E + 1,)`` that do not fall, from 0 to at most T. On CUDA they stay on the
            device: they are not checked, and the call does not synchronize.
        out_dtype: see `breccia.matmul`.

    Returns:
        Array ``(T, N)``; rows past ``offsets[E]`` are zero.

    Raises:
        TypeError: an operand is not what it must be, or operands are of different frameworks or devices.
        ValueError: the shapes do not match, or the offsets are not what they must be.

    Examples:
        >>> experts = [breccia.cast(np.ones((64, 256), np.float32), "fp8-block") for _ in range(2)]
        >>> x = np.ones((10, 256), np.float32)  # rows 0 to 3 are of expert 0, rows 4 to 9 of expert 1
        >>> breccia.grouped_matmul(x, breccia.stack(experts), [0, 4, 10]).shape
        (10, 64)
    """
    if type(w_stack) is ScaledTensor:
        again = getattr(frameworks.of(w_stack.data), "grouped_again", None)
        made: A | None = None if again is None else again(x, w_stack, offsets, out_dtype)
        if made is not None:
            return made
    if not isinstance(w_stack, ScaledTensor):
        raise TypeError(f"w_stack must be a ScaledTensor, got {type(w_stack).__name__}")
    check_kernels(x)
    check_kernels(w_stack)
    if not hasattr(x, "shape"):
        raise TypeError(f"x must be a ScaledTensor or an array, got {type(x).__name__}")
    if len(w_stack.shape) != 3 or w_stack.shape[0] == 0:
        raise ValueError(f"w_stack must be (E, N, K) of one expert or more, got shape {w_stack.shape}")
    if len(x.shape) != 2 or x.shape[1] != w_stack.shape[2]:
        raise ValueError(f"x must be (T, {w_stack.shape[2]}), got shape {tuple(x.shape)}")
    if tuple(np.shape(offsets)) != (w_stack.shape[0] + 1,):
        raise ValueError(f"offsets must have shape ({w_stack.shape[0] + 1},), got {tuple(np.shape(offsets))}")
    x, w_stack = ready(x), ready(w_stack)
    framework: Any = frameworks.common(data_of(x), data_of(w_stack))
    out_dtype = _result_dtype(x, w_stack, out_dtype, framework)
    result: A = getattr(framework, "grouped_matmul", by_expert)(x, w_stack, offsets, out_dtype)
    return result


def by_expert(x: Any, w_stack: ScaledTensor, offsets: Any, out_dtype: Any) -> Any:
    """One product per expert; reads the offsets on the host."""
    ends = checked_offsets(offsets, x.shape[0])
    some = [(e, start, stop) for e, (start, stop) in enumerate(itertools.pairwise(ends)) if start < stop] or [(0, 0, 0)]
    parts = [matmul(_rows(x, start, stop), _part(w_stack, e).mT, out_dtype) for e, start, stop in some]
    xp = frameworks.of(parts[0]).namespace
    return xp.pad(xp.concatenate(parts, 0), x.shape[0] - ends[-1], 0)


def checked_offsets(offsets: Any, rows: int) -> list[int]:
    """The offsets as a list of integers, which rise from 0 to at most the last row."""
    found = np.asarray(offsets)
    if found.dtype.kind not in "iu":
        raise TypeError(f"offsets must be integers, got dtype {found.dtype}")
    ends = [int(v) for v in found]
    if ends[0] != 0 or ends[-1] > rows or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"offsets must rise from 0 to at most {rows}, got {ends}")
    return ends


def _rows(x: Any, start: int, stop: int) -> Any:
    if not isinstance(x, ScaledTensor):
        return x[start:stop]
    if x._form.axis != -1 or getattr(x.layout, "block_m", 1) != 1:
        raise ValueError(f"x must be scaled along its rows, each by itself, got {x.layout}")
    return _part(x, slice(start, stop))


def _part(scaled: ScaledTensor, index: int | slice) -> ScaledTensor:
    """A view of some matrices of a batch, or rows of a matrix."""

    def of(part: Any) -> Any:
        return part if part is None or len(part.shape) == 0 else part[index]

    g = scaled.global_scale
    if g is not None and not isinstance(index, slice):
        g = of(g).reshape(())
    return scaled._with(
        data=scaled.data[index], scale=of(scaled.scale), zero_point=of(scaled.zero_point), global_scale=g
    )
