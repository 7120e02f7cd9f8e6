# SPDX-License-Identifier: Apache-2.0
"""Experts that are matrices of one parameter, as transformers has them: what rows each of them is given.

Such a parameter (E, N, K) or (E, K, N) is no layer with a hook. While a model runs, products whose second factor lies
in the parameter's memory are looked at: where in it says which expert it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Called with a parameter's name, the number of the expert, and the rows (R, K) that it is multiplied with.
Seen = Callable[[str, int, torch.Tensor], None]


class FusedExperts:
    """Experts of one parameter of a module: (E, N, K), or (E, K, N)."""

    def __init__(self, module: torch.nn.Module, key: str) -> None:
        self._module, self._key = module, key
        self.count = int(self.parameter.shape[0])

    @property
    def parameter(self) -> torch.Tensor:
        found = getattr(self._module, self._key)
        assert isinstance(found, torch.Tensor)
        return found


def fused_experts(model: torch.nn.Module) -> dict[str, FusedExperts]:
    """Name of each parameter that is a matrix for each expert → what it is."""
    return {
        f"{name}.{key}" if name else key: FusedExperts(module, key)
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and "proj" in key and "bias" not in key
    }


@contextlib.contextmanager
def products_of(model: torch.nn.Module, experts: dict[str, FusedExperts], seen: Seen) -> Iterator[None]:
    """While inside, calls ``seen`` with what each expert is multiplied with. Models of transformers take the way that
    multiplies with one expert after the other meanwhile."""
    if not experts:
        yield
        return
    ways = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
    if ways is not None:
        model.set_experts_implementation("eager")
    try:
        with _Products(experts, seen):
            yield
    finally:
        if ways is not None:
            model.set_experts_implementation(ways)


class _Products(TorchFunctionMode):  # type: ignore[misc]  # torch.overrides says no types
    """Looks at the products with experts' matrices."""

    def __init__(self, experts: dict[str, FusedExperts], seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._places = {one.parameter.untyped_storage().data_ptr(): (name, one) for name, one in experts.items()}

    def __torch_function__(self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__", "bmm") and len(args) > 1:
            self._look(func.__name__, args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _look(self, func: str, x: Any, matrix: Any) -> None:
        if not isinstance(matrix, torch.Tensor) or not isinstance(x, torch.Tensor):
            return
        found = self._places.get(matrix.untyped_storage().data_ptr())
        if found is None:
            return
        name, one = found
        if matrix.ndim == 2:
            number = (matrix.storage_offset() - one.parameter.storage_offset()) // one.parameter.stride(0)
            if func == "linear" or x.shape[-1] == matrix.shape[0]:
                self._seen(name, number, x.detach().reshape(-1, x.shape[-1]))
        elif matrix.ndim == x.ndim == 3 and len(x) == one.count:
            for number, rows in enumerate(x.detach()):  # of rows that an expert was not chosen for there are zeros
                self._seen(name, number, rows[rows.any(-1)])


def untouched(experts: dict[str, FusedExperts], known: set[str]) -> list[str]:
    """Modules whose experts were multiplied with nothing that was seen."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in experts if name not in known))
