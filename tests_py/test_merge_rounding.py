# SPDX-License-Identifier: Apache-2.0
"""Rounding that keeps a small change of codes, of every recipe of weights, against the same in float64 by inverses."""

from typing import Any

import breccia
import breccia.bridges.scales
import breccia.comparison
import numpy as np
import pytest
from breccia import _core, recipes
from breccia.calibration.error_feedback import gptq_reported
from breccia.checkpoint.lora.feedback import OfMoments, OfRows, _codes, _grid, round_change

RECIPES: dict[str, Any] = {
    **{kind.__name__: kind() for kind in recipes.all_recipes() if not recipes.choices(kind()).expanded},
    "int4 without a sign, with zero points": breccia.INT4Scaling(group_size=32, symmetric=False, signed=False),
    "int8 in groups": breccia.INT8Scaling(group_size=32, scale_dtype="fp16"),
    "fp8 in squares": breccia.Float8BlockScaling(block_m=128),
    "nvfp4 of one level": breccia.NVFP4BlockScaling(two_level=False),
}
N, K, RANK, REST = 130, 256, 4, 0.05
COARSE = ("float4", "int4", "uint4", "float6")


def weight(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.02, (N, K)).astype(np.float32)


def change_of(scaled: Any, size: float, seed: int = 1) -> tuple[Any, Any]:
    """A change B @ A whose mean square is that of ``size`` of what rounding to the recipe loses, and A."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(RANK, K)), rng.normal(size=(N, RANK))
    product = b @ a
    lost = np.sqrt(np.square(weight() - breccia.dequantize(scaled)).mean())
    return (product * size * lost / np.sqrt(np.square(product).mean())).astype(np.float32), a.astype(np.float32)


def nearest(values: Any, old: Any) -> Any:
    if old.global_scale is None:
        return breccia.cast(values, old.recipe)
    amax = breccia.bridges.scales.global_scale(old, "multiplier").reshape(-1)[0] * np.float32(448 * 6)
    return breccia.cast(values, old.recipe, amax=amax)._with(global_scale=old.global_scale)


def kept(old: Any, new: Any, change: Any) -> float:
    dot, norm = breccia.comparison.kept(breccia.dequantize(old), breccia.dequantize(new), change)
    return dot / norm


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("moments", [False, True])
def test_as_gptq_by_the_inverse(name: str, moments: bool) -> None:
    """Codes are those of the update by the inverse's factor, in float64, and scales those there were."""
    old = breccia.cast(weight(), RECIPES[name])
    change, a = change_of(old, 0.3)
    inputs = np.random.default_rng(5).normal(size=(512, K)) @ np.random.default_rng(6).normal(size=(K, K))
    basis = np.linalg.svd(a.astype(np.float64), full_matrices=False)[2]
    metric = np.eye(K) * REST + basis.T @ basis
    feed: Any = OfRows(a, REST)
    if moments:
        full = (inputs.T @ inputs).astype(np.float32)
        mean = full.diagonal().mean(dtype=np.float64)
        metric = full + mean / REST * basis.T @ basis + 0.05 * mean * np.eye(K)
        feed = OfMoments(full, a, REST)
    values = breccia.dequantize(old) + change
    made = round_change(old, values, nearest(values, old), feed)
    step, zero = _grid(made)
    numbers = _codes(made)[0].astype(np.float64)
    drawn = np.random.default_rng([0, 0]).random((K, N), np.float32)
    factor = np.linalg.cholesky(np.linalg.inv(metric)).T
    left, wanted = values.astype(np.float64), np.empty((N, K))
    for c in range(K):
        scale = np.where(step[:, c] == 0, 1, step[:, c])
        ratio = np.clip((left[:, c] - zero[:, c]) / scale, numbers[0], numbers[-1])
        above = np.clip((numbers <= ratio[:, None]).sum(axis=1), 1, len(numbers) - 1)
        share = (ratio - numbers[above - 1]) / (numbers[above] - numbers[above - 1])
        at = np.where(drawn[c] < share, above, above - 1)
        wanted[:, c] = zero[:, c] + step[:, c] * numbers[at]
        left[:, c + 1 :] -= np.outer((left[:, c] - wanted[:, c]) / factor[c, c], factor[c, c + 1 :])
    # A tie that float32 decides otherwise changes the rest of its row.
    equal = np.isclose(breccia.dequantize(made), wanted, rtol=1e-5, atol=1e-7).all(axis=1)
    assert equal.mean() > 0.7
    energy = [np.einsum("ni,ij,nj->", e, metric, e) for e in (breccia.dequantize(made) - values, wanted - values)]
    assert energy[0] == pytest.approx(energy[1], rel=0.02)


