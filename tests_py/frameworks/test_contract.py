# SPDX-License-Identifier: Apache-2.0
"""Every verb × recipe × framework: the bytes are those of the NumPy path."""

import copy
import dataclasses
import pickle
import tracemalloc

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import cast, dequantize, linear, matmul, requantize

ml_dtypes = pytest.importorskip("ml_dtypes")

K = 256


def inputs():
    x = cases.heavy_tailed("student", (6, K), seed=3)
    special = cases.normal((6, K), seed=4)
    special[1, 3], special[2, 7], special[3, 9] = np.nan, np.inf, -np.inf
    return [x, special, cases.normal((2, 3, K))]


@cases.ALL
@peers.OTHERS
def test_cast_dequantize_requantize(peer, recipe):
    for x in inputs():
        reference, mine = cast(x, recipe), cast(peer.array(x), recipe)
        peers.same_parts(peer, mine, reference, "cast")
        assert mine.shape == reference.shape
        assert mine.recipe == recipe
        assert mine.layout == recipe.layout
        assert mine.original_dtype == "float32"
        assert mine.nbytes == reference.nbytes
        peers.same_bytes(peer, dequantize(mine), dequantize(reference), "dequantize")
    for source in (breccia.MXFP4BlockScaling(), breccia.INT4Scaling(), breccia.Float8CurrentScaling()):
        a, b = cast(peer.array(x), source), cast(x, source)
        peers.same_parts(peer, requantize(a, recipe), requantize(b, recipe), f"requantize {source}")


@cases.ALL
@peers.ALL
def test_the_recipe_is_the_one_that_was_given(peer, recipe):
    """Not an equal one: `cast(x, recipe).recipe is recipe`."""
    mine, x = dataclasses.replace(recipe), peer.array(cases.normal((6, K)))
    assert cast(x, mine).recipe is mine
    assert cast(x, mine, rounding="stochastic", seed=1).recipe is mine
    assert requantize(cast(x, breccia.INT8Scaling(group_size=8)), mine).recipe is mine


@pytest.mark.parametrize(
    ("peer", "dtype"),
    [
        pytest.param(peer(), dtype, id=f"{name}-{dtype}")
        for name, peer in peers.PEERS.items()
        for dtype in ("float64", "float16", "bfloat16")
        if name != "numpy" and (name == "torch" or dtype != "float64")  # which others have not
    ],
)
@cases.some("current block mxfp4 nvfp4 int4")
def test_dtypes(peer, recipe, dtype):
    x = cases.normal((4, K)).astype(getattr(ml_dtypes, dtype, dtype))
    reference, mine = cast(x, recipe), cast(peer.array(x), recipe)
    peers.same_parts(peer, mine, reference, dtype)
    assert mine.original_dtype == dtype
    peers.same_bytes(peer, dequantize(mine, dtype), dequantize(reference, dtype), dtype)


@cases.ALL
@peers.OTHERS
def test_matmul_and_linear(peer, recipe):
    x, w = cases.normal((5, K)), cases.normal((7, K), seed=1)
    bias = np.arange(7, dtype=np.float32)
    a, b = cast(peer.array(x), recipe), cast(peer.array(w), recipe)
    exact = dequantize(cast(x, recipe)).astype(np.float64) @ dequantize(cast(w, recipe)).astype(np.float64).T
    bound = 1e-5 * np.abs(dequantize(cast(x, recipe))) @ np.abs(dequantize(cast(w, recipe))).T
    for product in (matmul(a, b.T), linear(a, b)):
        assert peer.is_one(product)
        assert (np.abs(peer.host(product) - exact) <= bound).all()
    np.testing.assert_array_equal(peer.host(linear(a, b, peer.array(bias))), peer.host(linear(a, b)) + bias)
    mixed = peer.host(matmul(peer.array(x), b.T))
    np.testing.assert_allclose(mixed, x @ dequantize(cast(w, recipe)).T, rtol=1e-4, atol=1e-4)
    batch = matmul(cast(peer.array(np.stack([x, x])), recipe), b.mT)
    assert tuple(batch.shape) == (2, 5, 7)


