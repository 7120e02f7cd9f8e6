# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a checkpoint are rounded: by the core, or on a GPU by torch's tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import verbs
from breccia.calibration.error_feedback import GptqReport, Order, gptq_by_torch, gptq_reported
from breccia.peers import require
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.inputs import check_float32


def _place(name: str) -> str:
    """The device by its name of torch. Raises ImportError where torch is not installed, ValueError where torch has no
    such device here."""
    torch = require("torch", "torch")
    if not torch.cuda.is_available():
        raise ValueError(f"device must be 'cpu' where torch {torch.__version__} finds no CUDA device, got {name!r}")
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise ValueError(f"device must be one of {count} CUDA devices, 'cuda:0' being the first, got {name!r}")
    return name


@dataclass(frozen=True)
class Device:
    """One device; can be pickled. What a cast makes has the same bytes on each.

    Attributes:
        place: by its name of torch; None: the CPU, by the core.
    """

    place: str | None = None

    @classmethod
    def of(cls, name: str) -> Device:
        """The device "cpu", "cuda" or "cuda:N". Raises ImportError where it is a GPU, and torch is not installed,
        TypeError where it is no string, ValueError where it has another form, or there is none such here."""
        if not isinstance(name, str):
            raise TypeError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
            raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
        return cls(None if name == "cpu" else _place(name))

    def cast(self, values: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
        """`breccia.cast` of a NumPy array. By importance it searches on the CPU."""
        if self.place is None or options.get("importance") is not None:
            return verbs.cast(values, recipe, **options)
        check_float32(values, "x")
        return _here(verbs.cast(self.tensor(values), recipe, **options))

    def requantize(self, scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
        """`breccia.requantize` of NumPy arrays."""
        if self.place is None:
            return verbs.requantize(scaled, recipe)
        there = scaled.map(_writable).to("torch").to(self.place)
        return _here(verbs.requantize(there, recipe))

    def gptq(
        self, values: Any, moments: Any, recipe: ScalingRecipe, order: Order, damp: float
    ) -> tuple[ScaledTensor, GptqReport]:
        """`breccia.gptq` of a NumPy array, and what it had to do."""
        if self.place is None:
            return gptq_reported(values, moments, recipe, order=order, damp=damp)
        check_float32(values, "w")
        made, report = gptq_by_torch(self.tensor(values), moments, recipe, order, damp)
        return _here(made), report

    def tensor(self, array: Any) -> Any:
        """An array of floats of NumPy or ml_dtypes as a tensor of torch on the device, which must be one of torch."""
        torch = require("torch", "torch")
        host = _writable(np.asarray(array))
        halves = host.dtype.name == "bfloat16"
        made = torch.from_numpy(host.view(np.uint16)).view(torch.bfloat16) if halves else torch.from_numpy(host)
        return made.to(self.place)


def _writable(array: Any) -> Any:
    """The array, or a copy of one that may not be written to, which torch would take with a warning."""
    return array if array.flags.writeable else array.copy()


def _here(scaled: ScaledTensor) -> ScaledTensor:
    """As a cast of a NumPy array: codes are bytes."""
    made = scaled.cpu().to("numpy")
    return made._with(data=made.data.view(np.uint8))
