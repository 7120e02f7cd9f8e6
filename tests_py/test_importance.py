# SPDX-License-Identifier: Apache-2.0
"""Casts by importance: the scales of least weighted squared error, equal to a search over every scale there is."""

from itertools import product

import breccia
import numpy as np
import pytest
from breccia.recipes import all_recipes

RECIPES = {
    "nvfp4": breccia.NVFP4BlockScaling(),
    "nvfp4 torchao": breccia.NVFP4BlockScaling(scale_rule="torchao"),
    "nvfp4 one level": breccia.NVFP4BlockScaling(two_level=False),
    "nvfp4 divisor": breccia.NVFP4BlockScaling(global_scale_form="divisor"),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "mxfp4 floor": breccia.MXFP4BlockScaling(scale_rounding="floor"),
    "mxfp6": breccia.MXFP6BlockScaling(),
    "mxfp6 e3m2": breccia.MXFP6BlockScaling(fp6_format="E3M2"),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "fp8 block e8m0": breccia.Float8BlockScaling(scale_format="e8m0"),
    "fp8 block": breccia.Float8BlockScaling(),
    "fp8 tile": breccia.Float8BlockScaling(block_m=128),
    "fp8 row": breccia.Float8CurrentScaling(granularity="row"),
    "fp8 tensor": breccia.Float8CurrentScaling(),
    "fp8 tensor te": breccia.Float8CurrentScaling(scale_rule="transformer_engine"),
    "fp8 delayed": breccia.DelayedScaling(),
    "int4": breccia.INT4Scaling(group_size=32),
    "int4 bf16": breccia.INT4Scaling(group_size=32, scale_dtype="bf16"),
    "int4 fp32": breccia.INT4Scaling(group_size=64, scale_dtype="fp32"),
    "uint4": breccia.INT4Scaling(group_size=32, signed=False),
    "int4 asymmetric": breccia.INT4Scaling(group_size=32, signed=False, symmetric=False),
    "int8": breccia.INT8Scaling(),
    "int8 group": breccia.INT8Scaling(group_size=32, scale_dtype="fp16"),
    "int8 asymmetric": breccia.INT8Scaling(group_size=32, symmetric=False),
}
EXACT = [name for name, recipe in RECIPES.items() if "int4" in name or type(recipe).__name__[:2] in ("MX", "NV")]


def weights_and_importance(rows=24, columns=256, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, columns)) * np.exp(rng.normal(size=(rows, 1)))).astype(np.float32)
    return x, np.exp(spread * rng.normal(size=columns)).astype(np.float32)


def weighted_error(x, q, h):
    error = np.asarray(x, np.float64) - q.numpy().astype(np.float64)
    return np.sum(error * error * np.asarray(h, np.float64)[..., None, :], axis=-1)


def parts(q):
    arrays = q.data, q.scale, q.zero_point, q.global_scale
    return [None if array is None else np.asarray(array).tobytes() for array in arrays]


def search_of(recipe, search):
    return type(recipe)(**{**vars_of(recipe), "scale_search": search})


def vars_of(recipe):
    fields = recipe.to_dict()
    fields.pop("name")
    return fields


def test_every_recipe_is_here():
    takes = {kind for kind in all_recipes() if "Expanded" not in kind.__name__}
    assert {type(recipe) for recipe in RECIPES.values()} == takes
    for kind in set(all_recipes()) - takes:
        with pytest.raises(ValueError, match=f"importance needs a recipe without exponents, got {kind.__name__}"):
            breccia.cast(np.ones((4, 256), np.float32), kind(), importance=np.ones(256, np.float32))


@pytest.mark.parametrize(("name", "spread"), list(product(RECIPES, (0.0, 1.0, 3.0))))
def test_no_search_without_weights_is_better(name, spread):
    x, h = weights_and_importance(spread=spread)
    got = breccia.cast(x, RECIPES[name], importance=h)
    whole = "tensor" in name or "delayed" in name or "tile" in name
    for search in ("amax", "mse") if hasattr(RECIPES[name], "scale_search") else ("amax",):
        other = breccia.cast(x, search_of(RECIPES[name], search) if search == "mse" else RECIPES[name])
        mine, others = weighted_error(x, got, h), weighted_error(x, other, h)
        if whole:
            mine, others = mine.sum(), others.sum()
        assert np.all(mine <= others * (1 + 1e-5)), search


