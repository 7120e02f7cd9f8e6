# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors in the core against the same sums in NumPy, which works on float copies of both."""

import dataclasses
import math
import re

import breccia
import numpy as np
import pytest
from breccia import _core, comparison
from breccia.checkpoint.judging.histograms import block_scales, of_errors, of_scales
from cases import ALL, normal, shape_for

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
BACKENDS = breccia.cpu_info()["supported"]


def floats(x):
    if isinstance(x, breccia.ScaledTensor):
        return breccia.dequantize(x)
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def expected(reference, tensor):
    """Sums over pairs that are not both NaN."""
    x, y = (floats(v).astype(np.float64).reshape(-1) for v in (reference, tensor))
    nans, other_nans = np.isnan(x), np.isnan(y)
    x, y = (np.where(nans & other_nans, 0, v) for v in (x, y))
    with np.errstate(all="ignore"):
        error = np.abs(x - y)
        worst = float(error.max()) if error.size else 0.0
        sums = {"signal": x @ x, "other": y @ y, "dot": x @ y, "noise": error @ error, "max_error": worst}
    counts = {"count": x.size, "reference_nans": int(nans.sum()), "nans": int(other_nans.sum())}
    return sums, counts | {"equal": bool(np.array_equal(x, y))}, error


def check(reference, tensor):
    sums, exact, error = expected(reference, tensor)
    found = comparison.compare(reference, tensor)
    for name, value in exact.items():
        assert getattr(found, name) == value, name
    scale = math.sqrt(sums["signal"] * sums["other"])
    for name, value in sums.items():
        bound = 1e-12 * (scale if name == "dot" else abs(value))
        np.testing.assert_allclose(getattr(found, name), value, rtol=0, atol=bound, err_msg=name)
    if error.size and error.max() != 0:
        assert error[found.max_error_at] == found.max_error or math.isnan(found.max_error)
    else:
        assert found.max_error_at == -1
    if 0 < sums["noise"] < math.inf and sums["signal"] > 0:
        assert found.sqnr_db == pytest.approx(10 * math.log10(sums["signal"] / sums["noise"]), abs=1e-9)
    return found


@ALL
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_sums_are_those_of_numpy(recipe, dtype):
    x = normal(shape_for(recipe, rows=37, blocks=5)).astype(dtype)
    scaled = breccia.cast(x, recipe)
    found = check(x, scaled)
    assert 3 < found.sqnr_db < 60
    assert check(scaled, scaled).sqnr_db == math.inf
    check(scaled.mT, x.T.astype(np.float32))
    check(x.T, scaled.mT)


@ALL
def test_two_scaled_tensors(recipe):
    rows = 128
    x = normal((rows, 256), 3)
    reference, upright = breccia.cast(x, "mxfp8"), breccia.cast(x, recipe)
    check(reference, upright)
    check(reference.mT, upright.mT)
    across = breccia.cast(np.ascontiguousarray(x.T), "mxfp8").mT  # its codes run down the columns
    assert across.shape == upright.shape
    found = check(across, upright)
    assert found.max_error == check(upright, across).max_error


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (0, 5), (5, 0), (3, 1), (1, 2049), (4, 2048), (70000,), (2, 3, 5, 33)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_arrays_of_every_shape(shape, dtype):
    x = np.asarray(normal(shape)).astype(dtype)
    y = np.asarray(x + np.asarray(normal(shape, 1)).astype(dtype) / dtype(8)).astype(dtype)
    check(x, y)
    check(x, y.astype(np.float64))
    assert check(x, x.copy()).equal
    if x.ndim > 1:
        check(np.asfortranarray(x), y)
        check(x[::2], y[::2])
        check(x[..., ::-1], y[..., ::-1])
    if dtype == ml_dtypes.bfloat16:
        assert comparison.compare(x.view(np.uint16), y) == comparison.compare(x, y)


def test_batches_and_rows_of_an_odd_number_of_codes():
    x = normal((2, 3, 32, 64), 5)
    for recipe in ("nvfp4", "mxfp6", "mxfp8"):
        check(x, breccia.cast(x, recipe))
    odd = breccia.cast(normal((9, 33)), breccia.Float8BlockScaling(block_k=16, block_m=16))
    check(normal((9, 33)), odd)


