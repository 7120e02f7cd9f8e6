# SPDX-License-Identifier: Apache-2.0
"""Quantize, multiply and recover NumPy arrays."""

import breccia
import numpy as np

rng = np.random.default_rng(0)
weight = rng.standard_normal((512, 1024), dtype=np.float32) * 0.02
x = rng.standard_normal((8, 1024), dtype=np.float32)

for recipe in (breccia.Float8CurrentScaling(), breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()):
    w = breccia.cast(weight, recipe)
    y = breccia.linear(x, w)
    exact = x @ weight.T
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    print(f"{recipe.name:8} {w.nbytes / weight.nbytes:.2f} of the bytes, {error:.2%} error of the product")

print(np.asarray(w)[0, :4], weight[0, :4])  # a ScaledTensor is an array of its values
print(w.view().scale.dtype)  # an ml_dtypes view of the same memory
