# SPDX-License-Identifier: Apache-2.0
"""A linear layer in MXFP8 under jit and grad, forward and backward products scaled. Needs JAX."""

import breccia
import jax
import jax.numpy as jnp
from breccia.autograd import LinearRecipes, linear

keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (64, 128))
target = x @ jax.random.normal(keys[1], (128, 32))
w = jax.random.normal(keys[2], (32, 128))
recipes = LinearRecipes.mxfp8()


@jax.jit
def step(w):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((linear(x, w, None, recipes) - target) ** 2))(w)
    return loss, w - 0.5 * grad


for i in range(51):
    loss, w = step(w)
    if i % 10 == 0:
        print(f"step {i:3} loss {loss:.4f}")

scaled = jax.jit(lambda w: breccia.cast(w, breccia.MXFP8BlockScaling()))(w)
print(scaled, scaled.data.dtype)
