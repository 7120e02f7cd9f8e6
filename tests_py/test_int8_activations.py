# SPDX-License-Identifier: Apache-2.0
"""Activations rounded to INT8, by name, on CPUs: the product of the rounded operands up to float32 sums, on every
backend, and as near to the unrounded product as docs/numerics.md says."""

import itertools

import breccia
import numpy as np
import pytest
from test_ops import U

N, K = 37, 512
WEIGHTS = ["int8", "int8:64", "int4", "int4:32", "int4:asym", "int4:asym:64", "mxfp4", "nvfp4"]
ACTIVATIONS = ["int8", "int8:32"]
BACKENDS = breccia.cpu_info()["supported"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    before = breccia.cpu_info()["backend"]
    breccia.set_backend(request.param)
    yield request.param
    breccia.set_backend(before)


def operands(rows, columns=K):
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, columns)).astype(np.float32)
    x[:, ::41] *= 20  # outliers
    return x, random.normal(0, 0.02, (N, columns)).astype(np.float32)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_products_of_the_rounded_operands(backend, weight, activations):
    for rows in (1, 2, 5, 16, 33):
        x, w = operands(rows)
        qx, qw = breccia.cast(x, activations), breccia.cast(w, weight)
        a, b = (breccia.dequantize(q).astype(np.float64) for q in (qx, qw))
        bound = (256 + K / 8 + 8) * U * (np.abs(a) @ np.abs(b).T)
        found = breccia.linear(qx, qw)
        assert (np.abs(found - a @ b.T) <= bound).all()
        # Where prepared codes have a kernel of their own, sums are in another order.
        assert (np.abs(breccia.linear(qx, breccia.prepare(qw)) - a @ b.T) <= bound).all()
        batch = breccia.linear(breccia.cast(x[None], activations), qw)
        assert (np.abs(batch[0] - a @ b.T) <= bound).all()


def block_of(name):
    """Elements to a scale, which divide a row; 1 where there is one to a row."""
    known = {"int8": 1, "int4": 128, "int4:asym": 128, "mxfp4": 32, "nvfp4": 16}
    return known.get(name) or int(name.rpartition(":")[2])


@pytest.mark.parametrize("columns", [16, 48, 96, 192, 500, 1000])
def test_rows_that_end_within_a_step(backend, columns):
    """Whole blocks and pieces of them, and the smallest code, which has no opposite, on both sides or of weights alone:
    some kernels multiply activations without it in another way."""
    weights = (*WEIGHTS, "int8:16", "int8:32", "int4:16")
    for activations, weight, rows, least in itertools.product((*ACTIVATIONS, "int8:16"), weights, (1, 3), (0x80, 0x81)):
        if any(columns % block_of(name) for name in (activations, weight)):
            continue
        x, w = operands(rows, columns)
        qx, qw = breccia.cast(x, activations), breccia.cast(w, weight)
        qx.data[:, -7:] = least
        if weight.startswith("int8"):
            qw.data[3:9, -9:] = 0x80
        a, b = (breccia.dequantize(q).astype(np.float64) for q in (qx, qw))
        bound = (min(columns, 256) + columns / 8 + 8) * U * (np.abs(a) @ np.abs(b).T)
        assert (np.abs(breccia.linear(qx, qw) - a @ b.T) <= bound).all(), (activations, weight, rows, least)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_rounding_errs_by_half_a_step(weight, activations):
    """|error| <= sum of half a scale of the activation's by |w|, and the bound of sums."""
    x, w = operands(16)
    qx, qw = breccia.cast(x, activations), breccia.cast(w, weight)
    b = breccia.dequantize(qw).astype(np.float64)
    scales = np.repeat(np.asarray(qx.scale, np.float64).reshape(16, -1), K // (np.asarray(qx.scale).size // 16), axis=1)
    sums = (256 + K / 8 + 8) * U * (np.abs(breccia.dequantize(qx).astype(np.float64)) @ np.abs(b).T)
    # A code is made with the quotient's one rounding: half a step and a few units in the last place of 127 steps.
    rounding = (scales * (0.5 + 128 * 2 * U)) @ np.abs(b).T
    error = np.abs(breccia.linear(qx, qw) - x.astype(np.float64) @ b.T)
    assert (error <= rounding + sums).all()
    assert error.max() > 0.01 * rounding.max()  # it is the activations' rounding that is seen


def test_scales_out_of_range(backend):
    """A row whose scale is too small for integers changes nothing of the row before it."""
    x, w = operands(2, 128)
    x[1] *= np.float32(2.0**-112)
    for weight in WEIGHTS:
        qx, qw = breccia.cast(x, "int8"), breccia.cast(w, weight)
        assert qx.scale.min() < 2.0**-100
        a, b = (breccia.dequantize(q).astype(np.float64) for q in (qx, qw))
        bound = (128 + 128 / 8 + 8) * U * (np.abs(a) @ np.abs(b).T) + 2.0**-149
        assert (np.abs(breccia.linear(qx, qw) - a @ b.T) <= bound).all(), weight


def test_layers_round_by_name(backend):
    torch = pytest.importorskip("torch")
    x, w = operands(20)
    layer = torch.nn.Linear(K, N)
    layer.weight.data = torch.from_numpy(w)
    for weight in WEIGHTS:
        model = breccia.quantize_(torch.nn.Sequential(layer), weight, activations="int8")
        exact = breccia.quantize_(torch.nn.Sequential(layer), weight)
        found = model(torch.from_numpy(x)).detach().numpy()
        expected = breccia.linear(breccia.cast(x, "int8"), breccia.cast(w, weight)) + layer.bias.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert np.abs(exact(torch.from_numpy(x)).detach().numpy() - found).max() > 1e-4  # exact stays the default


def test_the_kernels_are_named(backend):
    kernels = breccia.cpu_info()["kernels"]
    integers = {"INT8Scaling", "INT4Scaling", "MXFP4BlockScaling", "NVFP4BlockScaling"}
    if backend == "amx":
        tiles = "panels_integer" if "amx_int8" in breccia.cpu_info()["features"] else "panels_bf16"
        for recipe in integers:
            expected = tiles if recipe.startswith("INT") else "panels_bf16"  # scales of 32 and 16 elements
            assert kernels[f"{recipe} x int8"]["M = 512"] == expected, recipe
    if backend in ("portable", "amx") or (backend == "neon" and "dotprod" not in breccia.cpu_info()["features"]):
        return
    for recipe in integers:
        assert kernels[f"{recipe} x int8"]["M = 1"] == "in_place_integer", recipe
        assert kernels[f"{recipe} x int8"]["M = 512"] == "panels_integer", recipe
    assert kernels["MXFP8BlockScaling x int8"]["M = 512"] != "panels_integer"
