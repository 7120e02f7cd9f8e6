# SPDX-License-Identifier: Apache-2.0
"""The recipes and tensors that the tests loop over."""

import dataclasses

import breccia
import numpy as np
import pytest

ROUNDINGS = ("rceil", "floor", "ceil", "even")

# Every recipe, with each of its options away from the default at least once.
RECIPES = {
    "delayed": breccia.DelayedScaling(),
    "delayed-e5m2-margin": breccia.DelayedScaling(fp8_format="E5M2", margin=1),
    "current": breccia.Float8CurrentScaling(),
    "current-e5m2": breccia.Float8CurrentScaling(fp8_format="E5M2"),
    "current-fnuz": breccia.Float8CurrentScaling(fp8_format="float8_e4m3fnuz"),
    "delayed-b11": breccia.DelayedScaling(fp8_format="float8_e4m3b11fnuz"),
    "row-fnuz-e5m2": breccia.Float8CurrentScaling(fp8_format="float8_e5m2fnuz", granularity="row"),
    "block-64-ieee": breccia.Float8BlockScaling(fp8_format="float8_e4m3", block_k=64),
    "block-32-e3m4": breccia.Float8BlockScaling(fp8_format="float8_e3m4", block_k=32, scale_format="e8m0"),
    "current-row": breccia.Float8CurrentScaling(granularity="row"),
    "block": breccia.Float8BlockScaling(),
    "block-64-e5m2": breccia.Float8BlockScaling(fp8_format="E5M2", block_k=64),
    "block-128x128": breccia.Float8BlockScaling(block_m=128),
    "block-tile-bf16": breccia.Float8BlockScaling(block_k=64, block_m=2, scale_format="bf16"),
    "block-e8m0": breccia.Float8BlockScaling(scale_format="e8m0"),
    "block-mse": breccia.Float8BlockScaling(block_k=32, scale_search="mse"),
    "expanded": breccia.Float8ExpandedScaling(),
    "expanded-32-e5m2": breccia.Float8ExpandedScaling(fp8_format="E5M2", group_size=32),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp8-e5m2": breccia.MXFP8BlockScaling(fp8_format="E5M2"),
    "mxfp8-floor": breccia.MXFP8BlockScaling(scale_rounding="floor"),
    "mxfp8-mse": breccia.MXFP8BlockScaling(scale_search="mse"),
    "mxfp6-e2m3": breccia.MXFP6BlockScaling(),
    "mxfp6-e3m2": breccia.MXFP6BlockScaling(fp6_format="E3M2", scale_rounding="ceil"),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "mxfp4-even": breccia.MXFP4BlockScaling(scale_rounding="even"),
    "mxfp4-mse": breccia.MXFP4BlockScaling(scale_search="mse"),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "nvfp4-one-level": breccia.NVFP4BlockScaling(two_level=False),
    "nvfp4-torchao": breccia.NVFP4BlockScaling(scale_rule="torchao"),
    "nvfp4-divisor": breccia.NVFP4BlockScaling(global_scale_form="divisor"),
    "nvfp4-mse": breccia.NVFP4BlockScaling(scale_search="mse"),
    "int4": breccia.INT4Scaling(),
    "int4-32-bf16": breccia.INT4Scaling(group_size=32, scale_dtype="bf16"),
    "int4-fp32": breccia.INT4Scaling(group_size=64, scale_dtype="fp32"),
    "int4-asymmetric": breccia.INT4Scaling(symmetric=False, signed=False),
    "int4-asymmetric-mse": breccia.INT4Scaling(symmetric=False, signed=False, scale_search="mse"),
    "int4-unsigned": breccia.INT4Scaling(signed=False),
    "int4-mse": breccia.INT4Scaling(group_size=32, scale_search="mse"),
    "int8": breccia.INT8Scaling(),
    "int8-32": breccia.INT8Scaling(group_size=32),
    "int8-asymmetric": breccia.INT8Scaling(group_size=32, symmetric=False),
    "int8-fp16": breccia.INT8Scaling(group_size=64, scale_dtype="fp16"),
    "int8-expanded": breccia.INT8ExpandedScaling(group_size=32),
}
ALL = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def those(suits):
    """Parametrises over the recipes that a function of them says true of."""
    chosen = {key: value for key, value in RECIPES.items() if suits(value)}
    assert chosen
    return pytest.mark.parametrize("recipe", chosen.values(), ids=chosen.keys())


def some(names):
    """Parametrises over recipes by the beginning of their ids: some("mx nvfp4")."""
    chosen = {key: value for key, value in RECIPES.items() if key.startswith(tuple(names.split()))}
    return pytest.mark.parametrize("recipe", chosen.values(), ids=chosen.keys())


def block_width(recipe):
    """How many elements along the last axis share a scale; 1 where the whole row or tensor does."""
    for field in ("block_k", "block_size", "group_size"):
        if getattr(recipe, field, None):
            return getattr(recipe, field)
    return 1


def is_block(recipe):
    """Scaled in blocks along the last axis: the rank matters, and the axis' length unless tiles may be
    ragged."""
    return block_width(recipe) > 1


def amax_twin(recipe):
    """The same recipe without the search for a better scale."""
    return dataclasses.replace(recipe, scale_search="amax") if hasattr(recipe, "scale_search") else recipe


def may_be_ragged(recipe):
    return getattr(recipe, "block_m", 1) > 1


def normal(shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def heavy_tailed(kind, shape, seed=0):
    """Tensors that look like trouble: tails, rows of different size, coarse mantissas, exact ties, ends of
    the range."""
    rng = np.random.default_rng(seed)
    rows = 10.0 ** rng.uniform(-6, 6, (*shape[:-1], 1))
    x = rng.standard_normal(shape)
    if kind == "student":
        x = rng.standard_t(2, shape)
    elif kind == "lognormal":
        x = rng.lognormal(0, 2, shape) * rng.choice([-1, 1], shape) * rows
    elif kind == "spread":
        x = x * rows
    elif kind == "bf16":
        x = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif kind == "sparse":
        x = x * (rng.random(shape) < 0.1)
        x[..., 0] = 1.0  # no block of zeros only in the first column of blocks; the others may have them
    elif kind == "ties":  # small multiples of half a step: most elements sit exactly on a rounding boundary
        x = rng.integers(-28, 29, shape) / 4.0
    elif kind == "powers":
        x = np.ldexp(rng.choice([-1.0, 1.0], shape), rng.integers(-20, 20, shape))
    elif kind == "constant":
        x = np.full(shape, 0.1)
    elif kind == "outlier":
        x[..., 5] *= 1e5
    elif kind == "tiny":
        x = x * 1e-30
    elif kind == "huge":
        x = np.clip(x, -3, 3) * 1e36
    elif kind != "normal":
        raise ValueError(kind)
    return x.astype(np.float32)


DATA = (
    "normal",
    "student",
    "lognormal",
    "spread",
    "bf16",
    "sparse",
    "ties",
    "powers",
    "constant",
    "outlier",
    "tiny",
    "huge",
)


def shape_for(recipe, rows=6, blocks=2, at_least=32):
    width = block_width(recipe)
    return rows, width * max(blocks, -(-at_least // width))