def test_special_values():
    x = normal((64, 4096))
    y = x + normal(x.shape, 1) / 8
    for bad in (math.nan, math.inf, -math.inf):
        for places in ([(0, 0)], [(5, 2047), (63, 4095)]):
            for first, second in ((True, False), (False, True), (True, True)):
                a, b = x.copy(), y.copy()
                for place in places:
                    if first:
                        a[place] = bad
                    if second:
                        b[place] = bad
                check(a, b)
                check(a.astype(np.float64), b)
    both = np.where(np.arange(x.size).reshape(x.shape) % 3 == 0, np.float32(math.nan), x)
    assert check(both, both.copy()).sqnr_db == math.inf
    assert check(np.zeros((3, 3), np.float32), -np.zeros((3, 3), np.float32)).cosine == 1
    assert check(np.zeros((3, 3), np.float32), np.ones((3, 3), np.float32)).cosine == 0
    assert math.isnan(check(np.zeros((3, 3), np.float32), np.ones((3, 3), np.float32)).sqnr_db)


def test_small_and_large_numbers_keep_their_digits():
    for scale in (1e-38, 1e-44, 1e37):
        x = (normal((50, 100)).astype(np.float64) * scale).astype(np.float32)
        y = np.nextafter(x, np.float32(0))
        assert check(x, y).equal == np.array_equal(x, y)


@ALL
def test_neither_threads_nor_backends_change_a_bit(recipe):
    shape = shape_for(recipe, rows=301, at_least=600)
    x = normal(shape, 7)
    x[3, 5] = math.nan
    scaled = breccia.cast(x, recipe)
    threads = _core.num_threads()
    seen = set()
    try:
        for count in (1, 2, 5):
            _core.set_num_threads(count)
            for name in BACKENDS:
                with _core.BackendScope(name):
                    found = [comparison.compare(x, scaled), comparison.compare(x.astype(np.float64), scaled)]
                    errors = comparison.error_magnitudes(x, scaled, 0.25)
                sums = repr([dataclasses.astuple(c) for c in found])
                seen.add((sums, errors.counts.tobytes(), errors.zeros, errors.not_finite, errors.largest))
    finally:
        _core.set_num_threads(threads)
    assert len(seen) == 1