@peers.ALL
@pytest.mark.in_turn
def test_transposed_view(peer):
    x = cases.normal((K, K))
    for name, recipe in cases.RECIPES.items():
        mine, reference = cast(peer.array(x), recipe), cast(x, recipe)
        peers.same_bytes(peer, dequantize(mine.T), dequantize(reference).T, f"{name}.T")
        peers.same_parts(peer, mine.T.T, reference, f"{name}.T.T")


@peers.ALL
@pytest.mark.in_turn
def test_copy_and_pickle(peer):
    """An MLX array does not pickle."""
    x = cases.normal((4, K))
    again_by = [lambda st: pickle.loads(pickle.dumps(st)), copy.deepcopy, copy.copy]
    if peer.name == "mlx":
        with pytest.raises(TypeError, match="MLX arrays do not pickle: move the tensor first"):
            again_by.pop(0)(cast(peer.array(x), "int8"))
    for name, recipe in cases.RECIPES.items():
        reference = cast(x, recipe)
        for again in again_by:
            mine = cast(peer.array(x), recipe)
            peers.same_parts(peer, again(mine), reference, name)
            assert again(mine).recipe == recipe
            peers.same_bytes(peer, dequantize(again(mine.T)), dequantize(reference).T, name)


@peers.ALL
@pytest.mark.parametrize("goal", peers.PEERS.keys())
def test_to_other_framework(peer, goal):
    x = cases.normal((4, K))
    for name, recipe in cases.RECIPES.items():
        moved = cast(peer.array(x), recipe).to(goal)
        peers.same_parts(peers.PEERS[goal](), moved, cast(x, recipe), f"{name}, {peer.name} to {goal}")
        peers.same_bytes(peers.PEERS[goal](), dequantize(moved), dequantize(cast(x, recipe)), name)
        peers.same_parts(peer, moved.to(peer.name), cast(x, recipe), f"{name} and back")


@peers.ALL
def test_array_is_the_dequantized_values(peer):
    x = cases.normal((4, K))
    mine = cast(peer.array(x), breccia.MXFP8BlockScaling())
    np.testing.assert_array_equal(np.asarray(mine), dequantize(cast(x, mine.recipe)))
    assert np.asarray(mine, dtype=np.float16).dtype == np.float16
    with pytest.raises(ValueError, match="copy=False"):
        mine.__array__(copy=False)  # as np.asarray(mine, copy=False) calls it, which NumPy 1.26 cannot


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 1, "hadamard": breccia.Hadamard(16)}])
def test_numpy_allocates_what_it_returns(options):
    x = cases.normal((512, 512))
    slack = 32 * 1024
    for recipe in (breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.Float8CurrentScaling()):
        scaled = cast(x, recipe, **options)
        calls = {
            "cast": (lambda: cast(x, recipe, **options), scaled.nbytes),
            "dequantize": (lambda: dequantize(scaled, "float16"), 512 * 512 * 2),
            "matmul": (lambda: matmul(x, scaled.T), 512 * 512 * 4),
        }
        for name, (call, expected) in calls.items():
            tracemalloc.start()
            call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert expected <= peak <= expected + slack, f"{name}: {peak} bytes for a result of {expected}"


@peers.ALL
def test_stochastic_rounding_draws_the_same_everywhere(peer):
    x = cases.normal((8, K))
    for recipe in (breccia.NVFP4BlockScaling(), breccia.MXFP8BlockScaling(), breccia.INT4Scaling()):
        options = {"rounding": "stochastic", "seed": 7, "hadamard": breccia.Hadamard(16)}
        mine, reference = cast(peer.array(x), recipe, **options), cast(x, recipe, **options)
        peers.same_parts(peer, mine, reference)
        square = {**options, "square_blocks": True}
        peers.same_parts(peer, cast(peer.array(x), recipe, **square), cast(x, recipe, **square))
        other = cast(peer.array(x), recipe, rounding="stochastic", seed=8)
        assert (peer.host(other.data) != peer.host(mine.data)).any()


