# SPDX-License-Identifier: Apache-2.0
"""matmul and linear against float64; requantize."""

import sys

import breccia
import cases
import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracles
import pytest
from breccia import cast, dequantize, linear, matmul, requantize

ml_dtypes = pytest.importorskip("ml_dtypes")

U = 2.0**-24
K = 256  # a multiple of every block size in cases.RECIPES


def as_float(operand):
    return dequantize(operand) if isinstance(operand, breccia.ScaledTensor) else np.asarray(operand, np.float32)


def bound(a, b):
    """(K / 256 + 24) u sum |a||b|: tighter than the documented bound, which must hold for any order of addition."""
    return (a.shape[-1] / 256 + 24) * U * (np.abs(a) @ np.abs(b))


def check(a, b, out_dtype=np.float32, what=""):
    fa, fb = as_float(a).astype(np.float64), as_float(b).astype(np.float64)
    product = matmul(a, b, out_dtype=out_dtype)
    exact = fa @ fb
    assert product.shape == exact.shape, what
    assert product.dtype == np.dtype(out_dtype), what
    rounding = {2: 2.0**-8 if np.dtype(out_dtype) == ml_dtypes.bfloat16 else 2.0**-10, 4: 0, 8: 0}[
        product.dtype.itemsize
    ]
    slack = bound(fa, fb) + rounding * np.abs(exact) + 1e-37
    wrong = np.abs(product.astype(np.float64) - exact) > slack
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} beyond the bound"


@pytest.fixture(scope="module")
def rights():
    """Every recipe as a right operand: weights (N, K) seen through .T, and (K, N) scaled along N."""
    w = cases.heavy_tailed("student", (7, K), seed=1)
    along_n = cases.normal((K, K), seed=2)
    found = {}
    for name, recipe in cases.RECIPES.items():
        found[name] = cast(w, recipe).T
        found[name + " along N"] = cast(along_n, recipe)
    return found


@cases.ALL
def test_every_recipe_by_every_recipe(recipe, rights):
    a = cast(cases.normal((5, K)), recipe)
    for name, b in rights.items():
        check(a, b, what=name)


@cases.ALL
def test_every_recipe_by_raw(recipe, rights):
    x = cases.normal((5, K))
    w = cast(x, recipe)
    for raw in (
        x,
        x.astype(np.float64),
        x.astype(np.float16),
        x.astype(ml_dtypes.bfloat16),
        x.astype(">f4"),
        x[::-1, ::-1],
    ):
        check(raw, w.T)
        check(w, raw.T)


@pytest.mark.parametrize("ends", [(-28, -10), (-19, -19), (-5, -33)], ids=str)
@cases.some("current block expanded mxfp8 mxfp4 nvfp4 int8 int4-fp32")
def test_products_at_the_small_end_lose_what_is_subnormal(recipe, ends):
    small, smaller = (10.0**end for end in ends)
    b = cast(cases.normal((9, K), seed=1) * np.float32(smaller), recipe)
    fb = dequantize(b).astype(np.float64)
    before = breccia.cpu_info()["backend"]
    try:
        for backend in breccia.cpu_info()["supported"]:
            breccia.set_backend(backend)
            for rows in (1, 4, 40):
                x = cases.normal((rows, K), seed=2) * np.float32(small)
                for a in (x, x.astype(ml_dtypes.bfloat16), cast(x, "int8"), cast(x, "mxfp8")):
                    fa = as_float(a).astype(np.float64)
                    slack = (min(K, 256) + K / 8 + 8) * U * (np.abs(fa) @ np.abs(fb.T)) + K * 2.0**-126
                    assert (np.abs(linear(a, b, out_dtype="float32") - fa @ fb.T) <= slack).all(), (backend, rows)
    finally:
        breccia.set_backend(before)


@cases.ALL
def test_number_of_rows(recipe):
    """Kernels change with the number of rows; the numbers may not."""
    w = cast(cases.normal((19, K), seed=1), recipe).T
    for rows in (1, 2, 3, 4, 8, 16, 17, 33):
        x = cases.normal((rows, K), seed=2)
        check(x, w, what=f"{rows} rows")
        check(cast(x, breccia.Float8CurrentScaling()), w, what=f"{rows} rows of FP8")


@cases.ALL
def test_transposed_left_operand(recipe):
    check(cast(cases.normal((K, K)), recipe).T, cases.normal((K, 3), seed=1))
    check(cast(cases.normal((K, K)), recipe).T, cast(cases.normal((3, K), seed=1), recipe).T)


@cases.ALL
def test_batches_broadcast(recipe):
    a = cases.normal((2, 1, 3, K))
    b = cases.normal((4, 5, K), seed=1)
    for left in (a, cast(a, recipe)):
        for right in (b.swapaxes(-1, -2), cast(b, recipe).mT):
            check(left, right)
    check(cast(a, recipe), cast(b[0], recipe).T)
    check(a[0, 0], cast(b, recipe).mT)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_none_is_no_dtype(framework):
    pytest.importorskip("mlx.core" if framework == "mlx" else framework)
    scaled = cast(np.ones((2, 32), np.float32), "mxfp8").to(framework)
    with pytest.raises(TypeError, match="dtype must be float32, float64, float16 or bfloat16, got None"):
        dequantize(scaled, None)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name
)
@cases.some("current block mxfp4 nvfp4 int4-asymmetric")
def test_out_dtype(recipe, dtype):
    a, b = cast(cases.normal((3, K)), recipe), cast(cases.normal((5, K), seed=1), recipe)
    check(a, b.T, dtype)


