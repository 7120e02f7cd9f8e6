# SPDX-License-Identifier: Apache-2.0
"""torch's own functions, called with ScaledTensors: those that a verb stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from breccia.scaled_tensor import ScaledTensor


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``ScaledTensor.__torch_function__`` does."""
    form = _FORMS.get(func)
    if form is None:
        name = getattr(func, "__name__", str(func))
        if name in _REFLECTED:
            return NotImplemented
        known = ", ".join(_NAMES)
        raise TypeError(
            f"torch's {name} has no form for a ScaledTensor, which {known} have: dequantize() gives its values"
        )
    return form(*args, **kwargs)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 (torch's name)
    from breccia.frameworks.torch.direct import as_autocast
    from breccia.verbs import linear

    return linear(input if isinstance(input, ScaledTensor) else as_autocast(input), weight, bias)


def _product(input: Any, other: Any) -> Any:  # noqa: A002
    return input @ other if isinstance(input, ScaledTensor) else other.__rmatmul__(input)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    from breccia.value.joining import concatenate

    return concatenate(tensors, dim)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    from breccia.value.joining import stack

    if dim != 0:
        raise ValueError(f"dim must be 0 for ScaledTensors, got {dim}")
    return stack(tensors)


def _equal(input: Any, other: Any) -> bool:  # noqa: A002
    return isinstance(input, ScaledTensor) and isinstance(other, ScaledTensor) and bool(input == other)


_FORMS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _product),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    torch.stack: _stack,
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.Tensor.__rmatmul__: lambda right, left: _product(left, right),
    torch.numel: lambda input: input.numel(),  # noqa: A006
    torch.is_tensor: lambda obj: False,
}
_NAMES = ("F.linear", "matmul", "mm", "cat", "stack", "equal")
_REFLECTED = ("__eq__", "__ne__", "eq", "ne")  # Python asks the other operand then
