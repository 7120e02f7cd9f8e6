# SPDX-License-Identifier: Apache-2.0
"""GPU kernels. Importing this module imports neither torch nor Triton; `TRITON_AVAILABLE` says whether the kernels
can run.

Where they cannot (no Triton, no CUDA device), there is nothing here but that flag.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

__all__ = ["TRITON_AVAILABLE"]

# Public name -> the module that has it.
_EXPORTS = {
    "cast": "ops",
    "cast_transpose": "ops",
    "dequantize": "ops",
    "requantize": "ops",
    "matmul": "products.dispatch",
    "linear": "products.dispatch",
    "grouped_matmul": "products.dispatch",
    "scaled_matmul_triton": "public",
    "block_scaled_matmul_triton": "public",
    "gpu_info": "public",
}


def _available() -> bool:
    if any(importlib.util.find_spec(name) is None for name in ("triton", "torch")):
        return False
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return True
    import torch

    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)


def __getattr__(name: str) -> Any:
    if name == "TRITON_AVAILABLE":
        value: Any = _available()
    elif name in _EXPORTS and __getattr__("TRITON_AVAILABLE"):
        value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["TRITON_AVAILABLE", *(_EXPORTS if __getattr__("TRITON_AVAILABLE") else ())]