def grid_of(element):
    """Every finite value of a format."""
    values = breccia.formats.decode(np.arange(256, dtype=np.uint8), element).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def nearest_errors(x, h, scales, grid):
    """The weighted error of one block under each of some scales, in float64."""
    scaled = x[None].astype(np.float64) / scales[:, None]
    at = np.clip(np.searchsorted(grid, scaled), 1, len(grid) - 1)
    low, high = grid[at - 1], grid[at]
    value = np.where(scaled - low < high - scaled, low, high)
    return np.sum(h * (value * scales[:, None] - x) ** 2, axis=1)


def every_scale(recipe, q):
    """Every scale that a block may have, as numbers."""
    scale = breccia.recipes.choices(recipe).scale
    if scale == "float8_e8m0fnu":
        return 2.0 ** np.arange(-100, 100)
    if scale == "float8_e4m3fn":
        codes = np.arange(8 if getattr(recipe, "scale_rule", "") == "torchao" else 1, 127, dtype=np.uint8)
        values = breccia.formats.decode(codes, "float8_e4m3fn").astype(np.float64)
        if q.global_scale is None:
            return values
        level = float(q.global_scale)
        return values / level if recipe.global_scale_form == "divisor" else values * level
    bits = np.arange(1, 0x7C00 if scale == "float16" else 0x7F80, dtype=np.uint16)
    values = bits.view(np.float16) if scale == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float64)
    values = values[(values > 1e-5) & (values < 1e3)]
    return np.concatenate([values, -values]) if recipe.symmetric and recipe.signed else values


def continuous_best(x, h, levels):
    """The least error over all numbers as a scale, of either sign, of integers from levels[0] to levels[-1]."""
    best = np.inf
    for sign in (1, -1):
        y, w = sign * x.astype(np.float64), h.astype(np.float64)
        ends = np.abs(y)[:, None] / (np.arange(0, 8) + 0.5)
        edges = np.sort(ends[ends > 0])
        middles = np.concatenate([[edges[0] / 2], (edges[1:] + edges[:-1]) / 2])
        codes = np.clip(np.rint(y[None] / middles[:, None]), levels[0], levels[-1])
        cross, square = codes @ (w * y), (codes * codes) @ w
        gain = np.where(square > 0, cross * np.abs(cross) / np.maximum(square, 1e-300), 0)
        best = min(best, np.sum(w * y * y) - gain.max())
    return best


