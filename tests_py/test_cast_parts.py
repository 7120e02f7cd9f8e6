# SPDX-License-Identifier: Apache-2.0
"""A part of a tensor, cast with the whole's amax and its own position, has the bytes that the whole has there."""

import math

import breccia
import cases
import numpy as np
import pytest
from breccia import cast

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
from breccia.frameworks.torch import tensors  # noqa: E402
from breccia.kernels import whole_array  # noqa: E402

ROWS, COLS = 384, 512
ROW_CUTS = [(0, 128), (128, 384), (256, 256)]
COLUMN_CUTS = [(0, 128), (128, 512)]


def tensor(nan=False):
    x = cases.heavy_tailed("normal", (ROWS, COLS), 3)
    x[130, 200] = 1e4  # no other part has the whole's amax
    if nan:
        x[5, 7], x[140, 300], x[300, 2] = np.nan, np.inf, -np.inf
    return x


def crosses(recipe, axis):
    """Whether a scale follows from both sides of a cut."""
    kind = recipe.layout.name
    return kind == "per_tensor" or getattr(recipe, "two_level", False) or (kind == "per_channel" and axis == 1)


def can_be_cut(recipe, axis):
    searched = getattr(recipe, "scale_search", "amax") != "amax" and not getattr(recipe, "two_level", False)
    asymmetric = not getattr(recipe, "symmetric", True)
    return not crosses(recipe, axis) or not (searched or asymmetric)


def amax_of(x, recipe):
    finite = np.where(np.isfinite(x), np.abs(x), 0)
    if recipe.layout.name != "per_channel":
        return finite.max()
    rows = finite.max(1)
    if not breccia.formats.finfo(recipe.element).has_nan:
        rows[np.isnan(x).any(1)] = np.nan
    return rows


def part_of(array, axis, begin, end, extent):
    """Of a part of the whole that has one entry for several elements."""
    array = np.asarray(array)
    if array.ndim < 2 or array.shape[axis] == 1:
        return array
    per = extent / array.shape[axis]
    return array[(slice(None),) * axis + (slice(math.ceil(begin / per), math.ceil(end / per)),)]


def same(part, whole, axis, begin, end, extent):
    for name in ("data", "scale", "zero_point", "global_scale"):
        a, b = getattr(part, name), getattr(whole, name)
        assert (a is None) == (b is None)
        if a is not None:
            expected = part_of(b, axis, begin, end, extent)
            assert np.asarray(a).shape == expected.shape, name
            assert np.asarray(a).tobytes() == expected.tobytes(), name


def cuts(recipe):
    for axis, extent, ranges in ((0, ROWS, ROW_CUTS), (1, COLS, COLUMN_CUTS)):
        if can_be_cut(recipe, axis):
            for begin, end in ranges:
                yield axis, extent, begin, end


def options_of(x, recipe, axis, begin, seed):
    options = {"amax": amax_of(x, recipe)} if crosses(recipe, axis) else {}
    if seed is not None:
        offset = begin * COLS if axis == 0 else (begin, COLS)
        options |= {"rounding": "stochastic", "seed": seed, "offset": offset}
    return options


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("nan", [False, True])
@cases.ALL
def test_parts_are_those_of_the_whole(recipe, nan, seed):
    x = tensor(nan)
    whole = cast(x, recipe, **({} if seed is None else {"rounding": "stochastic", "seed": seed}))
    for axis, extent, begin, end in cuts(recipe):
        piece = x[begin:end] if axis == 0 else x[:, begin:end]
        options = options_of(x, recipe, axis, begin, seed)
        same(cast(piece, recipe, **options), whole, axis, begin, end, extent)


def takes_amax(recipe):
    axis = 1 if recipe.layout.name == "per_channel" else 0
    return crosses(recipe, axis) and can_be_cut(recipe, axis)


