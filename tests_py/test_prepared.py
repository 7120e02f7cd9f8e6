# SPDX-License-Identifier: Apache-2.0
"""Prepared weights: the same values and products, from any layout."""

import copy
import pickle

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import PreparedWeight, ScaledTensor, cast, dequantize, linear, matmul, prepare
from test_ops import as_float, bound

ml_dtypes = pytest.importorskip("ml_dtypes")

K, N = 256, 37


def weight(recipe):
    return cast(cases.normal((N, K), seed=1), recipe)


@cases.ALL
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_are_those_of_the_tensor(recipe, rows):
    w = weight(recipe)
    prepared = prepare(w)
    for x in (
        cases.normal((rows, K)),
        cases.normal((rows, K)).astype(ml_dtypes.bfloat16),
        cast(cases.normal((rows, K)), recipe),
    ):
        exact, values = as_float(x).astype(np.float64), dequantize(w).astype(np.float64).T
        for operand in (w, prepared):
            assert (np.abs(matmul(x, operand.T) - exact @ values) <= bound(exact, values)).all()
            np.testing.assert_array_equal(linear(x, operand), matmul(x, operand.T))


@cases.ALL
def test_it_is_the_same_tensor(recipe):
    w = weight(recipe)
    prepared = prepare(w)
    assert isinstance(prepared, ScaledTensor)
    assert isinstance(prepared.T, PreparedWeight)
    assert prepare(prepared) is prepared
    assert prepared.shape == w.shape
    assert prepared.T.shape == w.T.shape
    assert prepared.recipe == w.recipe
    original = prepared.original
    assert type(original) is ScaledTensor
    assert original.data is w.data
    assert original.scale is w.scale
    assert (original.layout, original.shape, original.nbytes) == (w.layout, w.shape, w.nbytes)
    oracles.assert_same_bits(dequantize(prepared), dequantize(w))
    oracles.assert_same_bits(dequantize(prepared.T), dequantize(w.T))
    for again in (pickle.loads(pickle.dumps(prepared)), copy.copy(prepared), copy.deepcopy(prepared)):
        assert isinstance(again, PreparedWeight)
        assert again.packed_nbytes == prepared.packed_nbytes
        oracles.assert_same_bits(dequantize(again), dequantize(w))
    assert copy.copy(prepared).data is w.data


@cases.some("block mxfp8 mxfp4 nvfp4 int4 int8")
def test_weights_across_their_memory(recipe):
    """Stored (K, N) in memory but scaled along K: a transposed copy of each array."""
    w = weight(recipe)

    def across(array):
        if array is None or array.ndim < 2:
            return array
        return np.ascontiguousarray(array.T).T

    strange = ScaledTensor(
        across(w.data),
        across(w.scale),
        w.recipe,
        w.layout,
        across(w.zero_point),
        global_scale=w.global_scale,
        shape=w.shape,
    )
    x = cases.normal((5, K))
    np.testing.assert_array_equal(matmul(x, prepare(strange).T), matmul(x, prepare(w).T))
    oracles.assert_same_bits(dequantize(prepare(strange)), dequantize(w))


@cases.some("mxfp4 nvfp4 int4")
def test_one_code_per_byte(recipe):
    w = weight(recipe)
    codes = np.stack([w.data & 15, w.data >> 4], axis=-1).reshape(N, K)
    loose = ScaledTensor(codes, w.scale, w.recipe, w.layout, w.zero_point, global_scale=w.global_scale, shape=(N, K))
    assert not loose.is_packed
    x = cases.normal((3, K))
    np.testing.assert_array_equal(linear(x, prepare(loose)), linear(x, w))
    oracles.assert_same_bits(dequantize(prepare(loose)), dequantize(w))


@cases.some("current block nvfp4 int4")
def test_a_batch_of_weights(recipe):
    w = cast(cases.normal((2, 3, N, K), seed=1), recipe)
    x = cases.normal((2, 3, 4, K))
    np.testing.assert_array_equal(matmul(x, prepare(w).mT), matmul(x, w.mT))


@cases.some("block mxfp8 mxfp4 nvfp4 int4 int8")
def test_a_packed_copy_is_no_larger_than_the_weight(recipe):
    """But for rows padded to 16, K to 32, and scales of 16 bits in float32."""
    w = cast(cases.normal((64, 1024), seed=1), recipe)
    blocks = 0 if w.scale.dtype == np.uint8 else w.scale.size
    assert prepare(w).packed_nbytes <= w.data.nbytes + max(w.scale.nbytes, 4 * blocks) + 64 * 128


