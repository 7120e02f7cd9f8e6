# SPDX-License-Identifier: Apache-2.0
"""The first five minutes: quantize, look, multiply, convert. Needs NumPy alone."""

import breccia
import numpy as np

rng = np.random.default_rng(0)
x = rng.standard_normal((16, 256), dtype=np.float32)  # activations (M, K)
w = rng.standard_normal((64, 256), dtype=np.float32)  # a weight stored (N, K), as checkpoints do

# Quantize. The result carries its scale, recipe and layout.
a = breccia.cast(x, breccia.Float8CurrentScaling())
q = breccia.cast(w, breccia.Float8BlockScaling(block_k=128))
print(q)
print(f"{q.nbytes:,} bytes instead of {w.nbytes:,}")

# Multiply. linear(a, q) is matmul(a, q.T); q.T is a view.
y = breccia.linear(a, q)
exact = x.astype(np.float64) @ w.T.astype(np.float64)
print(f"y {y.shape}, relative error {np.linalg.norm(y - exact) / np.linalg.norm(exact):.3f}")
assert np.array_equal(y, breccia.matmul(a, q.T))

# A weight stored (K, N) works too: its blocks then run along N, which they must divide.
w_kn = rng.standard_normal((256, 128), dtype=np.float32)
print("(K, N) weight:", breccia.matmul(a, breccia.cast(w_kn, breccia.Float8BlockScaling(block_k=128))).shape)

# What fewer bits cost: the share of the bytes, and the error of the product with x as it is.
for recipe in (breccia.INT8Scaling(), breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.INT4Scaling()):
    made = breccia.cast(w, recipe)
    error = np.linalg.norm(breccia.linear(x, made) - exact) / np.linalg.norm(exact)
    print(f"{recipe.name:6} {made.nbytes / w.nbytes:6.1%} of the bytes, {error:6.2%} error of the product")

# Back to floats, in the dtype of your choice. A ScaledTensor is also an array of its values.
back = breccia.dequantize(q, "float16")
print(back.dtype, back.shape, np.asarray(q)[0, :3])

# Convert to another recipe without a float copy of the whole tensor.
nvfp4 = breccia.requantize(q, breccia.NVFP4BlockScaling())
print(f"NVFP4: {nvfp4.nbytes:,} bytes, shape still {nvfp4.shape}")

# Buffers that are quantized already are wrapped, not copied.
same = breccia.from_buffer(q.data, q.scale, q.recipe, q.layout)
assert same.data is q.data