@cases.some("delayed current block-128x128")
@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 15, 17, 31, 33, 63, 65, 127, 129, 500])
def test_any_k(recipe, k):
    """Not a multiple of any vector; raw on either side."""
    x, w = cases.normal((3, k)), cases.normal((5, k), seed=1)
    check(cast(x, recipe), cast(w, recipe).T)
    check(x, cast(w, recipe).T)
    check(cast(x, recipe), w.T)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 48, 100])
def test_odd_groups(group):
    for recipe in (
        breccia.Float8BlockScaling(block_k=group),
        breccia.INT4Scaling(group_size=group),
        breccia.INT8Scaling(group_size=group),
    ):
        w = cases.normal((5, 3 * group), seed=1)
        scaled = cast(w, recipe)
        oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(scaled))
        check(cases.normal((2, 3 * group)), scaled.T)
        check(scaled, cases.normal((3 * group, 4)))


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (130, 300), (576, 64), (3, 130, 140)])
@pytest.mark.parametrize("tile", [(128, 128), (16, 48), (64, 1)])
def test_ragged_tiles(shape, tile):
    x = cases.normal(shape)
    scaled = cast(x, breccia.Float8BlockScaling(block_k=tile[1], block_m=tile[0]))
    assert scaled.scale.shape == (*shape[:-2], -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1]))
    oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(scaled))
    # The ragged edge is zero padding: pad, cast, and cut to get the same bytes.
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -shape[-2] % tile[0]), (0, -shape[-1] % tile[1])])
    whole = cast(padded, scaled.recipe)
    np.testing.assert_array_equal(whole.scale, scaled.scale)
    np.testing.assert_array_equal(whole.data[..., : shape[-2], : shape[-1]], scaled.data)
    check(cases.normal((2, shape[-1]), seed=1), scaled.mT)


@cases.ALL
def test_empty_products(recipe):
    w = cast(cases.normal((7, K)), recipe)
    for shape in [(0, K), (2, 0, K), (0, 3, K)]:
        assert matmul(np.zeros(shape, np.float32), w.T).shape == (*shape[:-1], 7)
        assert matmul(cast(np.zeros(shape, np.float32), recipe), w.T).shape == (*shape[:-1], 7)
    assert matmul(w, np.zeros((K, 0), np.float32)).shape == (7, 0)


@cases.ALL
def test_linear_is_x_times_w_transposed(recipe):
    w = cast(cases.normal((7, K), seed=1), recipe)
    for x in (cases.normal((2, 3, K)), cases.normal((5, K)), cast(cases.normal((5, K)), recipe)):
        np.testing.assert_array_equal(linear(x, w), matmul(x, w.T))
    row = linear(cases.normal(K), w)
    np.testing.assert_array_equal(row, matmul(cases.normal((1, K)), w.T)[0])


def test_weights_scaled_along_n():
    a = cast(cases.normal((16, 256)), breccia.Float8CurrentScaling())
    w = cast(cases.normal((256, 128), seed=1), breccia.Float8BlockScaling(block_k=128))
    check(a, w)


def test_special_values_reach_the_product():
    x = cases.normal((2, K))
    w = cases.normal((3, K), seed=1)
    w[1, 5] = np.nan
    for recipe in (
        breccia.Float8BlockScaling(),
        breccia.MXFP4BlockScaling(),
        breccia.NVFP4BlockScaling(),
        breccia.INT4Scaling(),
    ):
        for left in (x, cast(x, recipe)):
            product = matmul(left, cast(w, recipe).T)
            assert np.isnan(product[:, 1]).all()
            assert np.isfinite(product[:, [0, 2]]).all()


# --- requantize ---------------------------------------------------------------------------------------------

FP8 = breccia.Float8CurrentScaling()
LOSSLESS = {
    "FP8 tensor to 1x128": (FP8, breccia.Float8BlockScaling()),
    "FP8 tensor to 128x128": (FP8, breccia.Float8BlockScaling(block_m=128)),
    "FP8 tensor to rows": (FP8, breccia.Float8CurrentScaling(granularity="row")),
    "FP8 128x128 to 1x128": (breccia.Float8BlockScaling(block_m=128), breccia.Float8BlockScaling()),
    "FP8 1x128 to 1x64": (breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_k=64)),
    "MXFP4 to MXFP8": (breccia.MXFP4BlockScaling(), breccia.MXFP8BlockScaling()),
    "MXFP4 to MXFP6": (breccia.MXFP4BlockScaling(), breccia.MXFP6BlockScaling()),
    "MXFP6 to MXFP8": (breccia.MXFP6BlockScaling(), breccia.MXFP8BlockScaling()),
    "MXFP4 to FP8 1x32": (breccia.MXFP4BlockScaling(), breccia.Float8BlockScaling(block_k=32)),
    "INT4 to INT8": (breccia.INT4Scaling(), breccia.INT8Scaling(group_size=128)),
    "INT4 to INT8, smaller groups": (breccia.INT4Scaling(), breccia.INT8Scaling(group_size=32)),
    "INT4 to INT4, smaller groups": (breccia.INT4Scaling(), breccia.INT4Scaling(group_size=32)),
    "MXFP8 with an E8M0 scale to an fp32 scale": (
        breccia.MXFP8BlockScaling(),
        breccia.Float8BlockScaling(block_k=32),
    ),
    "FP8 fp32 blocks": (breccia.Float8BlockScaling(scale_format="e8m0"), breccia.Float8BlockScaling()),
}