def test_only_scaled_tensors_can_be_prepared():
    with pytest.raises(TypeError, match="ScaledTensor"):
        prepare(cases.normal((4, 4)))


@cases.some("current block mxfp8 nvfp4 int4")
@pytest.mark.parametrize("rows", [1, 20])
def test_fast_rounds_activations_only(recipe, rows):
    w, x = weight(recipe), cases.normal((rows, K))
    values = dequantize(w).astype(np.float64).T
    fast = matmul(x, prepare(w).T, precision="fast")
    assert (np.abs(fast - x @ values) <= 2.0**-8 * (np.abs(x) @ np.abs(values)) + bound(x, values)).all()
    rounded = x.astype(ml_dtypes.bfloat16)
    assert (
        np.abs(matmul(rounded, w.T, precision="fast") - rounded.astype(np.float64) @ values) <= bound(x, values)
    ).all()
    np.testing.assert_array_equal(linear(x, w, precision="fast"), matmul(x, w.T, precision="fast"))


def test_precision_is_one_of_two():
    with pytest.raises(ValueError, match="'exact' or 'fast'"):
        matmul(cases.normal((2, 8)), cases.normal((8, 2)), precision="best")


@cases.some("block mxfp8 nvfp4 int4")
@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e-33, 1e33])
def test_activations_of_extraordinary_size(recipe, magnitude):
    """They take other kernels, which neither flush nor overflow early."""
    w = weight(recipe)
    values = dequantize(w).astype(np.float64).T
    for rows in (1, 20):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = cases.normal((rows, K))
            x[0, :3] = magnitude
            x = x.astype(dtype)
            exact = x.astype(np.float64) @ values
            assert (np.abs(matmul(x, w.T) - exact) <= bound(x.astype(np.float64), values) + 1e-37).all()


def test_threads_change_no_bit():
    before = breccia.num_threads()
    w = cast(cases.normal((301, 512), seed=1), breccia.Float8BlockScaling())
    results = []
    try:
        for threads in (1, 2, 3):
            breccia.set_num_threads(threads)
            results.append([matmul(cases.normal((rows, 512)), w.T) for rows in (1, 20, 130)])
    finally:
        breccia.set_num_threads(before)
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


# --- wherever a ScaledTensor goes ---------------------------------------------------------------------------------


@cases.ALL
@pytest.mark.in_turn
def test_trees_and_compilers_of_jax_take_it(recipe):
    jax = pytest.importorskip("jax")
    w = breccia.cast(jax.numpy.asarray(cases.normal((48, 256))), recipe)
    prepared, x = prepare(w), jax.numpy.asarray(cases.normal((3, 256), 1))
    expected = breccia.linear(x, w)
    np.testing.assert_array_equal(jax.jit(breccia.linear)(x, prepared), jax.jit(breccia.linear)(x, w))
    leaves, tree = jax.tree_util.tree_flatten(prepared)
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert isinstance(again, PreparedWeight) and again.packed_nbytes == prepared.packed_nbytes
    np.testing.assert_array_equal(breccia.linear(x, again), breccia.linear(x, prepared))
    np.testing.assert_allclose(breccia.linear(x, again), expected, rtol=1e-4, atol=1e-4)


@cases.ALL
@pytest.mark.in_turn
def test_trees_files_and_compilers_of_torch_take_it(recipe, tmp_path):
    torch = pytest.importorskip("torch")
    w = breccia.cast(torch.from_numpy(cases.normal((48, 256))), recipe)
    prepared, x = prepare(w), torch.from_numpy(cases.normal((3, 256), 1))
    torch._dynamo.reset()
    compiled = torch.compile(breccia.linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, prepared), breccia.linear(x, w), rtol=1e-4, atol=1e-4)
    again = torch.utils._pytree.tree_map(lambda part: part, prepared)
    assert isinstance(again, PreparedWeight) and again.packed_nbytes == prepared.packed_nbytes
    torch.save({"w": prepared}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)["w"]
    assert isinstance(loaded, PreparedWeight)
    for other in (again, loaded, again.T.T):
        assert torch.equal(breccia.linear(x, other), breccia.linear(x, prepared))
