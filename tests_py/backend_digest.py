# SPDX-License-Identifier: Apache-2.0
"""Run by test_backends.py in a process of its own: prints which backend ran, and a digest of what every
operation gave."""

import hashlib

import breccia
import cases
import numpy as np
import oracles


def digest():
    sha = hashlib.sha256()

    def add(array):
        if array is not None:
            sha.update(np.ascontiguousarray(oracles.bits(np.asarray(array))).tobytes())

    for name in breccia.formats.names():
        add(breccia.formats.encode(oracles.interesting_floats(name)[::3], name))
        add(breccia.formats.decode(np.arange(1 << oracles.width(name), dtype=np.uint8).repeat(3), name))
    for recipe in cases.RECIPES.values():
        for kind in ("normal", "lognormal", "sparse", "ties"):
            x = cases.heavy_tailed(kind, cases.shape_for(recipe, rows=17, blocks=3))
            x[3, 4], x[5, 1], x[9, 7] = np.nan, np.inf, -np.inf
            scaled = breccia.cast(x, recipe)
            again = breccia.requantize(scaled, breccia.Float8CurrentScaling(granularity="row"))
            drawn = breccia.cast(x, recipe, rounding="stochastic", seed=2**40 - 3)
            for made in (scaled, again, drawn):
                for part in (made.data, made.scale, made.zero_point, made.global_scale):
                    add(part)
            add(breccia.dequantize(scaled))
            add(breccia.dequantize(scaled, out_dtype="bfloat16"))
            add(breccia.dequantize(scaled.T, out_dtype="float16"))
    for recipe in cases.RECIPES.values():
        for scaled in states(recipe):
            for dtype in ("float32", "float16"):
                values = breccia.dequantize(scaled, out_dtype=dtype)
                add(np.where(np.isnan(values), np.asarray(np.nan, values.dtype), values))  # one NaN for all
    return sha.hexdigest()


def states(recipe):
    """Tensors that no cast made: any byte as a code, scales of both signs, some of them zero."""
    random = np.random.default_rng(11)
    made = breccia.cast(cases.normal(cases.shape_for(recipe, rows=17, blocks=3), seed=4), recipe)
    for zeros in (False, True):
        data = random.integers(0, 256, np.asarray(made.data).shape, np.uint8)
        scale = np.array(made.scale)
        if scale.dtype.itemsize > 1 and scale.dtype.kind != "u":
            sign = np.where(random.random(scale.shape) < 0.5, -1, 1).astype(scale.dtype)
            scale = (scale * (0 if zeros else 1) * sign).astype(scale.dtype)
        elif zeros and made.recipe.name == "NVFP4BlockScaling":
            scale = (scale.view(np.uint8) & 0 | 0x80).view(scale.dtype)
        parts = {"zero_point": made.zero_point, "global_scale": made.global_scale, "shape": made.shape}
        yield breccia.ScaledTensor(data, scale, recipe, made.layout, **parts)


def largest_matmul_error():
    """In units of the documented bound."""
    from test_ops import bound

    worst = 0.0
    for recipe in cases.RECIPES.values():
        w = breccia.cast(cases.normal((37, 256), seed=1), recipe)
        for rows in (1, 5, 33):
            x = cases.normal((rows, 256), seed=2)
            a, b = x.astype(np.float64), breccia.dequantize(w).astype(np.float64).T
            worst = max(worst, (np.abs(breccia.matmul(x, w.T) - a @ b) / bound(a, b)).max())
    return worst


if __name__ == "__main__":
    print(breccia.cpu_info()["backend"], digest(), largest_matmul_error())
