# SPDX-License-Identifier: Apache-2.0
"""One module per array framework, each with the same functions (`Framework`).

The framework of an array is told by the top-level module of its type, so that none is imported that
the user has not imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from breccia.autograd import Products
    from breccia.recipes import ScalingRecipe
    from breccia.scaled_tensor import ScaledTensor
    from breccia.verbs.cast_options import CastOptions

# Top-level module of an array's type -> module here. Everything else is NumPy's to convert.
_MODULES: dict[str, str] = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
_loaded: dict[str, Framework] = {}


class Framework(Protocol):
    """What a framework module provides."""

    namespace: Any  # a kernels.whole_array.namespace.Namespace

    def to_core(self, array: Any, argument: str) -> Any:
        """The array in a form the core reads without copying. One on another device, or a tracer, has
        shape and dtype but a null pointer."""

    def place(self, array: Any) -> Any:
        """The device, comparable with ``==``; None where there is but one."""

    def dtype(self, name: str) -> Any:
        """The dtype of a name, or the name where there is none."""

    def swap_last_axes(self, array: Any) -> Any:
        """A view with the last two axes swapped."""

    def native(self, array: Any, fmt: str) -> Any:
        """A view of codes of the format in the framework's own dtype for it; the array itself where there
        is none."""

    def to_dlpack(self, array: Any) -> tuple[Any, str]:
        """A view every importer of DLPack knows, and the name of the array's dtype."""

    def from_dlpack(self, exporter: Any, name: str) -> Any:
        """The array another framework exported, as a view in the dtype of that name."""

    def to_pickle(self, array: Any) -> tuple[Any, str]:
        """An array every pickler of the framework knows, and the name of the original's dtype."""

    def from_pickle(self, array: Any, name: str) -> Any:
        """The inverse of `to_pickle`."""

    def to_device(self, array: Any, device: Any) -> Any:
        """The array on another device."""

    def cast(self, x: Any, recipe: ScalingRecipe) -> ScaledTensor: ...

    def cast_with(self, x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor: ...

    def cast_scaled(self, x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> ScaledTensor:
        """Codes of ``x * factor`` and the scale ``1 / factor``, for a recipe of one scale per tensor."""

    def dequantize(self, scaled: ScaledTensor, dtype: Any, out: Any) -> Any: ...

    def requantize(self, scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor: ...

    def matmul(self, a: Any, b: Any, out_dtype: Any, precision: str) -> Any: ...

    def straight_through(self, x: Any, recipe: ScalingRecipe, clip: tuple[Any, Any] | None) -> Any:
        """dequantize(cast(x)) with the gradient of the identity; zero outside of ``clip``."""

    def linear(self, x: Any, w: Any, products: Products, seed: Any) -> Any:
        """``products.forward(x, w)`` with the gradients of ``products``."""


def of(array: Any) -> Framework:
    """The framework of an array."""
    # Of the type of a parameter torch's compiler knows no name.
    name = _MODULES.get(array.__class__.__module__.partition(".")[0]) or _inherited(type(array))
    _ensure(name)
    return _loaded[name]


def _inherited(kind: type) -> str:
    """The framework of a subclass from elsewhere."""
    for base in kind.__mro__:
        name = _MODULES.get(base.__module__.partition(".")[0])
        if name is not None:
            return name
    return "numpy"


def named(name: str) -> Framework:
    """The framework of a name."""
    if name not in _MODULES.values():
        known = ", ".join(repr(n) for n in dict.fromkeys(_MODULES.values()))
        raise ValueError(f"framework must be one of {known}, got {name!r}")
    return _load(name)


def is_named(name: str) -> bool:
    """Whether there is a framework of that name."""
    return name in _MODULES.values()


def common(*arrays: Any) -> Framework:
    """The one framework of several arrays, which are on one device."""
    framework = of(arrays[0])
    for array in arrays[1:]:
        if of(array) is not framework:
            raise TypeError(f"operands must be of one framework, got {' and '.join(map(_kind, arrays))}")
    bound_to = getattr(framework, "bound_to", framework.place)
    places = [place for place in map(bound_to, arrays) if place is not None]
    for place in places[1:]:
        if place != places[0]:
            raise TypeError(f"operands must be on one device, got {' and '.join(map(str, places))}")
    return framework


def same_place(data: Any, **others: Any) -> None:
    """Refuses parts of a tensor that are not of one framework and device."""
    framework = of(data)
    home = framework.place(data)
    for argument, array in others.items():
        if array is None:
            continue
        if of(array) is not framework:
            raise TypeError(f"{argument} must be of the framework of data, {_kind(data)}, got {_kind(array)}")
        place = framework.place(array)
        if None not in (place, home) and place != home:
            raise TypeError(f"{argument} must be on the device of data, {home}, got {place}")


def on_host(array: Any) -> tuple[Any, str]:
    """An array of any framework and device as a NumPy array of a plain dtype, and the name of its own dtype."""
    exported, name = of(array).to_dlpack(array)
    if hasattr(exported, "cpu"):
        exported = exported.cpu()
    return np.asarray(exported), name


def __getattr__(name: str) -> Framework:
    if name not in _MODULES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _load(name)
    except ImportError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from None


def load_imported() -> None:
    """Load the modules of the frameworks that are already imported, which registers ScaledTensor with their
    trees, compilers and picklers."""
    for top, name in _MODULES.items():
        if top in ("torch", "jax") and _is_complete(sys.modules.get(top)):
            _load(name)


def _is_complete(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _kind(array: Any) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"


def _load(name: str) -> Framework:
    _ensure(name)
    return _loaded[name]


def _ensure(name: str) -> bool:
    if name not in _loaded:
        module: Any = importlib.import_module(f"breccia.frameworks.{name}")
        _loaded[name] = module
    return True


# What torch.compiler.assume_constant_result sets, without importing torch: the compiler runs the function when it
# meets it, so that a framework's module may be loaded while it traces.
_ensure._dynamo_marked_constant = True  # type: ignore[attr-defined]