def test_moments_with_a_negative_direction_are_damped_as_gptq_damps_them() -> None:
    ladder = [0.0]
    while ladder[-1] < 1:
        ladder.append(_core.more_damping(ladder[-1]))
    assert ladder == [0.0, 0.01, 0.1, 1.0]
    spread = np.random.default_rng(7).normal(size=(K, K))
    full = spread @ spread.T
    mean = full.diagonal().mean()
    full -= np.eye(K) * (np.linalg.eigvalsh(full)[0] + 0.3 * mean)  # more than 0.05 damps, and less than 0.5 does
    mean = full.diagonal().mean()
    low = np.linalg.eigvalsh(full)[0] / mean
    assert 0.05 < -low < 0.5
    damped = full + 10 * 0.05 * mean * np.eye(K)
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    fed = OfMoments(full.astype(np.float32)).inside(0, K)
    np.testing.assert_allclose(fed, upper / np.diag(upper), rtol=1e-3, atol=1e-4)
    _, report = gptq_reported(weight(), full.astype(np.float32), "int4:32")
    assert report.damp == pytest.approx(_core.more_damping(_core.more_damping(0.02)) if -low > 0.2 else 0.2)
    opposed = np.eye(K, dtype=np.float32) * 2 - 1
    with pytest.raises(ValueError, match="moments must be finite"):
        OfMoments(opposed)


def test_groups_with_exponents_are_refused() -> None:
    """Their codes lie on no even grid, on which a remainder could be fed to others."""
    old = breccia.cast(weight(), breccia.Float8ExpandedScaling())
    values = breccia.dequantize(old)
    with pytest.raises(ValueError, match="rounding 'feedback' needs a recipe without exponents, got Float8Expanded"):
        round_change(old, values, old, OfRows(values[:1]))


@pytest.mark.parametrize("name", RECIPES)
def test_a_small_change_is_kept(name: str) -> None:
    """Nearest keeps less than two thirds of a change of a fifth of the error of rounding, feedback nearly all."""
    old = breccia.cast(weight(), RECIPES[name])
    change, a = change_of(old, 0.2)
    values = breccia.dequantize(old) + change
    to_nearest = nearest(values, old)
    fed = round_change(old, values, to_nearest, OfRows(a, REST / 10))
    assert kept(old, fed, change) > 0.85
    if old.recipe.element.startswith(COARSE):
        assert kept(old, to_nearest, change) < 0.67
    lost = [np.linalg.norm((breccia.dequantize(x) - values) @ a.T) for x in (to_nearest, fed)]
    assert lost[1] < 0.5 * lost[0]
    assert (np.asarray(fed.scale) == np.asarray(old.scale)).mean() > 0.99


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_of_nothing_leaves_the_codes(name: str) -> None:
    old = breccia.cast(weight(), RECIPES[name])
    values = breccia.dequantize(old)
    other = nearest(values * np.float32(1.07), old)  # its scales are not those to be kept
    made = round_change(old, values, other, OfRows(np.eye(RANK, K, dtype=np.float32), REST))
    if other.global_scale is None or np.array_equal(other.global_scale, old.global_scale):
        np.testing.assert_array_equal(breccia.dequantize(made), values)


@pytest.mark.parametrize("name", RECIPES)
def test_a_large_change_takes_new_scales(name: str) -> None:
    """Where the old scales do not reach, those of rounding to nearest do: the error stays that of the recipe."""
    old = breccia.cast(weight(), RECIPES[name])
    change, a = change_of(old, 1)
    change *= np.float32(0.1 / np.abs(change).max())
    values = breccia.dequantize(old) + change
    to_nearest = breccia.cast(values, old.recipe)
    fed = round_change(old, values, to_nearest, OfRows(a, REST))
    lost = [np.linalg.norm(breccia.dequantize(x) - values) for x in (to_nearest, fed)]
    assert lost[1] < 1.6 * lost[0]
    assert abs(kept(old, fed, change) - 1) < 0.01