def brute_force(x, h, recipe, q):
    element, scale = recipe.element, breccia.recipes.choices(recipe).scale
    if element in ("int4", "uint4"):
        levels = np.arange(-8, 8.0) if element == "int4" else np.arange(16.0)
        if scale == "float32":
            return continuous_best(x, h, levels)
        zeros = range(16) if not recipe.symmetric else (0,)
        scales = every_scale(recipe, q)
        return min(nearest_errors(x, h, scales, levels - zero).min() for zero in zeros)
    return nearest_errors(x, h, every_scale(recipe, q), grid_of(element)).min()


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "spread"), list(product(EXACT, (0.0, 1.0, 3.0))))
def test_no_scale_at_all_is_better(name, spread):
    recipe = RECIPES[name]
    rows = 1 if "asymmetric" in name else 3
    x, h = weights_and_importance(rows, 64, spread, seed=5)
    x[0, 3] *= 8  # an outlier
    h[3] *= 0.01  # that hardly matters
    q = breccia.cast(x, recipe, importance=h)
    block = 64 // np.atleast_2d(np.asarray(q.scale)).shape[-1]
    errors = (np.asarray(h, np.float64) * (x.astype(np.float64) - q.numpy()) ** 2).reshape(rows, -1, block).sum(-1)
    for r in range(rows):
        for b in range(64 // block):
            at = slice(b * block, (b + 1) * block)
            assert errors[r, b] <= brute_force(x[r, at], h[at].astype(np.float64), recipe, q) * (1 + 2e-5)


CODED = [name for name, recipe in RECIPES.items() if "float8_e" in breccia.recipes.choices(recipe).scale]


@pytest.mark.parametrize(("name", "spread"), list(product(CODED, (0.0, 1.0, 3.0))))
def test_blocks_side_by_side_are_as_each_alone(name, spread):
    """Sixteen blocks are searched at once where a row has as many: the bytes are those of pieces with fewer."""
    x, h = weights_and_importance(12, 2048 + 128, spread, seed=9)
    x[:, ::37] *= 6  # outliers, some of which hardly matter
    x[1, :16], x[2, 128:256], x[3, 5], x[4, 40:60] = 0, 2.0**-60, np.inf, 2.0**50
    if name.startswith("nvfp4"):
        x[4] = x[6]  # a global scale for it would leave nothing of the others
    level = {"amax": float(np.abs(x[np.isfinite(x)]).max())} if name.startswith("nvfp4") and "one" not in name else {}
    whole = breccia.cast(x, RECIPES[name], importance=h, **level)
    for start in range(0, x.shape[1], 128):
        part = slice(start, start + 128)
        alone = breccia.cast(x[:, part], RECIPES[name], importance=h[part], **level)
        assert np.array_equal(whole.numpy()[:, part], alone.numpy(), equal_nan=True)
        size = alone.scale.shape[-1]
        at = slice(start // 128 * size, (start // 128 + 1) * size)
        assert np.asarray(whole.scale)[:, at].tobytes() == np.asarray(alone.scale).tobytes()


@pytest.mark.parametrize("name", RECIPES)
def test_powers_of_two_change_nothing(name):
    x, h = weights_and_importance(8, 256)
    q = breccia.cast(x, RECIPES[name], importance=h)
    assert parts(breccia.cast(x, RECIPES[name], importance=h * np.float32(2**-9))) == parts(q)
    if "one level" in name:
        return  # E4M3 alone has not the range
    other = breccia.cast(x * np.float32(8), RECIPES[name], importance=h * np.float32(4))
    assert other.data.tobytes() == q.data.tobytes()
    assert np.array_equal(other.numpy(), q.numpy() * 8)


@pytest.mark.parametrize("name", RECIPES)
def test_threads_backends_and_strides_change_nothing(name):
    x, h = weights_and_importance(130, 384, 2.0)
    before, backend = breccia.num_threads(), breccia.cpu_info()["backend"]
    seen = []
    try:
        for b in breccia.cpu_info()["supported"]:
            breccia.set_backend(b)
            for threads in (1, 3):
                breccia.set_num_threads(threads)
                seen.append(parts(breccia.cast(x, RECIPES[name], importance=h)))
        seen.append(parts(breccia.cast(np.asfortranarray(x), RECIPES[name], importance=np.repeat(h, 2)[::2])))
        seen.append(parts(breccia.cast(x, RECIPES[name], importance=h.astype(np.float64))))
    finally:
        breccia.set_backend(backend)
        breccia.set_num_threads(before)
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_what_is_no_importance_counts_as_the_mean_of_the_others(bad):
    x, h = weights_and_importance(8, 64)
    mean = np.float32(np.delete(h, [5, 9]).astype(np.float64).mean())
    h[[5, 9]] = bad
    filled = h.copy()
    filled[[5, 9]] = mean
    for recipe in RECIPES.values():
        assert parts(breccia.cast(x[:, :64].repeat(4, 1), recipe, importance=np.tile(h, 4))) == parts(
            breccia.cast(x[:, :64].repeat(4, 1), recipe, importance=np.tile(filled, 4))
        )
    x, h = weights_and_importance(8, 256)
    none = np.full_like(h, bad)
    for recipe in RECIPES.values():
        assert parts(breccia.cast(x, recipe, importance=none)) == parts(
            breccia.cast(x, recipe, importance=np.ones_like(h))
        )


def test_experts_have_their_own_importance_or_that_of_all():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 16, 128)).astype(np.float32)
    h = np.exp(rng.normal(size=(3, 128))).astype(np.float32)
    h[1] = 0  # never chosen
    pooled = ((h[0].astype(np.float64) + h[2]) / 2).astype(np.float32)
    for recipe in (RECIPES["mxfp4"], RECIPES["int4"], RECIPES["fp8 block"], RECIPES["int8"]):
        q = breccia.cast(x, recipe, importance=h)
        for expert, own in enumerate((h[0], pooled, h[2])):
            one = breccia.cast(x[expert], recipe, importance=own)
            assert np.array_equal(q.numpy()[expert], one.numpy())
        assert parts(breccia.cast(x, recipe, importance=h[0])) == parts(
            breccia.cast(x, recipe, importance=np.tile(h[0], (3, 1)))
        )