@pytest.mark.parametrize("factor", [0.5, 1e-3, 1e-30, 0.0])
@pytest.mark.parametrize("backend", breccia.cpu_info()["supported"])
@cases.those(takes_amax)
def test_values_beyond_the_amax_saturate(recipe, backend, factor):
    """The caller's amax may be too small: codes are then the largest, of the value's own sign, on every backend."""
    x = cases.normal((64, 256), 5)
    amax = amax_of(x, recipe) * np.float32(factor)
    expected = whole_array.cast(
        tensors.NAMESPACE, torch.from_numpy(x), recipe, breccia.verbs.cast_options.CastOptions(amax=amax)
    )
    before = breccia.cpu_info()["backend"]
    breccia.set_backend(backend)
    try:
        made = cast(x, recipe, amax=amax)
    finally:
        breccia.set_backend(before)
    assert (breccia.dequantize(made) * x >= 0).all()
    assert np.asarray(made.data).tobytes() == expected.data.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("recipe", "axis"),
    [
        pytest.param(recipe, axis, id=f"{name}-{axis}")
        for name, recipe in cases.RECIPES.items()
        for axis in (0, 1)
        if can_be_cut(recipe, axis)
    ],
)
def test_frameworks_make_the_cores_bytes(recipe, axis):
    x = tensor(nan=True)
    piece = x[128:256, :256] if axis == 0 else x[:128, 256:]
    options = options_of(x[: len(piece)] if axis else x, recipe, axis, 128 if axis == 0 else 256, 7)
    expected = cast(piece, recipe, **options)
    checked = breccia.verbs.cast_options.CastOptions(**options)
    made = {
        "torch": cast(torch.from_numpy(piece), recipe, **options),
        "JAX": cast(jax.numpy.asarray(piece), recipe, **options),
        "whole arrays of torch": whole_array.cast(tensors.NAMESPACE, torch.from_numpy(piece), recipe, checked),
    }
    for name, parts in made.items():
        for part in ("data", "scale", "zero_point", "global_scale"):
            a, b = getattr(parts, part), getattr(expected, part)
            if b is not None:
                a = a.contiguous().view(torch.uint8).numpy() if isinstance(a, torch.Tensor) and a.ndim else a
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (name, part)


def test_traced_amax_and_position():
    x = tensor()
    recipe = breccia.NVFP4BlockScaling()
    whole = cast(x, recipe, rounding="stochastic", seed=7)

    @jax.jit
    def of(piece, amax, begin):
        return cast(piece, recipe, rounding="stochastic", seed=7, amax=amax, offset=(begin * COLS, COLS))

    same(of(x[128:], np.abs(x).max(), 128), whole, 0, 128, ROWS, ROWS)
    alone = jax.jit(lambda x, at: cast(x, recipe, rounding="stochastic", seed=7, offset=at))(x, 0)
    same(alone, whole, 0, 0, ROWS, ROWS)


def test_amax_of_members_of_a_batch():
    """vmap leaves a divisor that compilers invert."""
    jax = pytest.importorskip("jax")
    batch = np.stack([tensor() * np.float32(1 + i / 7) for i in range(6)])
    for recipe in filter(takes_amax, cases.RECIPES.values()):
        amax = np.stack([amax_of(x, recipe) for x in batch])
        made = jax.vmap(lambda x, amax, recipe=recipe: cast(x, recipe, amax=amax))(batch, amax)
        for i, x in enumerate(batch):
            same(jax.tree.map(lambda part, i=i: part[i], made), cast(x, recipe), 0, 0, ROWS, ROWS)


@pytest.mark.parametrize(
    ("recipe", "options", "error", "message"),
    [
        (
            "mxfp8",
            {"amax": 1.0},
            ValueError,
            "recipe must have two levels, or one symmetric scale per tensor or row without a search, for amax to be "
            "given, got MXFP8BlockScaling",
        ),
        ("nvfp4", {"amax": [1.0, 2.0]}, ValueError, "amax must have 1 number, got 2"),
        ("nvfp4", {"amax": np.inf}, ValueError, "amax must be finite and not negative, got inf"),
        ("nvfp4", {"amax": np.nan}, ValueError, "amax must be finite and not negative, got nan"),
        ("nvfp4", {"amax": "big"}, TypeError, "amax must be a number or an array of numbers, got 'big'"),
        (
            "nvfp4",
            {"rounding": "stochastic", "seed": 1, "offset": 1.5},
            TypeError,
            "offset must be an integer or a pair of them (position, row length), got 1.5",
        ),
        (
            "nvfp4",
            {"offset": "3"},
            TypeError,
            "offset must be an integer or a pair of them (position, row length), got '3'",
        ),
        (
            "nvfp4",
            {"rounding": "stochastic", "seed": 1, "offset": -1},
            ValueError,
            "offset must not be negative, got -1",
        ),
    ],
)
def test_errors(recipe, options, error, message):
    with pytest.raises(error) as info:
        cast(np.ones((128, 128), np.float32), recipe, **options)
    assert str(info.value) == message
