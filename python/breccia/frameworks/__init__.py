# SPDX-License-Identifier: Apache-2.0
"""One module per array framework, each with the same functions (`Framework`).

The framework of an array is told by the top-level module of its type, so that none is imported that
the user has not imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from breccia.recipes import ScalingRecipe
    from breccia.scaled_tensor import ScaledTensor

# Top-level module of an array's type -> module here. Everything else is NumPy's to convert.
_MODULES: dict[str, str] = {}
_loaded: dict[str, Framework] = {}


class Framework(Protocol):
    """What a framework module provides."""

    def to_core(self, array: Any, argument: str) -> Any:
        """The array in a form the core reads without copying."""

    def swap_last_axes(self, array: Any) -> Any:
        """A view with the last two axes swapped."""

    def cast(self, x: Any, recipe: ScalingRecipe) -> ScaledTensor: ...

    def dequantize(self, scaled: ScaledTensor, dtype: Any, out: Any) -> Any: ...

    def requantize(self, scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor: ...

    def matmul(self, a: Any, b: Any, out_dtype: Any) -> Any: ...


def of(array: Any) -> Framework:
    """The framework of an array."""
    top = type(array).__module__.partition(".")[0]
    return _load(_MODULES.get(top, "numpy"))


def common(*operands: Any) -> Framework:
    """The one framework of several operands (ScaledTensors count as their data).

    Raises:
        TypeError: they are of different frameworks.
    """
    arrays = [getattr(operand, "data", operand) if _is_scaled(operand) else operand for operand in operands]
    found = [of(array) for array in arrays]
    if any(framework is not found[0] for framework in found):
        kinds = " and ".join(f"{type(a).__module__.partition('.')[0]}.{type(a).__name__}" for a in arrays)
        raise TypeError(f"operands must be of one framework, got {kinds}")
    return found[0]


def _is_scaled(operand: Any) -> bool:
    from breccia.scaled_tensor import ScaledTensor

    return isinstance(operand, ScaledTensor)


def _load(name: str) -> Framework:
    if name not in _loaded:
        module: Any = importlib.import_module(f"breccia.frameworks.{name}")
        _loaded[name] = module
    return _loaded[name]
