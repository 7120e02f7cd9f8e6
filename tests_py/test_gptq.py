# SPDX-License-Identifier: Apache-2.0
"""GPTQ: beside the published algorithm in NumPy, and what must hold of it."""

import subprocess
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.calibration.error_feedback import gptq_reported
from breccia.moments import Moments
from test_importance import RECIPES, parts

# The multiplying rule of FP8 stores a rounded inverse of what its codes are made with.
NAMES = [name for name in RECIPES if "te" not in name.split()]


def layer(rows=24, columns=256, tokens=512, seed=0):
    """A weight, and the inputs of a layer whose columns go together and are of different size."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(tokens, columns // 4)) @ rng.normal(size=(columns // 4, columns))
    x = (mixed + rng.normal(size=(tokens, columns))) * np.exp(0.7 * rng.normal(size=columns))
    return rng.normal(size=(rows, columns)).astype(np.float32), x


def output_error(w, q, h):
    error = np.asarray(w, np.float64) - q.numpy().astype(np.float64)
    return np.einsum("nk,kl,nl->", error, np.asarray(h, np.float64), error)


def published(w, h, order, damp, encode):
    """GPTQ as its paper has it, in float64: columns in order, the update by the upper factor of the inverse."""
    at = np.argsort(-np.diag(h), kind="stable") if order == "act" else np.arange(len(h))
    damped = h.astype(np.float64) + damp * np.mean(np.diag(h)) * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(at, at)])).T
    rest, out = w[:, at].astype(np.float64), np.empty_like(w, np.float64)
    for i, column in enumerate(at):
        value = encode(column, rest[:, i])
        rest[:, i:] -= np.outer((rest[:, i] - value) / upper[i, i], upper[i, i:])
        out[:, column] = value
    return out


@pytest.mark.parametrize("order", ["act", "natural"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int4 asymmetric", "int8", "fp8 tile", "fp8 tensor"])
def test_codes_are_those_of_the_published_algorithm(name, order):
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    recipe = RECIPES[name]
    q = breccia.gptq(w, h, recipe, order=order)
    near = breccia.cast(w, recipe, importance=np.diag(h).copy())
    assert parts(q)[1:] == parts(near)[1:]  # scales, zero points, the global scale
    scale = np.asarray(near.scale)
    if scale.dtype == np.uint8:
        kind = "float8_e4m3fn" if name == "nvfp4" else "float8_e8m0fnu"
        scale = breccia.formats.decode(scale, kind)
    scale = scale.astype(np.float64) * (1 if near.global_scale is None else float(near.global_scale))
    rows, columns = (1, 1) if scale.ndim else (24, 256)
    scale = np.atleast_2d(scale)
    rows, columns = -(-24 // scale.shape[0]), 256 // scale.shape[1]
    scale = scale.repeat(rows, 0)[:24].repeat(columns, 1)
    zero = 0.0
    if near.zero_point is not None:
        zero = np.asarray(near.zero_point).astype(np.float64).repeat(columns, 1)
    values = breccia.formats.decode(np.arange(256, dtype=np.uint8), recipe.element).astype(np.float64)
    grid = np.unique(values[np.isfinite(values)])

    def encode(column, value):
        z = zero if np.isscalar(zero) else zero[:, column]
        scaled = value / scale[:, column] + z
        index = np.clip(np.searchsorted(grid, scaled), 1, len(grid) - 1)
        low, high = grid[index - 1], grid[index]
        return (np.where(scaled - low < high - scaled, low, high) - z) * scale[:, column]

    wanted = published(w, h, order, 0.02, encode)
    # A code beside a tie may go the other way, and what follows it in its row with it.
    same = np.isclose(q.numpy(), wanted, rtol=1e-5, atol=1e-7)
    assert same.mean() > 0.9 and same.all(1).mean() > 0.5
    mine, theirs = output_error(w, q, h), np.einsum("nk,kl,nl->", w - wanted, h.astype(np.float64), w - wanted)
    assert abs(mine / theirs - 1) < 0.02
    assert mine < 0.95 * output_error(w, near, h) or "fp8" in name or name == "int8"
    assert mine < output_error(w, near, h)


@pytest.mark.parametrize("name", NAMES)
def test_diagonal_moments_give_the_nearest(name):
    w, x = layer(40, 384)
    diagonal = (x * x).sum(0).astype(np.float32)
    wanted = parts(breccia.cast(w, RECIPES[name], importance=diagonal))
    assert parts(breccia.gptq(w, diagonal, RECIPES[name])) == wanted
    assert parts(breccia.gptq(w, np.diag(diagonal), RECIPES[name], order="natural")) == wanted
    ones = parts(breccia.cast(w, RECIPES[name], importance=np.ones(384, np.float32)))
    assert parts(breccia.gptq(w, np.eye(384, dtype=np.float32), RECIPES[name], damp=0.0)) == ones


def test_nothing_else_changes_the_bytes():
    w, x = layer(70, 512)
    h = (x.T @ x).astype(np.float32)
    before = breccia.num_threads()
    for name in ("nvfp4", "int4 asymmetric"):
        seen = []
        for threads in (1, 2, 5):
            breccia.set_num_threads(threads)
            seen.append(parts(breccia.gptq(w, h, RECIPES[name])))
        breccia.set_num_threads(before)
        seen.append(parts(breccia.gptq(np.asfortranarray(w), h * np.float32(2**-12), RECIPES[name])))
        seen.append(parts(breccia.gptq(w, h.astype(np.float64), RECIPES[name])))
        assert all(one == seen[0] for one in seen)


def test_moments_of_each_level():
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    block = np.stack([h[i : i + 16, i : i + 16] for i in range(0, 256, 16)])
    known = {"diag": np.diag(h).copy(), "count": np.asarray(len(x))}
    errors = []
    for level, more in (("diag", {}), ("block", {"block": block}), ("full", {"full": h, "block": block})):
        q, report = gptq_reported(w, Moments(**known, **more), "int4:32")
        assert report.level == level and report.damp == 0.02 and report.dead == report.nearest == 0
        errors.append(output_error(w, q, h))
    assert errors[2] < errors[0]


@pytest.mark.parametrize("order", ["act", "natural"])
@pytest.mark.parametrize("name", RECIPES)
def test_moments_of_runs_give_the_codes_of_a_matrix_that_is_zero_elsewhere(name, order):
    """The matrix is factored in other steps, whose sums may part at a tie and what follows in that run of its row."""
    w, x = layer(64)
    h = (x.T @ x).astype(np.float32)
    h[40] = h[:, 40] = 0
    for group in (1, 16, 64, 128, 256):
        runs = np.stack([h[i : i + group, i : i + group] for i in range(0, 256, group)])
        whole = np.zeros_like(h)
        for number, run in enumerate(runs):
            whole[number * group :, number * group :][:group, :group] = run
        known = runs[:, 0, 0] if group == 1 else runs
        made, report = gptq_reported(w, known, RECIPES[name], order=order)
        wanted, other = gptq_reported(w, whole, RECIPES[name], order=order)
        assert report.level == {1: "diag", 256: "full"}.get(group, "block")
        assert (report.damp, report.dead, report.nearest) == (other.damp, other.dead, other.nearest) == (0.02, 1, 0)
        assert parts(made)[1:] == parts(wanted)[1:]
        assert (made.numpy() == wanted.numpy()).mean() > 0.999
        assert abs(output_error(w, made, whole) / output_error(w, wanted, whole) - 1) < 1e-4
    shared = gptq_reported(np.stack([w, -2 * w]), runs, RECIPES[name])[0].numpy()
    apart = gptq_reported(np.stack([w, -2 * w]), np.stack([runs, runs]), RECIPES[name])[0].numpy()
    assert np.array_equal(shared, apart)


def test_a_run_that_is_not_positive_definite_takes_damping_with_the_others():
    w = layer()[0]
    runs = np.stack([np.eye(16, dtype=np.float32)] * 16)
    runs[3] = 2 * np.eye(16) - 1.5  # of which an eigenvalue is -22
    assert gptq_reported(w, runs, "int4:32")[1].nearest == 1
    runs[3] = np.eye(16) - 0.1  # of which one is -0.6
    report = gptq_reported(w, runs, "int4:32")[1]
    assert report.nearest == 0 and report.damp == 1


def test_columns_that_no_input_reached_keep_their_nearest_value():
    w, x = layer()
    x[:, [3, 77]] = 0
    h = (x.T @ x).astype(np.float32)
    q, report = gptq_reported(w, h, RECIPES["int4"])
    near = breccia.cast(w, RECIPES["int4"], importance=np.diag(h).copy())
    assert report.dead == 2
    assert np.array_equal(q.numpy()[:, [3, 77]], near.numpy()[:, [3, 77]])
    _, report = gptq_reported(w, np.zeros_like(h), RECIPES["int4"])
    assert report.dead == 256


def test_what_is_not_positive_definite_takes_more_damping_or_falls_back():
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    mean = np.diag(h).mean()
    low = np.linalg.eigvalsh(h.astype(np.float64))[0]
    shifted = h - np.eye(256, dtype=np.float32) * np.float32(low + 0.2 * mean)
    shifted[np.diag_indices(256)] = np.maximum(np.diag(shifted), 0)
    q, report = gptq_reported(w, shifted, RECIPES["int4"])
    assert 0.02 < report.damp <= 1 and report.nearest == 0
    opposed = np.full((256, 256), -1.0, np.float32) + np.eye(256, dtype=np.float32) * 2
    q, report = gptq_reported(w, opposed, RECIPES["int4"])
    assert report.nearest == 1
    assert parts(q) == parts(breccia.cast(w, RECIPES["int4"], importance=np.ones(256, np.float32)))


def test_experts():
    w, h = [], []
    for seed in range(3):
        one, x = layer(seed=seed)
        w.append(one)
        h.append((x.T @ x).astype(np.float32))
    for name in ("int4", "mxfp4"):
        q = breccia.gptq(np.stack(w), np.stack(h), RECIPES[name])
        for expert in range(3):
            assert np.array_equal(q.numpy()[expert], breccia.gptq(w[expert], h[expert], RECIPES[name]).numpy())
        shared = breccia.gptq(np.stack(w), h[0], RECIPES[name])
        assert np.array_equal(shared.numpy()[1], breccia.gptq(w[1], h[0], RECIPES[name]).numpy())


def test_values_that_are_not_finite_stay_as_a_cast_leaves_them():
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    w[0, 5], w[1, 9], w[2] = np.nan, np.inf, 0
    for name in ("nvfp4", "int4", "fp8 block", "int8"):
        q, near = (
            breccia.gptq(w, h, RECIPES[name]).numpy(),
            breccia.cast(w, RECIPES[name], importance=np.diag(h)).numpy(),
        )
        assert np.array_equal(np.isnan(q), np.isnan(near))
        assert q[1, 9] == near[1, 9] and not q[2].any()
        assert np.isfinite(q[3:]).all()


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_frameworks(framework):
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    wanted = parts(breccia.gptq(w, h, "nvfp4"))
    if framework == "torch":
        torch = pytest.importorskip("torch")
        half = torch.from_numpy(w).bfloat16()
        q = breccia.gptq(half, torch.from_numpy(h), "nvfp4")
        assert q.original_dtype == "bfloat16"
        wanted = parts(breccia.gptq(half.float().numpy(), h, "nvfp4"))
    elif framework == "jax":
        jax = pytest.importorskip("jax")
        q = breccia.gptq(jax.numpy.asarray(w), jax.numpy.asarray(h), "nvfp4")
    else:
        mx = pytest.importorskip("mlx.core")
        q = breccia.gptq(mx.array(w), mx.array(h), "nvfp4")
    assert type(q.data).__module__.startswith(framework)
    assert parts(q.to("numpy")) == wanted


def test_what_is_refused():
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    above = h.copy()
    above[0, -1] = np.inf  # in the half that is not worked with
    for error, arguments, options, message in (
        (ValueError, (w, h[:-1, :-1], "int4"), {}, r"moments must be \(256, 256\) for w of shape \(24, 256\)"),
        (ValueError, (w, np.ones((16, 8, 8)), "int4"), {}, r"moments must be \(256, 256\) for w .*, got shape \(16, 8"),
        (ValueError, (w, np.ones((0, 0, 0)), "int4"), {}, r"moments must be \(256, 256\) for w .*, got shape \(0, 0"),
        (ValueError, (w, np.full((16, 16, 16), np.inf), "int4"), {}, "moments must be finite, got inf"),
        (ValueError, (w, np.full((16, 16, 16), -1.0), "int4"), {}, "moments must not be negative on the diagonal"),
        (ValueError, (w, h * np.float32(np.nan), "int4"), {}, "moments must be finite"),
        (ValueError, (w, above, "int4"), {}, "moments must be finite"),
        (ValueError, (w, -h, "int4"), {}, "moments must not be negative on the diagonal"),
        (ValueError, (w, h, "int4"), {"damp": 2}, "damp must be from 0 to 1"),
        (ValueError, (w, h, "int4"), {"order": "random"}, "order must be 'act' or 'natural', got 'random'"),
        (ValueError, (w[0], h, "int4"), {}, "INT4Scaling requires x.ndim >= 2, got 1"),
        (TypeError, (w.astype(np.int32), h, "int4"), {}, "w must be a float32, float64, float16 or bfloat16 array"),
        (TypeError, (w, "moments.safetensors", "int4"), {}, "moments must be a float32"),
        (TypeError, (breccia.cast(w, "int4"), h, "int4"), {}, "w must be an array of floats, got a ScaledTensor"),
    ):
        with pytest.raises(error, match=message):
            breccia.gptq(*arguments, **options)


# Linux keeps the peak of the process that a program was started from; the mark starts anew.
_PEAK = """
import sys
import numpy as np
import breccia
from pathlib import Path
def status(what):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10
k = int(sys.argv[1])
w = np.random.default_rng(0).normal(size=(16, k)).astype(np.float32)
breccia.gptq(w[:, :128], np.eye(128, dtype=np.float32), "int4")
if sys.argv[2] == "full":
    h = np.eye(k, dtype=np.float32)
    h += np.float32(0.25) / k
else:
    h = np.stack([np.eye(16, dtype=np.float32) + np.float32(0.25)] * (k // 16))
    h = np.ones(k, np.float32) if sys.argv[2] == "diag" else h
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
breccia.gptq(w, h, "int4")
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read where Linux has it")
def test_a_wide_layer_takes_little_more_memory_than_half_of_its_moments():
    k = 4096
    peak = peak_of(k, "full")
    assert peak < 0.63 * 4 * k * k + (32 << 20), f"{peak / 2**20:.0f} MiB beside {k * k >> 18} of moments"


def peak_of(k, level):
    program = [sys.executable, "-c", _PEAK, str(k), level]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read where Linux has it")
@pytest.mark.parametrize("level", ["block", "diag"])
def test_moments_of_runs_take_memory_by_their_columns_and_not_by_the_square(level):
    peak = peak_of(1 << 16, level)  # whose square would take 16 GiB
    assert peak < 128 << 20, f"{peak / 2**20:.0f} MiB"