def half_octaves(values):
    """By exact comparison with powers of two and of two's square root in float64."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return 2 * (exponent - 1) + (2 * mantissa >= math.sqrt(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_magnitudes_are_counted_by_half_octave(backend):
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    roots = (powers.astype(np.float64) * math.sqrt(2)).astype(np.float32)
    edges = np.concatenate([np.nextafter(v, np.float32(to)) for v in (powers, roots) for to in (0, math.inf)])
    x = np.concatenate([powers, roots, edges, -powers, normal(1001), [0.0, -0.0, math.nan, math.inf, -math.inf]])
    x = x.astype(np.float32)
    with _core.BackendScope(backend):
        found = [comparison.magnitudes(x[: x.size - cut]) for cut in range(20)]
    for cut, counted in enumerate(found):
        part = np.abs(x[: x.size - cut])
        finite = part[np.isfinite(part)]
        assert counted.zeros == (finite == 0).sum()
        assert counted.not_finite == part.size - finite.size
        assert counted.largest == finite.max()
        wanted = np.bincount(half_octaves(finite[finite > 0]) - counted.first, minlength=counted.counts.size)
        np.testing.assert_array_equal(counted.counts, wanted)


def test_errors_beyond_the_largest_number_count_as_the_largest():
    x = np.array([3e38, 1.0, math.inf, math.nan], np.float32)
    counted = comparison.error_magnitudes(np.zeros(4, np.float32), x, 1e-3)
    assert counted.largest == np.finfo(np.float32).max
    assert counted.counts[-1] == 1
    assert counted.not_finite == 2


@ALL
def test_histograms_count_what_numpy_counts(recipe):
    x = normal(shape_for(recipe, rows=64, at_least=512), 2) * np.float32(0.02)
    scaled = breccia.cast(x, recipe)
    row = of_errors(x, scaled)
    root = math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))
    error = np.abs(breccia.dequantize(scaled) - x) / np.float32(root)
    wanted, _ = np.histogram(np.clip(half_octaves(np.where(error > 0, error, 2.0**-20)) / 2, -14, 1.5), 32, (-14, 2))
    assert np.abs(np.subtract(row["counts"], wanted)).sum() <= 2  # numbers on a border, whose quotient was rounded
    assert sum(row["counts"]) == x.size
    assert row["largest"] == pytest.approx(float(error.max()), rel=1e-6)

    scales = np.abs(block_scales(scaled)).astype(np.float64).reshape(-1)
    logs = np.log2(scales[scales > 0])
    low, high = math.floor(logs.min()), max(math.ceil(logs.max()), math.floor(logs.min()) + 1)
    counts, _ = np.histogram(logs, bins=2 * (high - low), range=(low, high))
    assert of_scales(block_scales(scaled)) == {
        "counts": counts.tolist(),
        "low": low,
        "high": high,
        "zeros": int((scales == 0).sum()),
    }


@ALL
def test_codes_are_counted(recipe):
    scaled = breccia.cast(normal(shape_for(recipe, rows=33), 4), recipe)
    bits = breccia.formats.finfo(recipe.element).bits
    codes = np.asarray(scaled.data).view(np.uint8).reshape(-1)
    if scaled.is_packed:
        codes = breccia.formats.unpack(codes, 2 * codes.size)
    wanted = np.bincount(codes & ((1 << bits) - 1), minlength=1 << bits)
    for tensor in (scaled, scaled.mT):
        np.testing.assert_array_equal(comparison.count_codes(tensor).counts, wanted)
    counted = comparison.count_codes(scaled)
    values = np.abs(breccia.formats.decode(codes, recipe.element))
    assert counted.zero == (values == 0).sum()
    assert counted.saturated == (values >= breccia.formats.finfo(recipe.element).max).sum()
    assert counted.nan == 0


def test_half_a_byte_that_no_row_uses_is_not_counted():
    recipe = breccia.INT4Scaling(group_size=16)
    data = np.full((3, 5), 0x71, np.uint8)  # 9 codes a row: the last high nibble is nobody's
    scale = np.ones((3, 1), np.float16)
    scaled = breccia.ScaledTensor(data, scale, recipe, breccia.PerBlockMN(1, 16), shape=(3, 9))
    counted = comparison.count_codes(scaled)
    assert counted.counts[1] == 15
    assert counted.counts[7] == 12
    assert counted.counts.sum() == 27


def test_messages():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"tensor\.shape must be that of reference, \(2, 3\), got \(3, 2\)"):
        comparison.compare(x, x.T)
    with pytest.raises(ValueError, match="unit must be positive and finite"):
        comparison.error_magnitudes(x, x, math.nan)
    with pytest.raises(TypeError, match="reference must be a ScaledTensor or an array of real numbers"):
        comparison.compare(np.array(["a"]), x[0, :1])


def test_a_comparison_is_read_at_a_glance():
    """One short line with what is asked for first; the attributes have every digit."""
    x = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    said = comparison.compare(x, breccia.cast(x, "nvfp4"))
    worst = rf"max_error 0\.\d{{3,4}} at {said.max_error_at}"
    line = rf"Comparison\(20\.\d\d dB, cosine 0\.9954\d\d, {worst}, 524,288 elements\)"
    assert re.fullmatch(line, repr(said))
    assert repr(comparison.compare(x, x)) == "Comparison(equal, 524,288 elements)"
    holed = x.copy()
    holed[0, 0] = np.nan
    assert repr(comparison.compare(holed, x)).endswith("524,288 elements, 0 NaN where the reference has 1)")
    assert repr(comparison.compare(x[:1, :2], 2 * x[:1, :2])).startswith("Comparison(0.00 dB, cosine 1, max_error ")