def test_blocks_of_zeros_and_of_what_is_not_finite():
    x, h = weights_and_importance(16, 128)
    x[0] = 0
    x[1, 7], x[2, 9] = np.inf, np.nan
    for name, recipe in RECIPES.items():
        if "tensor" in name or "delayed" in name or "tile" in name:
            continue
        q, plain = breccia.cast(x, recipe, importance=h), breccia.cast(x, recipe)
        assert not q.numpy()[0].any()
        block = q.numpy()[1:3, :16], plain.numpy()[1:3, :16]
        assert np.array_equal(*block, equal_nan=True), name


def test_options_beside_importance():
    x, h = weights_and_importance(32, 256)
    recipe = RECIPES["nvfp4"]
    q = breccia.cast(x, recipe, importance=h)
    drawn = breccia.cast(x, recipe, importance=h, rounding="stochastic", seed=1)
    assert np.asarray(drawn.scale).tobytes() == np.asarray(q.scale).tobytes()
    assert drawn.data.tobytes() != q.data.tobytes()
    square = breccia.cast(x, recipe, importance=h, square_blocks=True)
    scale = np.asarray(square.scale).view(np.uint8).reshape(2, 16, -1)
    assert (scale == scale[:, :1]).all()
    part = breccia.cast(x[:8], recipe, importance=h, amax=float(np.abs(x).max()))
    assert part.data.tobytes() == q.data[:8].tobytes()
    for options, message in (
        ({"hadamard": breccia.Hadamard(16)}, "hadamard must be absent where importance is given"),
        ({"importance": h[:-1]}, r"importance must be \(256,\) for x of shape \(32, 256\), got shape \(255,\)"),
        ({"importance": -h}, "importance must not be negative, got -"),
    ):
        with pytest.raises(ValueError, match=message):
            breccia.cast(x, recipe, **{"importance": h, **options})
    with pytest.raises(ValueError, match="amax must be absent where importance is given"):
        breccia.cast(x, RECIPES["fp8 row"], importance=h, amax=np.ones(32, np.float32))
    with pytest.raises(TypeError, match="importance must be an array of numbers"):
        breccia.cast(x, recipe, importance="imatrix.gguf")


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int4 asymmetric", "fp8 tile", "int8"])
def test_frameworks_give_the_same_bytes(framework, name):
    x, h = weights_and_importance(32, 256)
    recipe = RECIPES[name]
    wanted = parts(breccia.cast(x, recipe, importance=h))
    if framework == "torch":
        torch = pytest.importorskip("torch")
        made = breccia.cast(torch.from_numpy(x), recipe, importance=torch.from_numpy(h))
        with pytest.raises(ValueError, match="x must have values for importance="):
            breccia.cast(torch.from_numpy(x).to("meta"), recipe, importance=h)
    elif framework == "jax":
        jax = pytest.importorskip("jax")
        made = breccia.cast(jax.numpy.asarray(x), recipe, importance=jax.numpy.asarray(h))
        with pytest.raises(ValueError, match="x must not be traced for importance="):
            jax.jit(lambda x: breccia.cast(x, recipe, importance=h))(x)
        with pytest.raises(TypeError, match="importance must be an array of numbers"):
            jax.jit(lambda h: breccia.cast(jax.numpy.asarray(x), recipe, importance=h))(h)
    else:
        mx = pytest.importorskip("mlx.core")
        made = breccia.cast(mx.array(x), recipe, importance=mx.array(h))
    assert parts(made.to("numpy")) == wanted


@pytest.mark.parametrize("values", [[3 * 2**-9], [4.5 * 2**-9, 1.5 * 2**-9], [2**-11], [7 * 2**-9, 3.5 * 2**-9]])
def test_the_smallest_scales_are_searched(values):
    """E4M3 has numbers below 2^-5 of which no half is one; and where amax's scale is zero, others may be better."""
    recipe = breccia.NVFP4BlockScaling(two_level=False)
    for rows in (1, 16):  # blocks by themselves, and side by side
        x = np.zeros((rows, 256), np.float32)
        x[:, : len(values)] = values
        by_importance = breccia.cast(x, recipe, importance=np.ones(256, np.float32))
        found = weighted_error(x, by_importance, np.ones(256)).max()
        scaled = [
            brute_scale(x[0, :16], breccia.formats.decode(np.uint8(code), "float8_e4m3fn")) for code in range(127)
        ]
        assert found == pytest.approx(min(scaled), rel=1e-5, abs=1e-30)


def brute_scale(x, scale):
    """The error of a block under a scale."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * float(scale)
    return np.sum(np.min((np.abs(x.astype(np.float64))[:, None] - grid) ** 2, axis=1))
