# SPDX-License-Identifier: Apache-2.0
"""torch as the whole-array kernels see it: any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from breccia.kernels.whole_array.namespace import Namespace

_NAN = {"float16": (0x7E00, torch.int16), "bfloat16": (0x7FC0, torch.int16)}


class Torch(Namespace):
    """`Namespace` for torch."""

    def astype(self, x: Any, dtype: str) -> Any:
        made = x.to(getattr(torch, dtype))
        if dtype in _NAN:  # which torch writes with any bits
            bits, integer = _NAN[dtype]
            nan = torch.full((), bits, dtype=integer, device=x.device).view(made.dtype)
            made = torch.where(x.isnan(), nan, made)
        return made

    def bits(self, x: Any) -> Any:
        return x.view(torch.int32)

    def floats(self, bits: Any) -> Any:
        return bits.view(torch.float32)

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value)).to(like.device, getattr(torch, dtype), non_blocking=True)
        return torch.full((), value, dtype=getattr(torch, dtype), device=like.device)

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        return torch.amax(x, axes, keepdim=True)

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        return torch.any(x, axes, keepdim=True)

    def sum(self, x: Any) -> Any:
        return torch.sum(x, dtype=torch.float64)

    def take(self, table: Any, index: Any) -> Any:
        return table[index.long()]

    def index(self, x: Any, axis: int, index: Any) -> Any:
        return torch.index_select(x, axis, torch.from_numpy(index).to(x.device, non_blocking=True))

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        return torch.nn.functional.pad(x, (0, cols, 0, rows))

    def is_known(self, x: Any) -> bool:
        return not torch.compiler.is_compiling()

    def is_zero(self, count: Any) -> bool:
        if not torch.compiler.is_compiling():
            return bool(count == 0)
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a second to import

        return bool(statically_known_true(count == 0))

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        if parts[0].itemsize == 1:  # torch joins bytes, but not codes of every format
            return torch.cat([part.view(torch.uint8) for part in parts], axis).view(parts[0].dtype)
        return torch.cat(parts, axis)

    def arange(self, n: int, like: Any) -> Any:
        return torch.arange(n, device=like.device).to(torch.int32)

    def integer(self, seed: Any, like: Any) -> Any:
        if isinstance(seed, int):
            return torch.full((), seed, dtype=torch.int64, device=like.device).to(torch.int32)
        return torch.as_tensor(seed, device=like.device).to(torch.int64).to(torch.int32)
