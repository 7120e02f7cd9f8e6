# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors, tensors of parts, and the everyday spelling of the verbs: the values are those that NumPy's own
indexing, reshaping and joining make of the dequantized values."""

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import concatenate, dequantize, stack


def values(scaled):
    return np.asarray(scaled)


def same(scaled, expected):
    assert scaled.shape == expected.shape
    np.testing.assert_array_equal(values(scaled), expected)
    # Every invariant holds: the constructor takes the parts.
    again = breccia.from_buffer(
        scaled.data,
        scaled.scale,
        scaled.recipe,
        scaled.layout,
        scaled.zero_point,
        global_scale=scaled.global_scale,
        shape=scaled.shape,
    )
    np.testing.assert_array_equal(values(again), expected)


@pytest.fixture(params=cases.RECIPES.values(), ids=cases.RECIPES.keys())
def batch(request):
    """(2, 4·m, 2·k): whole blocks of every recipe."""
    recipe = request.param
    rows = 4 * getattr(recipe, "block_m", 1)
    return breccia.cast(cases.normal((2, rows, 2 * max(cases.block_width(recipe), 16))), recipe)


def test_index(batch):
    m, k = batch.shape[1] // 4, batch.shape[2] // 2
    for key in [
        0,
        -1,
        slice(1, None),
        (0, slice(m, 3 * m)),
        (slice(None), slice(m, None), slice(k, None)),
        (..., slice(0, k)),
        (1, ..., slice(k, 2 * k)),
        (slice(0, 1), slice(0, 0)),
    ]:
        same(batch[key], values(batch)[key])
        turned = values(batch).swapaxes(-1, -2)
        assert values(batch.mT[0, k:, m:]).shape == (k, 3 * m)
        np.testing.assert_array_equal(values(batch.mT[1, k:, m:]), turned[1, k:, m:])
    assert len(batch) == 2
    assert [part.shape for part in batch] == [batch.shape[1:]] * 2
    if m == 1:
        for rows in ([2, 0, 0], np.array([True, False, True, True]), np.array([-1])):
            same(batch[1, rows], values(batch)[1][rows])
            same(batch[:, rows], values(batch)[:, rows])


@pytest.mark.parametrize(
    ("recipe", "key", "error", "sentence"),
    [
        ("nvfp4", 3, ValueError, r"must be a slice, got 3.*q\[3:4\]"),
        ("nvfp4", (slice(None), slice(0, 24)), ValueError, "whole blocks of 16"),
        ("nvfp4", (slice(None), [0, 16]), ValueError, "slice of whole blocks"),
        ("fp8-block", slice(0, 100), ValueError, "whole blocks of 128"),
        ("fp8-block", [0, 1], ValueError, "whole blocks of 128"),
        ("fp8", (0, 0, 0), IndexError, "may have 2 parts, got 3"),
        ("fp8", 300, IndexError, "index 300 must be within axis 0 of 256"),
        ("fp8", [0, 256], IndexError, "indices 0 to 256 must be within axis 0 of 256"),
        ("fp8", [True], IndexError, "256 booleans"),
        ("fp8", "a", TypeError, "integers, slices and one array, got str"),
        ("fp8", ([0], [0]), TypeError, "one array, got more"),
    ],
)
def test_index_refuses_what_cuts_blocks(recipe, key, error, sentence):
    with pytest.raises(error, match=sentence):
        breccia.cast(cases.normal((256, 256)), recipe)[key]


def test_a_matrix_is_not_gone_through_row_by_row():
    with pytest.raises(TypeError, match="no parts to go through"):
        iter(breccia.cast(cases.normal((4, 256)), "mxfp8"))


def test_reshape(batch):
    e, m, k = batch.shape
    two = [(e, 1, m, k), (-1, m, k)]
    if getattr(batch.recipe, "block_m", 1) == 1 and batch.global_scale is None:
        two += [(e * m, k), (1, e * m // 2, -1, k)]
        if cases.block_width(batch.recipe) > 1:
            two += [(e * m * 2, k // 2)]
    for shape in two:
        same(batch.reshape(shape), values(batch).reshape(shape))
        same(batch.reshape(*shape), values(batch).reshape(shape))
    assert batch.reshape(batch.shape) is batch
    with pytest.raises(ValueError, match="shape must be of"):
        batch.reshape(3, -1)
    if cases.is_block(batch.recipe):
        with pytest.raises(ValueError, match="shape must"):
            batch.reshape(-1)
    with pytest.raises(ValueError, match="transposed view"):
        batch.mT.reshape(-1, 1)


def test_concatenate(batch):
    m, k = batch.shape[1] // 4, batch.shape[2] // 2
    a, b = batch[0], batch[1]
    if len(batch.scale.shape) == 0 or (a.global_scale is not None):
        other = breccia.cast(3 * cases.normal(a.shape), batch.recipe)
        with pytest.raises(ValueError, match=r"must have one (scale|global_scale) to be joined along axis 0"):
            concatenate([a, other])
        b = a
    same(concatenate([a, b]), np.concatenate([values(a), values(b)]))
    same(concatenate([a[: 2 * m], a[2 * m :]]), values(a))
    if not isinstance(batch.layout, breccia.PerChannel):
        same(concatenate([a[:, :k], a[:, k:]], axis=-1), values(a))
    same(stack([a, b]), np.stack([values(a), values(b)]))
    same(concatenate([batch, batch[:1]]), values(batch)[[0, 1, 0]])


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
@pytest.mark.in_turn
def test_parts_of_other_frameworks(batch, framework):
    pytest.importorskip(framework)
    a, k = batch[0], batch.shape[2] // 2
    there = a.to(framework)
    with_itself = [there, there[: a.shape[0] // 2]]
    same(concatenate(with_itself).to("numpy"), np.concatenate([values(a), values(a)[: a.shape[0] // 2]]))
    if np.asarray(a.scale).size != a.shape[0]:  # one scale per row has no parts along it
        same(concatenate([there[:, :k], there[:, k:]], axis=-1).to("numpy"), values(a))


def test_global_scales_of_a_batch_stay_apart():
    parts = [breccia.cast(size * cases.normal((4, 32)), "nvfp4") for size in (1, 100)]
    made = stack(parts)
    assert made.global_scale.shape == (2, 1, 1)
    same(made, np.stack([values(part) for part in parts]))
    assert made[1] == parts[1]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda q: [], "tensors must have one tensor or more"),
        (lambda q: [q, q.T], r"tensors\[1\] must not be a transposed view"),
        (lambda q: [q, breccia.requantize(q, "fp8-row")], r"tensors\[1\]\.recipe must be that of tensors\[0\]"),
        (lambda q: [q, q[:, :32]], r"tensors\[1\] must have the shape \(4, 64\) but for axis 0"),
    ],
)
def test_concatenate_refuses(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        concatenate(make(breccia.cast(cases.normal((4, 64)), "mxfp8")))
    with pytest.raises(TypeError, match=r"tensors\[0\] must be a ScaledTensor"):
        concatenate([np.ones((2, 2))])


@peers.ALL
@pytest.mark.parametrize(
    "recipe", ["nvfp4", "mxfp8", "fp8", "int4:asym", "fp8-row", breccia.INT4Scaling(scale_dtype="bf16")]
)
def test_every_framework(peer, recipe):
    x = cases.normal((4, 256))
    q, ours = breccia.cast(peer.array(x), recipe), breccia.cast(x, recipe)
    for call in (
        lambda t: t[1:3],
        lambda t: t[[3, 0]],
        lambda t: t[:, 128:],
        lambda t: t.reshape(2, 2, 256),
        lambda t: concatenate([t, t]),
        lambda t: stack([t, t])[1],
    ):
        assert call(q).to("numpy") == call(ours)
    assert (q.size, len(q), str(q.dtype).rpartition(".")[2]) == (1024, 4, "float32")
    np.testing.assert_array_equal(q.numpy(), dequantize(ours))
    np.testing.assert_array_equal(peer.host(q.dequantize()), dequantize(ours))
    a, w = cases.normal((3, 256)), cases.normal((256, 3))
    assert type(q @ peer.array(w)) is type(peer.array(w))
    products = [(q, peer.array(w)), (q, q.T)]
    if peer.name != "mlx":  # whose arrays refuse other operands before Python asks those
        products.append((peer.array(a), q.T))
    for left, right in products:
        np.testing.assert_array_equal(peer.host(left @ right), peer.host(breccia.matmul(left, right)))
    text = q._repr_html_()
    assert "1,024" not in text.split("bytes")[0]
    assert f"{ours.nbytes:,}: " in text
    assert text == ours._repr_html_()


def test_products_keep_the_arrays_dtype():
    q = breccia.cast(cases.normal((4, 256)), "nvfp4")
    assert (cases.normal((2, 256)).astype(np.float16) @ q.T).dtype == np.float16
    assert (q @ np.ones((256, 2), np.int32)).dtype == np.float32
    assert np.matmul(np.ones((2, 256)), q.T).dtype == np.float64
    np.testing.assert_array_equal(np.add(q, 1), dequantize(q) + 1)
    np.testing.assert_array_equal(np.maximum.reduce(q), dequantize(q).max(0))


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=cases.RECIPES)
def test_tensors_without_values_are_shown(recipe):
    """As of a model that a notebook makes on torch's meta device."""
    torch = pytest.importorskip("torch")
    q = breccia.cast(torch.ones(128, 256, device="meta"), recipe)
    assert "rounding" in q._repr_html_()
    assert repr(q).startswith("breccia.ScaledTensor(shape=(128, 256)")


def test_a_strangers_tensor_is_shown():
    class Theirs:
        pass

    q = breccia.ScaledTensor(np.zeros((4, 8), np.uint8), np.float32(1), Theirs(), Theirs())
    assert "Theirs" in q._repr_html_()
