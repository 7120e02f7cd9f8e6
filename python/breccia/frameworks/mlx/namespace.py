# SPDX-License-Identifier: Apache-2.0
"""MLX for delayed scaling and grouped products: the few functions of the whole-array kernels' namespace they need."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from breccia.kernels.whole_array.namespace import Namespace


class Mlx(Namespace):
    """The part of `Namespace` that `breccia.delayed` and `breccia.verbs.grouped` use."""

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(getattr(mx, dtype))

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        return mx.array(value, getattr(mx, dtype))
