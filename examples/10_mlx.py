# SPDX-License-Identifier: Apache-2.0
"""Quantize with breccia, multiply with MLX. Needs MLX."""

import breccia
import mlx.core as mx
from breccia.frameworks.mlx import from_quantized, to_quantized

mx.random.seed(0)
weight, x = mx.random.normal((512, 1024)), mx.random.normal((8, 1024))

w = breccia.cast(weight, breccia.MXFP8BlockScaling())
codes, scales, mode = to_quantized(w)
y = mx.quantized_matmul(x, codes, scales, transpose=True, **mode)
print("difference to breccia's product:", mx.abs(y - breccia.linear(x, w)).max().item())

theirs = from_quantized(*mx.quantize(weight, mode="mxfp8"), "mxfp8")
same = mx.all(theirs.data == w.data).item() and mx.all(theirs.scale == w.scale).item()
print("bytes of mx.quantize:", "equal" if same else "different")