@peers.OTHERS
def test_frameworks_do_not_mix(peer):
    x = cases.normal((4, K))
    recipe = breccia.MXFP8BlockScaling()
    mine, other = cast(peer.array(x), recipe), cast(x, recipe)
    for a, b in ((mine, other.T), (other, mine.T), (peer.array(x), other.T), (mine, x.T)):
        with pytest.raises(TypeError, match="one framework"):
            matmul(a, b)
    with pytest.raises(TypeError, match="scale must be of the framework of data"):
        breccia.from_buffer(mine.data, other.scale, recipe, recipe.layout)
    with pytest.raises(ValueError, match=r"framework must be one of|target must be"):
        mine.to("tensorflow")


@peers.OTHERS
def test_wrong_dtypes(peer):
    import importlib

    lib = {"torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}[peer.name]
    complex_array = importlib.import_module(lib).zeros((2, 4), dtype=importlib.import_module(lib).complex64)
    with pytest.raises(TypeError, match="float32"):
        cast(complex_array, breccia.Float8CurrentScaling())
    with pytest.raises(TypeError, match="dtype must be"):
        dequantize(cast(peer.array(cases.normal((2, 4))), breccia.Float8CurrentScaling()), "int32")
    integers = peer.array(np.arange(8, dtype=np.int32).reshape(2, 4))
    peers.same_parts(
        peer,
        cast(integers, breccia.Float8CurrentScaling()),
        cast(np.arange(8, dtype=np.float32).reshape(2, 4), breccia.Float8CurrentScaling()),
    )


@peers.ALL
def test_ragged_and_empty(peer):
    for shape in [(0, 128), (3, 0), (130, 70)]:
        x = cases.normal(shape)
        recipe = breccia.Float8BlockScaling(block_m=64, block_k=64)
        peers.same_bytes(peer, dequantize(cast(peer.array(x), recipe)), dequantize(cast(x, recipe)))
        odd = breccia.INT4Scaling(group_size=5)
        y = cases.normal((3, 15))
        peers.same_parts(peer, cast(peer.array(y), odd), cast(y, odd))
        assert cast(peer.array(y), odd).shape == (3, 15)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@peers.ALL
def test_no_out_dtype_is_that_of_the_activations(peer, dtype):
    """Of what they were quantized from, where they are quantized; of integers float32."""
    w = cast(peer.array(cases.normal((7, K))), breccia.NVFP4BlockScaling())
    x = peer.array(cases.normal((5, K)).astype(getattr(ml_dtypes, dtype, dtype)))
    quantized = cast(x, breccia.Float8CurrentScaling())
    for product in (linear(x, w, out_dtype=None), matmul(x, w.T, None), linear(quantized, w, out_dtype=None)):
        assert str(product.dtype).rpartition(".")[2] == dtype


@peers.ALL
def test_a_wider_bias_does_not_widen_the_result(peer):
    w = cast(peer.array(cases.normal((7, K))), breccia.NVFP4BlockScaling())
    x, bias = peer.array(cases.normal((5, K))), peer.array(cases.normal((7,)))
    y = linear(x, w, bias, "float16")
    assert y.dtype == linear(x, w, None, "float16").dtype
    exact = peer.host(linear(x, w)).astype(np.float64) + peer.host(bias)
    np.testing.assert_allclose(peer.host(y).astype(np.float64), exact, rtol=2e-3, atol=2e-3)


@cases.some("current block mxfp8 mxfp4 nvfp4 int4 int8")
@peers.ALL
def test_a_bias_is_added_before_the_sum_is_rounded(peer, recipe):
    x, numbers = cases.normal((5, K)), cases.normal((7, K), seed=1)
    for w in (cast(peer.array(numbers), recipe), peer.array(numbers)):
        for dtype in ("float16", "bfloat16"):
            narrow = getattr(ml_dtypes, dtype, dtype)
            a, bias = peer.array(x.astype(narrow)), cases.normal((7,), seed=2).astype(narrow)
            for rows in (a, a[:1], a[0]):
                exact = peer.host(linear(rows, w, None, "float32")) + bias.astype(np.float32)
                y = linear(rows, w, peer.array(bias), dtype)
                assert y.dtype == linear(rows, w, None, dtype).dtype
                np.testing.assert_array_equal(peer.host(y).astype(np.float32), exact.astype(narrow).astype(np.float32))