@pytest.mark.parametrize("kind", ["normal", "student", "sparse", "powers"])
@pytest.mark.parametrize(("source", "target"), LOSSLESS.values(), ids=LOSSLESS.keys())
def test_requantize_loses_nothing_when_it_can(source, target, kind):
    scaled = cast(cases.heavy_tailed(kind, (128, 256)), source)
    again = requantize(scaled, target)
    assert again.recipe == target
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))


def test_requantize_widens_four_bits_over_several_blocks():
    """MXFP4 to 128-wide FP8 blocks: exact as long as the four blocks' exponents lie within E4M3's range of
    each other."""
    scaled = cast(cases.normal((64, 256)), breccia.MXFP4BlockScaling())
    again = requantize(scaled, breccia.Float8BlockScaling())
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))


@cases.ALL
def test_requantize_is_exact_or_a_fresh_cast(recipe):
    x = cases.heavy_tailed("student", (6, K), seed=3)
    for name, source in cases.RECIPES.items():
        scaled = cast(x, source)
        again, fresh = requantize(scaled, recipe), cast(dequantize(scaled), recipe)
        assert again.recipe == recipe
        assert np.asarray(again.scale).dtype == np.asarray(fresh.scale).dtype
        assert np.asarray(again.data).shape == np.asarray(fresh.data).shape
        same = np.array_equal(oracles.bits(np.asarray(again.scale)), oracles.bits(np.asarray(fresh.scale)))
        if same and (again.exponents is None or np.array_equal(again.exponents, fresh.exponents)):
            np.testing.assert_array_equal(again.data, fresh.data, err_msg=name)
            continue
        # Block by block: where the bytes differ from a fresh cast's, nothing may be lost. Integers have one zero.
        different = oracles.codes_of(again) != oracles.codes_of(fresh)
        kept, values = dequantize(again)[different], dequantize(scaled)[different]
        if "int" in recipe.element:
            np.testing.assert_array_equal(kept, values, err_msg=name)
        else:
            oracles.assert_same_bits(kept, values, name)
        error = np.abs(dequantize(again) - dequantize(scaled)).sum()
        assert error <= np.abs(dequantize(fresh) - dequantize(scaled)).sum(), name


@cases.ALL
def test_requantize_to_the_same_recipe_changes_no_value(recipe):
    scaled = cast(cases.normal((6, K)), recipe)
    oracles.assert_same_bits(dequantize(requantize(scaled, recipe)), dequantize(scaled))


@cases.some("current block mxfp4 nvfp4 int4")
def test_requantize_of_a_transposed_view(recipe):
    scaled = cast(cases.normal((K, K)), recipe).T
    again = requantize(scaled, FP8)
    assert again.shape == scaled.shape
    if recipe.element == "float4_e2m1fn" and recipe.name == "mxfp4":  # powers of two times four bits: all are E4M3's
        oracles.assert_same_bits(dequantize(again), dequantize(scaled))
    else:
        oracles.assert_same_bits(dequantize(again), dequantize(cast(dequantize(scaled), FP8)))


# --- sizes at random ----------------------------------------------------------------------------------------


@cases.ALL
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    m=st.integers(0, 9),
    blocks=st.integers(0, 3),
    n=st.integers(0, 40),
    batch=st.lists(st.integers(0, 3), max_size=2),
)
def test_shapes_at_random(recipe, m, blocks, n, batch):
    k = blocks * cases.block_width(recipe) if cases.is_block(recipe) else blocks * 13
    x, w = cases.normal((*batch, m, k)), cases.normal((n, k), seed=1)
    weight = cast(w, recipe)
    check(x, weight.T)
    check(cast(x, recipe), weight.T)


@pytest.mark.parametrize("verb", ["dequantize", "matmul", "linear", "grouped_matmul"])
def test_results_of_bfloat16_ask_for_what_has_that_dtype(verb, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    w, x = breccia.cast(np.ones((32, 64), np.float32), "mxfp8"), np.ones((2, 64), np.float32)
    operands = {"dequantize": (w,), "matmul": (x, w.T), "linear": (x, w)}
    operands["grouped_matmul"] = (x, breccia.stack([w]), [0, 2])
    with pytest.raises(ImportError, match=r"ml_dtypes is needed here: pip install 'breccia\[ml_dtypes\]'"):
        getattr(breccia, verb)(*operands[verb], out_dtype="bfloat16")
