# SPDX-License-Identifier: Apache-2.0
"""MLX for delayed scaling and grouped products: the few functions of the whole-array kernels' namespace they need."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_DTYPES = {"float32": mx.float32}


class Mlx:
    """The part of `breccia.kernels.whole_array.namespace.Namespace` that `breccia.delayed` and
    `breccia.verbs.grouped` use."""

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(_DTYPES[dtype])

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        return mx.array(value, _DTYPES[dtype])

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return mx.where(condition, a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return mx.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return mx.maximum(a, b)

    def divide(self, a: Any, b: Any) -> Any:
        return a / b

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return mx.concatenate(parts, axis)

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        return mx.pad(x, [(0, rows), (0, cols)])
